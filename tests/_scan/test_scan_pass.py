"""The hooks of the pass for gradients: outputs of every form against dL/d of a zero added there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracles import DEVICE
from torch import Tensor, nn
from torch.nn import functional as F

import torchfmri
from torchfmri._scan.run.gradient_pass import PassSink

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


class Pair(nn.Linear):
    """Returns a tuple."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), 0


class Forms(nn.Module):
    """Language model whose layers return a view that is written into, a tuple, their input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.written = nn.Linear(8, 8)  # with a bias: a view of what it computed
        self.pair = Pair(8, 8)
        self.plain = nn.Linear(8, 8, bias=False)
        self.same = nn.Identity()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = self.written(x)
        x[..., :1].add_(1)
        x = x + self.pair(x)[0].tanh()
        x = self.same(x + self.plain(x))
        found: Tensor = self.head(self.norm(x).sin())
        return found


NAMES = ("embed", "written", "pair", "plain", "same", "norm", "head")


def oracle(dtype: torch.dtype) -> dict[str, np.ndarray[Any, Any]]:
    """The norm of dL/d output at each token, by a zero that is added to the output."""
    model, ids = Forms().to(DEVICE, dtype), torch.tensor([IDS], device=DEVICE)
    zeros: dict[str, Tensor] = {}
    for name in NAMES:

        def add(_: nn.Module, __: object, output: Any, name: str = name) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            zeros[name] = torch.zeros_like(first).requires_grad_()
            changed = first + zeros[name]
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        model.get_submodule(name).register_forward_hook(add)
    logits = model(ids)
    F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
    return {name: each.grad[0].norm(dim=-1).cpu().numpy() for name, each in zeros.items()}  # type: ignore[index]


def scanned(dtype: torch.dtype) -> torchfmri.Scan:
    return torchfmri.scan(Forms().to(DEVICE, dtype), None, IDS, 0, layers=list(NAMES))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
def test_each_form_of_output_has_its_own_gradient(dtype: torch.dtype, close: float) -> None:
    found, expected = scanned(dtype), oracle(dtype)
    names, values = found.values("gradient", by="layer")
    assert sorted(names) == sorted(NAMES)
    assert not found.meta["missed"]
    for column, name in enumerate(names):
        ours, theirs = values[:-1, column], expected[name][:-1]
        np.testing.assert_allclose(ours, theirs, rtol=close, err_msg=name)
        assert not np.allclose(ours, np.roll(theirs, 1), rtol=1e-3), f"{name}: any order would do"


def test_a_gradient_that_cannot_be_read_is_missing_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = scanned(torch.float32)
    reduce = PassSink.reduce_gradient

    def fails(self: PassSink, layer: Any, gradient: Tensor, rows: Tensor) -> None:
        if layer.name in ("plain", "pair"):
            raise RuntimeError("no memory")
        reduce(self, layer, gradient, rows)

    monkeypatch.setattr(PassSink, "reduce_gradient", fails)
    found = scanned(torch.float32)
    assert set(found.meta["missed"]) == {"plain", "pair"}
    assert all("no memory" in each for each in found.meta["missed"].values())
    names, values = found.values("gradient", by="layer")
    _, expected = whole.values("gradient", by="layer")
    for column, name in enumerate(names):
        if name in found.meta["missed"]:
            assert np.isnan(values[:, column]).all()
        else:
            np.testing.assert_array_equal(values[:, column], expected[:, column])
