"""The random generators of devices while a layer is run again, with a stand-in for a GPU's."""

import pytest
import torch
from torch import Tensor

from torchfmri._tokens.rules.rerun import RunState


class StandIn:
    """Draws numbers by a seed and an offset, as the generator of a GPU does."""

    def __init__(self) -> None:
        self._seed, self._offset = 7, 0

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def manual_seed(self, seed: int) -> None:
        self._seed, self._offset = seed, 0

    def set_offset(self, offset: int) -> None:
        self._offset = offset

    def get_state(self) -> Tensor:
        return torch.tensor([self._seed, self._offset])

    def set_state(self, state: Tensor) -> None:
        self._seed, self._offset = state.tolist()

    def draw(self) -> float:
        found = torch.Generator().manual_seed(self._seed * 1_000 + self._offset)
        self._offset += 4
        return float(torch.rand((), generator=found))


def test_a_device_draws_the_same_numbers_again_and_goes_on_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = StandIn()
    monkeypatch.setattr(torch.cuda, "default_generators", (device,))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: device.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _: device.set_state(state))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device.draw()
    state = RunState.now(["cpu"], [torch.device("cuda", 0)])
    drawn = [device.draw(), device.draw(), float(torch.rand(()))]
    for _ in range(2):
        with state.restored():
            assert [device.draw(), device.draw(), float(torch.rand(()))] == drawn
            device.manual_seed(3)
    before = device.get_offset()
    assert device.initial_seed() == 7
    assert device.draw() not in drawn
    assert device.get_offset() == before + 4
