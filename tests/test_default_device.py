"""What is ours works whatever `torch.set_default_device` says, as it does on a user's GPU.

The default device is "meta" here: a tensor of ours that is made there by mistake has no values.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchfmri

PACKAGE = Path(torchfmri.__file__).parent
MAKERS = frozenset(
    {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
    | {"tensor", "zeros"}
)
MODELS = ("llama", "gpt2", "mixtral")


def without_device(source: str) -> list[int]:
    """The lines in which torch makes a tensor and is not told where."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
        and not any(each.arg in ("device", None) for each in node.keywords)
    ]


def test_every_tensor_of_ours_is_told_its_device() -> None:
    """Not those of `routing`: its layers are made where the user's other layers are."""
    found = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in PACKAGE.rglob("*.py")
        if "routing" not in path.parts and (lines := without_device(path.read_text("utf-8")))
    }
    assert not found


def test_a_tensor_without_a_device_is_seen() -> None:
    source = "torch.ones(3)\ntorch.ones(3, device=x.device)\nx.new_ones(3)\ntorch.randn(2, dtype=d)"
    assert without_device(source) == [1, 4]


def build_classifier() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def read_token_gradients(model: nn.Module, ids: torch.Tensor, target: torch.Tensor) -> None:
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(ids), target).backward()
    assert tokens.norm().isfinite().all()
    assert tokens.gram().isfinite().all()
    assert tokens.project(4).isfinite().all()
    assert not tokens.coverage().missing
    tokens.verify()


def inspect(model: nn.Module, ids: torch.Tensor, target: torch.Tensor) -> None:
    inspector = torchfmri.Inspector(model)
    inspector.watch("*", what=["activations", "gradients"])
    found = inspector.run_inspection(ids, target=target, loss=loss_of)
    assert str(found.table())


def monitor(model: nn.Module, ids: torch.Tensor, target: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchfmri.Monitor(model, optimizer, histogram=True, on_nonfinite="raise") as watching:
        for _ in range(2):
            loss_of(model(ids), target).backward()
            watching.loss(1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert len(watching.history) == 2


def verify(model: nn.Module, ids: torch.Tensor, target: torch.Tensor) -> None:
    assert torchfmri.verify_gradients(model, ids, target=target, loss=loss_of).ok


@pytest.fixture
def elsewhere() -> Iterator[Callable[[], None]]:
    """Turns the default device to another one, until the test is over."""
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


@pytest.mark.parametrize("use", [read_token_gradients, inspect, monitor, verify])
def test_a_module_is_watched(use: Callable[..., None], elsewhere: Callable[[], None]) -> None:
    model, ids = build_classifier(), torch.randint(0, 20, (2, 5))
    target = torch.randint(0, 4, (2, 5))
    elsewhere()
    use(model, ids, target)


@pytest.mark.parametrize("per", [None, "position", "cached", "token_loss"])
@pytest.mark.parametrize("name", MODELS)
def test_a_language_model_is_scanned(
    name: str, per: Any, elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "_scan"))
    from scan_oracles import build, prompts

    model = build(name)
    options = {"per": per, "do_sample": False}
    expected = torchfmri.scan(model, None, prompts()[:2], 3, **options)
    elsewhere()
    found = torchfmri.scan(model, None, prompts()[:2], 3, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.tokens.ids.tolist() == other.tokens.ids.tolist()
        np.testing.assert_array_equal(one.voxels["activation"], other.voxels["activation"])
