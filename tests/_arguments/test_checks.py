"""Arguments that nobody can have meant are refused by every public entry point, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchfmri
from torchfmri import InspectionError
from torchfmri.__main__ import main
from torchfmri.statistics import calculate_channel_statistics, calculate_statistics

EACH = nn.CrossEntropyLoss(reduction="none")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


def x() -> Tensor:
    return torch.randn(5, 4)


def y() -> Tensor:
    return torch.randint(3, (5,))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def token_gradient(per: str) -> Any:
    net, data = nn.Linear(4, 3), torch.randn(2, 5, 4)
    with torchfmri.token_gradients(net, per=per, keep="factors") as tokens:
        losses = net(data).square().sum(-1)
        losses.sum().backward() if per == "position" else tokens.backward(losses)
    return tokens["weight"]


def tell_monitor(loss: Any) -> None:
    net = model()
    optimizer = sgd(net.parameters())
    with torchfmri.Monitor(net, optimizer).step() as step:
        net(x()).sum().backward()
        optimizer.step()
        step.loss(loss)


def diagnose(batches: Any = ..., loss: Any = None, step: Any = None, optimizer: Any = None) -> None:
    net = model()
    batches = [(x(), y())] if batches is ... else batches
    optimizer = optimizer or sgd(net.parameters())
    torchfmri.diagnose(net, batches, loss, optimizer, 2, step=step, show=False)


def inspect(loss: Any) -> None:
    inspector = torchfmri.Inspector(model())
    inspector.watch("*", "gradients")
    inspector.run_inspection(x(), target=y(), loss=loss)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "no model": (
        lambda: torchfmri.token_gradients(None),
        "model=None: give a model: an nn.Module",
    ),  # type: ignore[call-overload]
    "a class": (
        lambda: torchfmri.token_gradients(nn.Linear),  # type: ignore[call-overload]
        "Linear.*give a model: an nn.Module, not type: its instance, not its class",
    ),
    "no model, other losses": (
        lambda: torchfmri.token_gradients(None, per="token_loss"),  # type: ignore[call-overload]
        "model=None: give a model: an nn.Module",
    ),
    "no logits": (lambda: torchfmri.token_losses(None, None), "logits=None: give a tensor"),  # type: ignore[arg-type]
    "no labels": (
        lambda: torchfmri.token_losses(torch.randn(2, 3, 4), None),  # type: ignore[arg-type]
        "labels=None: give a tensor, token numbers",
    ),
    "mask of statistics": (
        lambda: calculate_statistics(x(), mask="x"),  # type: ignore[arg-type]
        "mask='x': give a tensor, booleans",
    ),
    "list as a mask": (
        lambda: calculate_statistics(x(), mask=[True] * 5),  # type: ignore[arg-type]
        r"mask=\[True, .*: give a tensor",
    ),
    "mask of units": (
        lambda: calculate_channel_statistics(x(), -1, mask="x"),  # type: ignore[arg-type]
        "mask='x': give a tensor",
    ),
    "mask of tokens": (lambda: token_gradient("position").sum(mask="x"), "mask='x': give a tensor"),
    "mask of losses": (
        lambda: token_gradient("token_loss").sum(mask="x"),
        "mask='x': give a tensor",
    ),
    "optimizer by name": (
        lambda: torchfmri.advise(model(), x(), "sum", "adam"),  # type: ignore[arg-type]
        "optimizer='adam' is not a torch.optim.Optimizer.*torch.optim.Adam",
    ),
    "function that makes none": (
        lambda: torchfmri.advise(model(), x(), "sum", lambda parameters: 3),  # type: ignore[arg-type,return-value]
        "is neither an optimizer nor a function of parameters that returns one",
    ),
    "function that makes none for a diagnosis": (
        lambda: diagnose(optimizer=lambda parameters: 3),
        "is neither an optimizer nor a function of parameters that returns one",
    ),
    "scaler": (
        lambda: torchfmri.Monitor(model(), scaler="x"),
        "scaler='x': give torch.amp.GradScaler",
    ),
    "loss of an inspection": (lambda: inspect(EACH), r"one number, but it is \(5,\)"),
    "complex loss": (lambda: inspect(lambda o, _: o.sum() * 1j), "a real number, but it is"),
    "loss of a monitor": (lambda: tell_monitor(torch.ones(5)), r"one number, but it is \(5,\)"),
    "words for a loss": (lambda: tell_monitor("x"), "one number, but it is str"),
    "loss of a diagnosis": (lambda: diagnose(loss=EACH), r"one number, but it is \(5,\)"),
    "loss of a step": (
        lambda: diagnose(step=lambda net, batch, _: EACH(net(batch[0]), batch[1])),
        r"one number, but it is \(5,\)",
    ),
    "name of a loss": (lambda: diagnose(loss="ce"), "loss='ce': give a loss module or function"),
    "no batches": (lambda: diagnose(None), "batches=None: give batches to train on"),
    "loss of a cost": (
        lambda: torchfmri.cost(model(), x(), EACH, target=y()),
        r"one number, but it is \(5,\)",
    ),
    "rounds": (lambda: torchfmri.cost(model(), x(), rounds="a"), "rounds='a': give the times"),  # type: ignore[arg-type]
    "rounds of advice": (
        lambda: torchfmri.advise(model(), x(), rounds=0),
        "rounds=0: give the times",
    ),
    "combinations": (
        lambda: torchfmri.advise(model(), x(), combine=-1),
        "combine=-1: give the most",
    ),
    "one size": (
        lambda: torchfmri.cost(model(), x(), sizes={"batch": 3}),  # type: ignore[dict-item]
        r"sizes\['batch'\]=3: give two whole numbers or more",
    ),
    "word for a size": (
        lambda: torchfmri.cost(model(), x(), sizes={"batch": (1, "two")}),  # type: ignore[dict-item]
        r"sizes\['batch'\]=\(1, 'two'\): give two whole numbers",
    ),
}
for _name, _data in {
    "nothing": None,
    "text": "x",
    "number": 3,
    "array": torch.ones(2).numpy(),
}.items():
    for _call in (torchfmri.cost, torchfmri.advise):
        CASES[f"{_name} to {_call.__name__}"] = (
            lambda call=_call, data=_data: call(model(), data, "sum"),  # type: ignore[misc]
            "holds no tensor. Pass what the model is called with",
        )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_wrong_argument_is_refused_by_name(case: tuple[Callable[[], object], str]) -> None:
    run, said = case
    with pytest.raises(InspectionError, match=said):
        run()


@pytest.mark.parametrize("loss", [1.5, 2, torch.tensor(1.5), torch.tensor([1.5])])
def test_one_number_in_any_form_is_a_loss(loss: Any) -> None:
    tell_monitor(loss)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "0"], "steps=0: give a whole number of at least 1"),
        (["--steps", "-3"], "steps=-3"),
        (["--batch", "0"], "batch=0: give a whole number of at least 1"),
        (["--device", "zz"], "device='zz' cannot be used"),
        (["--blocks", "0"], "blocks=0"),
    ],
)
def test_routing_command_refuses(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["routing", *options, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torchfmri routing: error: ")
    assert said in line
    assert not out.exists(), "nothing is begun"
