"""Losses that are functions: what is known of a bad step, with and without the batch told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri import Finding, Incidents, Monitor
from torchfmri.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::torchfmri.NonFiniteWarning")


def make() -> tuple[nn.Module, None, Any]:
    torch.manual_seed(0)
    return nn.Linear(8, 3), None, lambda output, target: F.mse_loss(output, target)


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1).sqrt().mean()


def make_distance() -> tuple[nn.Module, None, Any]:
    return make()[0], None, distance


def told_as(kind: str, x: Tensor, y: Tensor) -> Any:
    return {"pair": (x, y), "dict": {"x": x, "labels": y}, "three": (x, torch.arange(16), y)}[kind]


def skipped(folder: Path, kind: str, *, bad_x: bool = False, is_distance: bool = False) -> Finding:
    """The finding about one bad step, written to a folder."""
    model, _, loss = make_distance() if is_distance else make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(
        model, optimizer, on_nonfinite="skip", incidents=Incidents(folder, weights=True)
    )
    x, y = torch.randn(16, 8), torch.randn(16, 3)
    with monitor.step() as step:
        if bad_x:
            x[3, 2] = float("inf")
        output = model(x)
        y[7] = output[7].detach() if is_distance else float("nan")
        if kind:
            step.batch(told_as(kind, x, y))
        loss(output, y).backward()
        optimizer.step()
    return monitor.incidents[0].finding


@pytest.mark.parametrize("is_distance", [False, True])
def test_what_was_not_told_is_said_to_be_unknown(is_distance: bool, tmp_path: Path) -> None:
    found = skipped(tmp_path, "", is_distance=is_distance)
    assert found.problem == "nonfinite_backward"
    assert "The loss is code that the Monitor cannot run again" in found.text
    assert "or in targets that the Monitor was not told of" in found.text
    assert found.advice.startswith("Tell the Monitor the batch (step.batch((x, y))")


@pytest.mark.parametrize(
    ("kind", "name"), [("pair", "batch[1]"), ("dict", "'labels'"), ("three", "batch[2]")]
)
def test_a_replay_names_the_sample_of_a_told_target(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"The batch of step 0 holds NaN in sample 7 of {name}: 3 of 48 values, first at [7, 0]."
    assert skipped(tmp_path, kind).text.startswith(text)
    assert main(["replay", str(tmp_path), "--factory", "test_told_batches:make"]) == 1
    assert text in capsys.readouterr().out


def test_a_replay_names_the_sample_of_a_derivative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = skipped(tmp_path, "pair", is_distance=True)
    assert "targets" not in found.text
    assert main(["replay", str(tmp_path), "--factory", "test_told_batches:make_distance"]) == 1
    text = capsys.readouterr().out
    assert "the derivative of sqrt is infinite at 0" in text
    assert "It is in sample 7 of the batch." in text


@pytest.mark.parametrize(
    ("kind", "name"), [("pair", "batch[1]"), ("dict", "'labels'"), ("three", "batch[2]")]
)
def test_all_that_is_bad_in_a_batch_is_named(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = skipped(tmp_path, kind, bad_x=True)
    assert "holds inf in sample 3 of argument 0" in found.text
    assert found.text.endswith(f" Besides, {name} holds NaN in sample 7.")
    assert main(["replay", str(tmp_path), "--factory", "test_told_batches:make"]) == 1
    text = capsys.readouterr().out
    assert f"holds NaN in sample 7 of {name}" in text
    assert "Besides, argument 0 holds inf in sample 3." in text


def test_all_that_is_bad_is_named_with_a_loss_module(tmp_path: Path) -> None:
    model, criterion = make()[0], nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer, on_nonfinite="skip", loss=criterion)
    x, y = torch.randn(16, 8), torch.randn(16, 3)
    x[3, 2], y[5, 1] = float("inf"), float("nan")
    with monitor.step():
        criterion(model(x), y).backward()
        optimizer.step()
    text = monitor.incidents[0].finding.text
    assert "holds NaN in sample 5 of loss argument 1" in text
    assert text.endswith("Besides, argument 0 holds inf in sample 3.")
