import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from torchfmri import Inspection, InspectionError, Inspector, LayerNotFoundError
from torchfmri.statistics import calculate_statistics
from torchfmri.visualization import plots

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402


class Values(nn.Module):
    """Puts out what it is given, through one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 1.0)


def inspect_values(values: torch.Tensor, **keep: str) -> Inspection:
    inspector = Inspector(Values(), **keep)
    inspector.watch("layer")
    return inspector.run_inspection(values)


def inspect_cnn(scale: float = 1.0, keep: str = "tensors", layers: str = "*") -> Inspection:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 48, 3)
    )
    with torch.no_grad():
        model[0].bias[1] = -1e3
        model[3].weight *= scale
    inspector = Inspector(model, keep=keep)
    inspector.watch(layers, what=["activations", "gradients"])
    return inspector.run_inspection(torch.randn(4, 2, 6, 8), loss="sum")


class Deep(nn.Module):
    def __init__(self, depth: int = 60, broken: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "fc": nn.Linear(8, 8)}) for _ in range(depth)
        )
        self.head, self.broken = nn.Linear(8, 2), broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + layer["fc"](layer["norm"](x))
            x = x * float("nan") if index == self.broken else x
        return self.head(x)


def inspect_deep(depth: int = 60, broken: int | None = None, **keep: str) -> Inspection:
    torch.manual_seed(0)
    inspector = Inspector(Deep(depth, broken), **keep)
    inspector.watch("*", exclude="layers*[0-9]")
    return inspector.run_inspection(torch.randn(4, 8))


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def labels(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


CALLS: dict[str, Callable[..., Axes]] = {
    "histogram": lambda **on: plots.plot_histogram(inspect_cnn(), "0", **on),
    "statistics": lambda **on: plots.plot_statistics(inspect_cnn(), **on),
    "feature_maps": lambda **on: plots.plot_feature_maps(inspect_cnn(), "0", **on),
    "compare": lambda **on: plots.plot_compare(inspect_cnn(), inspect_cnn(2.0), **on),
}


@pytest.mark.parametrize("draw", CALLS.values(), ids=CALLS)
def test_draws_on_the_axes_it_is_given(draw: Callable[..., Axes]) -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert draw(ax=right) is right
    assert right.get_title()
    assert not left.has_data()
    figure.canvas.draw()


@pytest.mark.parametrize("draw", CALLS.values(), ids=CALLS)
def test_draws_on_axes_that_belong_to_no_grid(draw: Callable[..., Axes]) -> None:
    ax = Figure().add_axes((0.1, 0.1, 0.8, 0.8))
    assert draw(ax=ax) is ax
    ax.figure.canvas.draw()


@pytest.mark.parametrize("draw", CALLS.values(), ids=CALLS)
def test_leaves_no_trace_in_matplotlib(draw: Callable[..., Axes]) -> None:
    from matplotlib import pyplot

    before, settings = pyplot.get_fignums(), dict(matplotlib.rcParams)
    ax = draw()
    ax.figure.canvas.draw()
    assert isinstance(ax, Axes)
    assert pyplot.get_fignums() == before
    assert dict(matplotlib.rcParams) == settings


def test_importing_the_package_imports_no_matplotlib() -> None:
    code = "import sys, torchfmri; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("draw", CALLS.values(), ids=CALLS)
def test_without_matplotlib_the_error_says_what_to_install(
    draw: Callable[..., Axes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'torchfmri\[plots\]'"):
        draw()


# -- plot_histogram --------------------------------------------------------------------------------


def test_bars_are_the_counts_of_the_data() -> None:
    values = torch.tensor([0.5] * 3 + [1.5] * 7 + [3.5] * 2)
    ax = plots.plot_histogram(inspect_values(values), "layer", bins=4, limits=(0.0, 4.0))
    assert [bar.get_height() for bar in ax.patches] == [3, 7, 0, 2]
    assert [bar.get_x() for bar in ax.patches] == [0, 1, 2, 3]


def test_bars_follow_numpy_on_ordinary_data() -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    ax = plots.plot_histogram(inspect_values(values), "layer", bins=32)
    heights = np.array([bar.get_height() for bar in ax.patches])
    expected, _ = np.histogram(values.numpy(), 32)
    assert heights.sum() == pytest.approx(20_000)
    assert np.abs(heights - expected).max() < 0.01 * 20_000


def test_histogram_says_what_it_shows() -> None:
    ax = plots.plot_histogram(inspect_cnn(), "0", "gradients")
    assert ax.get_title() == "gradients of '0' (Conv2d)"
    assert ax.get_xlabel() == "dL/d output"
    assert ax.get_ylabel() == "number of values"


def test_values_far_out_are_left_out_in_words() -> None:
    values = torch.cat([torch.linspace(-1, 1, 10_000), torch.tensor([1e4, -1e4])])
    ax = plots.plot_histogram(inspect_values(values), "layer")
    assert ax.get_xlim()[1] < 2
    shown = sum(bar.get_height() for bar in ax.patches)
    (summary,) = texts(ax)
    assert f"{10_002 - round(shown)} beyond the axis" in summary
    assert "max 10000" in summary


def test_a_bar_that_is_cut_says_how_high_it_is() -> None:
    values = torch.cat([torch.zeros(9000), torch.rand(1000, generator=torch.Generator())])
    ax = plots.plot_histogram(inspect_values(values), "layer", bins=10)
    tallest = max(bar.get_height() for bar in ax.patches)
    assert tallest > 9000
    assert ax.get_ylim()[1] < tallest
    assert f"cut: {tallest:,.0f} in this bar" in texts(ax)
    whole = plots.plot_histogram(inspect_values(values), "layer", bins=10, log=True)
    assert whole.get_yscale() == "log"
    assert whole.get_ylim()[1] >= tallest


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([float("nan")] * 4, "all NaN: nothing to draw"),
        ([0.0] * 4, "all zero"),
        ([1.0, float("nan"), float("inf")], "1 NaN\n1 Inf"),
        ([], "empty: nothing to draw"),
        ([3.0], "1 values"),
    ],
)
def test_histograms_of_difficult_values(values: list[float], words: str) -> None:
    ax = plots.plot_histogram(inspect_values(torch.tensor(values)), "layer")
    assert words in "\n".join(texts(ax))
    ax.figure.canvas.draw()


def test_histogram_of_a_layer_that_is_not_there() -> None:
    with pytest.raises(LayerNotFoundError, match="Nearest: 'layer'"):
        plots.plot_histogram(inspect_values(torch.ones(3)), "layr")
    with pytest.raises(InspectionError, match="was not watched"):
        plots.plot_histogram(inspect_values(torch.ones(3)), "layer", "gradients")


def test_histogram_of_a_tensor_or_of_statistics() -> None:
    from torchfmri.visualization import plot_histogram

    values = torch.tensor([0.5, 1.5, 1.5, 3.5])
    for data in (values, values.requires_grad_(), calculate_statistics(values)):
        ax = plot_histogram(data, bins=4, limits=(0.0, 4.0))
        assert [bar.get_height() for bar in ax.patches] == pytest.approx([1, 2, 0, 1])
        assert "4 values" in texts(ax)[0]
    assert plot_histogram(values, "scores").get_title() == "scores"
    inspection = inspect_values(values)
    assert plot_histogram(inspection, "layer").get_title() == "activations of 'layer' (Identity)"
    with pytest.raises(InspectionError, match=r"shows one layer; name one of \['layer'\]"):
        plot_histogram(inspection)
    with pytest.raises(
        InspectionError, match=r"from a tensor, not from list\. Give a torch\.Tensor"
    ):
        plot_histogram([1.0, 2.0])  # type: ignore[arg-type]


# -- plot_statistics -------------------------------------------------------------------------------


def test_statistics_are_those_of_the_layers_in_the_order_of_execution() -> None:
    inspection = inspect_cnn()
    ax = plots.plot_statistics(inspection)
    assert labels(ax) == ["0 Conv2d", "1 ReLU", "2 Flatten", "3 Linear"]
    (means,) = [line for line in ax.lines if line.get_label() == "mean"]
    expected = [inspection.statistics(layer).mean for layer in inspection]
    assert list(means.get_xdata()) == expected
    widest = ax.patches[:4]
    for bar, layer in zip(widest, inspection, strict=True):
        statistics = inspection.statistics(layer)
        assert bar.get_x() == pytest.approx(statistics.quantile(0.01))
        assert bar.get_x() + bar.get_width() == pytest.approx(statistics.quantile(0.99))
    assert ax.yaxis_inverted()


def test_layers_can_be_chosen() -> None:
    inspection = inspect_deep(4)
    ax = plots.plot_statistics(inspection, layers=["*.fc", "head"])
    assert labels(ax) == [f"layers.{index}.fc" for index in range(4)] + ["head"]
    with pytest.raises(LayerNotFoundError):
        plots.plot_statistics(inspection, layers="*.attention")


def test_nan_and_dead_layers_are_marked_in_words() -> None:
    inspection = inspect_deep(5, broken=2)
    ax = plots.plot_statistics(inspection)
    assert "all NaN (5 layers)" in texts(ax)
    dead = inspect_values(torch.zeros(9))
    assert texts(plots.plot_statistics(dead)) == ["dead: all zero"]
    part = inspect_values(torch.tensor([1.0, 2.0, 3.0, float("nan")]))
    assert texts(plots.plot_statistics(part)) == ["1 NaN (25%)"]


def test_many_layers_stand_together_by_kind() -> None:
    ax = plots.plot_statistics(inspect_deep(60))
    assert labels(ax) == ["layers.*.norm", "layers.*.fc", "head"]
    assert len(ax.patches) == 3 * 121
    assert ax.figure.get_size_inches()[1] <= 15


def test_layers_of_different_size_get_a_logarithmic_axis() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.mul_(1e4)
    inspection = Inspector(model).run_inspection(torch.randn(8, 4))
    ax = plots.plot_statistics(inspection)
    assert ax.get_xscale() == "symlog"
    assert 3 <= len(ax.get_xticks()) <= 8
    assert plots.plot_statistics(inspection, layers="0").get_xscale() == "linear"


def test_layers_without_values_are_counted_not_hidden() -> None:
    inspector = Inspector(Deep(2))
    inspector.watch("*")  # the containers are never called
    ax = plots.plot_statistics(inspector.run_inspection(torch.randn(4, 8)))
    assert "3 layers not captured: see inspection.missing" in ax.get_xlabel()


def test_statistics_of_what_was_not_watched() -> None:
    with pytest.raises(InspectionError, match=r"inspector.watch\('\*', what='gradients'\)"):
        plots.plot_statistics(inspect_values(torch.ones(3)), "gradients")
    with pytest.raises(InspectionError, match="Did you mean 'gradients'"):
        plots.plot_statistics(inspect_values(torch.ones(3)), "gradient")


# -- plot_feature_maps -----------------------------------------------------------------------------


def test_feature_maps_show_the_tensor() -> None:
    inspection = inspect_cnn()
    ax = plots.plot_feature_maps(inspection, "0", sample=2, channels=[3, 0])
    image = ax.images[0].get_array()
    tensor = inspection["0"].activations[2].double()
    assert np.array_equal(image[:6, :8], tensor[3])
    assert np.array_equal(image[:6, -8:], tensor[0])
    assert [text for text in texts(ax) if text.isdigit()] == ["3", "0"]
    assert ax.get_title() == "activations of '0' (Conv2d): 2 of 5 channels, sample 2"


def test_feature_maps_share_one_scale_that_is_even_around_zero() -> None:
    inspection = inspect_cnn()
    signed = plots.plot_feature_maps(inspection, "0", channels=[0, 2]).images[0]
    low, high = signed.get_clim()
    assert low == -high
    positive = plots.plot_feature_maps(inspection, "1").images[0]
    assert positive.get_clim()[0] == 0


def test_dead_and_broken_channels_are_named() -> None:
    assert "dead: all zero" in texts(plots.plot_feature_maps(inspect_cnn(), "1"))
    values = torch.zeros(1, 1, 3, 3)
    values[0, 0, 1, 1] = float("nan")
    ax = plots.plot_feature_maps(inspect_values(values, keep="tensors"), "layer")
    assert "1 NaN or Inf" in texts(ax)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": "3"}, r"shape \(4, 3\); feature maps need \(batch, channels"),
        ({"layer": "0", "sample": 4}, "no sample 4: there are 4"),
        ({"layer": "0", "channels": [5]}, "no channel 5: there are 5"),
        ({"layer": "0", "channels": 0}, "shows nothing"),
        ({"layer": "0", "call": 1}, "has 1 call"),
    ],
)
def test_feature_maps_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(InspectionError, match=message):
        plots.plot_feature_maps(inspect_cnn(), **options)


def test_feature_maps_need_tensors_and_say_so() -> None:
    with pytest.raises(InspectionError, match="keep='tensors'"):
        plots.plot_feature_maps(inspect_cnn(keep="statistics"), "0")


# -- plot_compare ----------------------------------------------------------------------------------


def test_compare_shows_the_relative_difference_of_kept_tensors() -> None:
    ax = plots.plot_compare(inspect_cnn(), inspect_cnn(1.5), names=("old", "new"))
    (panel,) = [each for each in ax.figure.axes if each is not ax]
    shown = panel.lines[0].get_xdata()
    assert np.isnan(shown[:3]).all()
    a, b = (each["3"].activations.double() for each in (inspect_cnn(), inspect_cnn(1.5)))
    assert shown[3] == pytest.approx(float((a - b).norm() / a.norm()))
    assert texts(panel) == ["equal (3 layers)"]
    assert "|old − new| / |old|" in panel.get_xlabel()


def test_compare_of_statistics_alone() -> None:
    ax = plots.plot_compare(inspect_cnn(keep="statistics"), inspect_cnn(keep="statistics"))
    assert ax.figure.axes == [ax]
    handles, names = ax.get_legend_handles_labels()
    assert names == ["a", "b"]
    assert len(handles) == 2


def test_unmatched_layers_are_named() -> None:
    ax = plots.plot_compare(inspect_cnn(), inspect_cnn(layers="[01]"))
    assert ax.get_title() == "activations of a and b\nonly in a: 2, 3"
    with pytest.raises(InspectionError, match="No layer is in both"):
        plots.plot_compare(inspect_cnn(), inspect_deep(1))


def test_compare_says_where_one_is_not_finite_or_zero() -> None:
    good, zero = torch.tensor([1.0, 2.0]), torch.zeros(2)
    cases = {
        "NaN or Inf in one only": (good, torch.tensor([1.0, float("nan")])),
        "a is all zero": (zero, good),
        "equal": (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
        "shapes differ": (good, torch.ones(3)),
    }
    for words, values in cases.items():
        ax = plots.plot_compare(*(inspect_values(each, keep="tensors") for each in values))
        assert texts(ax.figure.axes[-1]) == [words]
    ax = plots.plot_compare(inspect_values(zero), inspect_values(good))
    assert texts(ax) == ["a: dead: all zero"]


def test_compare_many_layers() -> None:
    ax = plots.plot_compare(inspect_deep(60, keep="tensors"), inspect_deep(60, keep="tensors"))
    assert labels(ax) == ["layers.*.norm", "layers.*.fc", "head"]
    assert texts(ax.figure.axes[-1]) == ["equal (60 layers)", "equal (60 layers)", "equal"]


def test_methods_of_the_inspector_draw_the_latest_inspection() -> None:
    inspector = Inspector(nn.Sequential(nn.Conv2d(1, 2, 3)), keep="tensors")
    inspector.run_inspection(torch.randn(1, 1, 5, 5))
    assert "'0'" in inspector.plot_histogram("0").get_title()
    assert "activations" in inspector.plot_statistics().get_title()
    assert "'0'" in inspector.plot_feature_maps("0").get_title()
    assert inspector.plot_compare(inspector.inspection, inspector.inspection).get_title()


def test_names_are_not_read_as_mathematics() -> None:
    model = nn.Sequential()
    model.add_module("a$b$", nn.Linear(2, 2))
    inspector = Inspector(model)
    inspector.run_inspection(torch.randn(3, 2))
    ax = inspector.plot_histogram("a$b$")
    assert r"a\$b\$" in ax.get_title()
    ax.figure.canvas.draw()
