"""Backward passes that are compiled (compiled autograd): nothing of ours raises in them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from torchfmri import Inspector, Monitor, token_gradients

Context = Callable[[], AbstractContextManager[None]]


def compiled() -> AbstractContextManager[None]:
    return compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager"))


@pytest.fixture(autouse=True)
def _nothing_is_left_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def subject() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).double()
    return model, torch.randn(1, 6, 4, dtype=torch.float64)


def monitored(around: Context) -> dict[str, Tensor]:
    model, x = subject()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, on_nonfinite="raise")
    with around():
        for _ in range(2):
            with monitor.step():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert monitor.history.missing == {}
    return {
        what: torch.from_numpy(monitor.history.matrix(what, "rms")[1])
        for what in ("gradients", "parameter_gradients")
    }


def by_token(around: Context) -> dict[str, Tensor]:
    model, x = subject()
    with around(), token_gradients(model) as found:
        model(x).square().sum().backward()
    return {name: found[name].materialise() for name in found}


def inspected(around: Context) -> dict[str, Tensor]:
    model, x = subject()
    inspector = Inspector(model)
    inspector.watch("*", what=["gradients", "parameter_gradients"])
    with around(), inspector.recording(keep="tensors") as found:
        model(x).square().sum().backward()
    return {layer: found[layer].gradients for layer in ("0", "1", "2")}


@pytest.mark.parametrize("look", [monitored, by_token, inspected])
def test_gradients_are_those_of_a_plain_backward_pass(
    look: Callable[[Context], dict[str, Tensor]],
) -> None:
    plain, found = look(nullcontext), look(compiled)
    assert plain.keys() == found.keys()
    for name, each in plain.items():
        assert torch.allclose(each, found[name], rtol=1e-12), name
