"""A diagnosis trains copies that share their memory where the originals do."""

import copy

import pytest
import torch
from torch import Tensor, nn

from torchfmri import diagnose


class Tied(nn.Module):
    """A table and a head that are one, tied in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        if how == "parameter":
            self.head.weight = self.table.weight
        elif how == "data":
            self.head.weight.data = self.table.weight.data
        elif how == "view":
            self.head.weight = nn.Parameter(self.table.weight.detach().view(20, 8))
        else:
            self.head.weight.data.copy_(self.table.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).flatten(0, 1)  # type: ignore[no-any-return]


def tokens() -> list[tuple[Tensor, Tensor]]:
    found = [torch.randint(0, 20, (16, 6)) for _ in range(12)]
    return [(each, each.flatten()) for each in found]


@pytest.mark.parametrize("how", ["parameter", "data", "view", "copy"])
def test_only_copies_are_said_to_drift_apart(how: str) -> None:
    model = Tied(how)
    optimizer = torch.optim.Adam(model.parameters())
    found = diagnose(model, tokens(), nn.CrossEntropyLoss(), optimizer, 12, show=False)
    assert [each.problem for each in found] == (["untied_weights"] if how == "copy" else [])


class Flat(nn.Module):
    """Weights that are parts of one tensor, which the model holds as a buffer."""

    flat: Tensor

    def __init__(self, inside: bool) -> None:
        super().__init__()
        flat = 0.1 * torch.randn(144)
        self.first, self.last = nn.Linear(8, 16, bias=False), nn.Linear(16, 1, bias=False)
        self.first.weight = nn.Parameter(flat[:128].view(16, 8))
        self.last.weight = nn.Parameter(flat[128:].view(1, 16))
        if inside:
            self.register_buffer("flat", flat)
        else:
            OUTSIDE.append(flat)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())  # type: ignore[no-any-return]


OUTSIDE: list[Tensor] = []


def numbers() -> list[tuple[Tensor, Tensor]]:
    found = [torch.randn(8, 8) for _ in range(6)]
    return [(each, each[:, :1]) for each in found]


def test_the_copy_trains_as_the_original_would() -> None:
    model = Flat(inside=True)
    before = copy.deepcopy(model.state_dict())
    seen: list[Tensor] = []

    def step(twin: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.SGD) -> Tensor:
        loss = nn.functional.mse_loss(twin(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(torch.cat([each.detach().flatten() for each in twin.parameters()]))
        assert torch.equal(seen[-1], twin.flat)
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = diagnose(model, numbers(), None, optimizer, 6, step=step, show=False)
    assert len(seen) == 6
    assert not torch.equal(seen[0], seen[-1])
    assert found.notes == ()
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


def test_memory_that_is_shared_with_the_outside_is_noted() -> None:
    OUTSIDE.clear()
    model = Flat(inside=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = diagnose(model, numbers(), nn.MSELoss(), optimizer, 6, show=False)
    assert len(found.notes) == 1
    assert "'first.weight', 'last.weight'" in found.notes[0]
