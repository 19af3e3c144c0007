"""Figures of a history: what is drawn, and that nothing else changes."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from torchfmri import Monitor
from torchfmri._records.history import History, Series, Step
from torchfmri.exceptions import InspectionError, LayerNotFoundError
from torchfmri.statistics import calculate_statistics

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib.colors import LogNorm, SymLogNorm  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from torchfmri.visualization.history_plots import plot_history  # noqa: E402


def make_history(
    layers: int = 5, steps: int = 40, decades: float = 0.0, nan: bool = False
) -> History:
    history = History(1000)
    torch.manual_seed(0)
    for number in range(steps):
        found = {}
        for layer in range(layers):
            values = torch.randn(50) * 10.0 ** (-decades * layer / layers)
            if nan and layer == 2 and 10 <= number < 20:
                values[0] = math.nan
            if not (nan and layer == 4 and number < 5):
                found[Series(f"layers.{layer}", "activations")] = calculate_statistics(values)
        step = Step(number, loss=math.nan if nan and number == 12 else 1.0 / (number + 1))
        step.parameters, step.updates = ("w",), np.array([[0.01], [1.0]])
        history.append(step, found)
    return history


def test_heat_map_shows_the_values_in_model_order(tmp_path: Path) -> None:
    history = make_history()
    ax = plot_history(history, "rms")
    (mesh,) = ax.collections[:1]
    assert np.allclose(mesh.get_array(), history.matrix("activations", "rms")[1])
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"layers.{i}" for i in range(5)]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    loss = next(each for each in ax.figure.axes if each.get_ylabel() == "loss")
    assert np.allclose(loss.lines[0].get_ydata(), history.loss)
    assert loss.get_xlim() == ax.get_xlim()
    ax.figure.savefig(tmp_path / "map.png")


def test_scales_follow_the_range() -> None:
    assert not isinstance(plot_history(make_history()).collections[0].norm, LogNorm)
    assert isinstance(plot_history(make_history(decades=6)).collections[0].norm, LogNorm)
    signed = plot_history(make_history(decades=6), "mean").collections[0].norm
    assert isinstance(signed, SymLogNorm)
    assert signed.vmin == -signed.vmax
    lines = plot_history(make_history(decades=6), layers="*")
    assert lines.get_yscale() == "log"
    assert plot_history(make_history(decades=6), "mean", layers="*").get_yscale() == "symlog"
    assert plot_history(make_history(), layers="*").get_yscale() == "linear"


@pytest.mark.parametrize("layers", [None, "*"])
def test_nan_and_absence_are_marked(layers: str | None, tmp_path: Path) -> None:
    ax = plot_history(make_history(nan=True), layers=layers)
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "NaN or Inf" in legend
    if layers is None:
        assert "not seen" in legend
        assert ax.patch.get_hatch()
        marks = ax.collections[1].get_offsets()
        assert set(marks[:, 1]) == {2}
        assert marks[:, 0].min() == 10
    loss = next(each for each in ax.figure.axes if each.get_ylabel() == "loss")
    assert any("1 step" in text.get_text() for text in loss.texts)
    ax.figure.savefig(tmp_path / "nan.png")


def test_lines_of_chosen_layers() -> None:
    history = make_history()
    ax = plot_history(history, "std", layers=["layers.1", "layers.3"])
    assert [line.get_label() for line in ax.lines] == ["layers.1", "layers.3"]
    assert np.allclose(ax.lines[1].get_ydata(), history.values("layers.3", field="std"))
    assert len({line.get_color() for line in ax.lines}) == 2


def test_updates() -> None:
    ax = plot_history(make_history(), what="updates", layers="w")
    assert ax.get_ylabel() == "update / weight"
    assert np.allclose(ax.lines[0].get_ydata(), 0.01)


def test_many_layers_and_odd_sizes(tmp_path: Path) -> None:
    ax = plot_history(make_history(layers=300, steps=6))
    assert len(ax.get_yticks()) <= 56
    assert "one in 6 layers" in ax.get_ylabel()
    plot_history(make_history(layers=1, steps=1)).figure.savefig(tmp_path / "one.png")
    with pytest.raises(InspectionError, match="300 lines cannot be told apart"):
        plot_history(make_history(layers=300, steps=2), layers="*")


def test_loss_not_seen_is_said() -> None:
    history = History(10)
    history.append(Step(0), {Series("a", "activations"): calculate_statistics(torch.ones(3))})
    ax = plot_history(history)
    loss = next(each for each in ax.figure.axes if each.get_ylabel() == "loss")
    assert loss.texts[0].get_text() == "loss not seen"
    alone = plot_history(history, loss=False)
    assert not [each for each in alone.figure.axes if each.get_ylabel() == "loss"]


def test_draws_on_the_axes_given_and_changes_no_settings() -> None:
    before = dict(matplotlib.rcParams)
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plot_history(make_history(), ax=left) is left
    free = Figure().add_axes((0.1, 0.1, 0.8, 0.8))
    assert plot_history(make_history(), ax=free, layers="*.1") is free
    assert right in figure.axes
    assert dict(matplotlib.rcParams) == before


def test_all_nan_is_drawn(tmp_path: Path) -> None:
    history = History(10)
    found = calculate_statistics(torch.full((3,), math.nan))
    for number in range(3):
        history.append(Step(number, loss=math.nan), {Series("a", "activations"): found})
    for layers in (None, "a"):
        plot_history(history, layers=layers).figure.savefig(tmp_path / "nan.png")


def test_mistakes_are_explained() -> None:
    assert "No step was watched" in plot_history(History()).texts[0].get_text()
    with pytest.raises(LayerNotFoundError, match=r"layerz"):
        plot_history(make_history(), layers="layerz.*")
    with pytest.raises(InspectionError, match="no statistic 'sdt'"):
        plot_history(make_history(), "sdt")


def test_monitor_plots() -> None:
    model = torch.nn.Linear(2, 2)
    monitor = Monitor(model)
    with monitor.step():
        model(torch.ones(1, 2)).sum().backward()
    assert monitor.plot("rms", "gradients").get_title(loc="left").startswith("rms of gradients")
