"""Figures of diagnoses, lesions, patches, heads and lenses: what is drawn for which numbers."""

from __future__ import annotations

import numpy as np
import pytest
from test_history_plots import make_history

from torchfmri._records import Finding, alarm
from torchfmri._records.history import History
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import (
    Band,
    Brain,
    LesionPicture,
    PatchPicture,
    TokenTrack,
    draw_brain,
    draw_lesions,
    draw_patches,
    plot_attention,
    plot_diagnosis,
    plot_heads,
    plot_lens,
)
from torchfmri.visualization._figure import write_above
from torchfmri.visualization._fonts import REPLACEMENT, Fonts

pytest.importorskip("matplotlib").use("Agg")
Figure = pytest.importorskip("matplotlib.figure").Figure


def finding(layer: str, step: int | None = 3) -> Finding:
    return alarm("dead_units", text="", advice="", layers=(layer,), step=step)


def test_a_diagnosis_rings_the_layers_where_findings_begin() -> None:
    ax = plot_diagnosis(make_history(), [finding("layers.2"), finding("gone", None)], "Net")
    rings = [line for line in ax.lines if line.get_markerfacecolor() == "none"]
    assert [(list(each.get_xdata()), list(each.get_ydata())) for each in rings] == [([3], [2])]
    words = [text.get_text() for text in ax.texts]
    assert any(each.startswith("Net: findings") for each in words)
    assert any("dead units (layers.2, step 3)" in each for each in words)


def test_a_diagnosis_counts_the_findings_that_have_no_room() -> None:
    ax = plot_diagnosis(make_history(), [finding("layers.1")] * 9, "Net")
    assert "and 3 more" in [text.get_text() for text in ax.texts]
    with pytest.raises(InspectionError):
        plot_diagnosis(History(1), [], "Net")


def lesions(**changes: object) -> LesionPicture:
    picture = LesionPicture(
        kinds=["heads", "heads", "mlps"],
        blocks=np.array([0, 1, 1]),
        columns=np.array([0, 1, 0]),
        names=["L0H0", "L1H1", "L1.mlp"],
        effect=np.array([0.5, -1.0, 0.2]),
        notable=np.array([True, False, True]),
        activation=np.array([1.0, 2.0, 3.0]),
        label="logit",
        title="what was lesioned",
    )
    return picture._replace(**changes)


def test_lesions_told_from_zero_carry_a_dot() -> None:
    figure = Figure()
    draw_lesions(figure, lesions())
    left, right = figure.axes[:2]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in left.lines] == [(0, 0), (2, 1)]
    assert any("Bonferroni" in text.get_text() for text in left.texts)
    assert right.images[0].get_array().compressed().tolist() == [1.0, 2.0, 3.0]


def test_lesions_of_named_places_have_a_row_each() -> None:
    figure = Figure()
    blocks = np.full(3, -1)
    draw_lesions(figure, lesions(kinds=["places"] * 3, blocks=blocks, notable=np.zeros(3, bool)))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["L0H0", "L1H1", "L1.mlp"]
    assert not figure.axes[0].lines


def test_patches_are_coloured_around_zero() -> None:
    figure = Figure()
    scores = np.array([[0.0, 2.0], [np.nan, 1.0]])
    picture = PatchPicture(["L0", "L1"], ["0 'a'", "1 'b'"], scores, "logit", "L1.mlp")
    draw_patches(figure, picture)
    image = figure.axes[0].images[0]
    assert image.get_clim() == (-2.0, 2.0)
    assert "grey: no path" in figure.axes[0].get_title(loc="left")


def test_panels_of_heads_share_one_scale() -> None:
    weights = np.stack([np.eye(3), np.full((3, 3), 1 / 3)])
    figure = plot_attention(weights, ["a", "b", "c"], title="two heads")
    assert [ax.images[0].get_clim() for ax in figure.axes[:2]] == [(0.0, 1.0)] * 2
    assert [each.get_text() for each in figure.axes[0].get_xticklabels()] == ["a", "b", "c"]
    assert figure.axes[-1].get_ylabel() == "attention"
    with pytest.raises(InspectionError, match="no head 5"):
        plot_attention(weights, heads=[5])
    with pytest.raises(InspectionError, match="2 tokens for a pattern over 3 keys"):
        plot_attention(weights, ["a", "b"])


def test_a_number_stands_in_the_cell_of_each_head() -> None:
    ax = plot_heads([[0.1, np.nan], [0.3, 0.9]], ["L0", "L1"])
    assert sorted(text.get_text() for text in ax.texts) == ["0.10", "0.30", "0.90"]
    with pytest.raises(InspectionError, match="is not \\(layer, head\\) for 1 layers"):
        plot_heads([[0.1], [0.2]], ["L0"])


@pytest.mark.parametrize("metric", ["rank", "probability"])
def test_a_lens_writes_the_words_in_its_cells(metric: str) -> None:
    words = [["a", "b"], ["c", "d"]]
    ax = plot_lens([[1, 2], [3, 4]], words, ["h.0", "h.1"], ["x", "y"], metric=metric)
    assert sorted(text.get_text() for text in ax.texts) == ["a", "b", "c", "d"]
    assert [each.get_text() for each in ax.get_yticklabels()] == ["after h 0", "after h 1"]


def brain(bands: int) -> Brain:
    """A picture of so many layers, each a band of its own."""
    nothing = np.zeros(3, bool)
    tokens = TokenTrack(["a", "b", "c"], np.zeros(3), nothing, nothing)
    return Brain(
        bands=[Band(f"layers.{row}.mlp", [row]) for row in range(bands)],
        values=np.ones((bands, 3)),
        tokens=tokens,
        metric="activation",
        normalise="layer",
        title="layers",
        most_inches=1.0,
    )


def test_names_without_room_are_listed_below_the_picture() -> None:
    ax = draw_brain(Figure().add_subplot(), brain(40))
    shown = {label.get_text() for label in ax.get_yticklabels()}
    left_out = [each.label for each in brain(40).bands if each.label not in shown]
    words = " ".join(ax.get_xlabel().split())
    assert shown
    assert f"no room for the names of {left_out[0]}, {left_out[1]} and {len(left_out) - 2}" in words
    assert "torchfmri.view names every row" in words
    assert "no room" not in draw_brain(Figure().add_subplot(), brain(4)).get_xlabel()


def test_words_above_axes_are_never_mathematics() -> None:
    ax = Figure().add_subplot()
    write_above(ax, "a $ b", 5)
    assert ax.texts[0].get_text() == r"a \$ b"


def test_characters_that_no_font_has_are_replaced_and_counted() -> None:
    fonts = Fonts(["DejaVu Sans"], frozenset("一二"))
    assert fonts.writable("a一b二") == f"a{REPLACEMENT}b{REPLACEMENT}"
    assert "2 characters" in fonts.note()
    assert Fonts([], frozenset("一")).note().startswith(f"{REPLACEMENT}: no installed font has 1 ")
