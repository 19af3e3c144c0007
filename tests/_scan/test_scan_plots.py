"""Pictures of a scan: their colours are the values, and nothing in them is unreadable."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scans import make_scan, make_tokens

from torchfmri import Anatomy, InspectionError, LayerNotFoundError, Scan, ScannedSequence

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import font_manager  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.colors import LogNorm, Normalize  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from torchfmri.visualization._brain import Band, band_edges  # noqa: E402
from torchfmri.visualization._colour_scale import pool_rows, scale_colours, tops  # noqa: E402
from torchfmri.visualization._fonts import fonts_for  # noqa: E402
from torchfmri.visualization._token_track import spans, token_label  # noqa: E402


def row_top(row: np.ndarray) -> float:
    """The 99.5th percentile, the slow way: the next lower of the sorted values, of 4 at least."""
    known = sorted(float(x) for x in row if math.isfinite(x))
    return known[-1] if len(known) < 4 else known[math.floor(0.995 * (len(known) - 1))]


def drawn_rows(ax: Any) -> np.ndarray:
    """All rows of a brain from top to bottom, nan where nothing is drawn."""
    images = sorted(ax.images, key=lambda image: image.get_extent()[3])
    return np.concatenate(
        [np.ma.filled(image.get_array().astype(float), np.nan) for image in images]
    )


def by_kind(layers: Sequence[str]) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for layer in layers:
        kinds.setdefault(re.sub(r"\.\d+", ".#", layer), []).append(layer)
    return [layer for members in kinds.values() for layer in members]


def one_layer(values: Sequence[float], **tables: Any) -> Scan:
    """A scan of one layer with these activations."""
    anatomy = Anatomy.of_widths(["mlp"], ["MLP"], [4], [4])
    activation = np.array(values, np.float32)[:, None]
    sequence = ScannedSequence(
        "0", make_tokens(len(values)), {"activation": activation, **tables}, {}
    )
    return Scan(anatomy, [sequence], {"model": "m"})


# -- truth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["activation", "gradient"])
def test_colours_are_the_values_over_those_of_their_row(metric: str) -> None:
    scan = make_scan(blocks=6, tokens=20)
    ax = scan.plot_brain(metric, layers="*")
    names, values = scan.values(metric)
    expected = []
    for layer in by_kind(names):
        row = values[:, names.index(layer)].astype(float)
        low = 0.0 if metric == "activation" else 0.01
        expected.append(np.clip(row / row_top(row), low, 1.0))
    np.testing.assert_allclose(drawn_rows(ax), np.array(expected), rtol=1e-6)
    norm = ax.images[0].norm
    assert isinstance(norm, Normalize if metric == "activation" else LogNorm)
    assert (norm.vmin, norm.vmax) == ((0, 1) if metric == "activation" else (0.01, 1))


def test_global_colours_are_the_values_on_one_scale() -> None:
    scan = make_scan(blocks=6, tokens=20)
    ax = scan.plot_brain("activation", layers="*", normalise="global", order="depth")
    values = scan.values("activation").values.T.astype(float)
    norm = ax.images[0].norm
    assert isinstance(norm, LogNorm), "values over several powers of ten"
    np.testing.assert_allclose(drawn_rows(ax), np.clip(values, norm.vmin, norm.vmax), rtol=1e-6)
    inside = (values >= norm.vmin) & (values <= norm.vmax)
    assert inside.mean() > 0.985
    assert {image.norm.vmax for image in ax.images} == {norm.vmax}


def test_pixels_have_the_colour_of_their_value() -> None:
    scan = make_scan(blocks=6, tokens=12)
    ax = scan.plot_brain("gradient")
    canvas = FigureCanvasAgg(ax.figure)
    ax.figure.set_dpi(100)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    checked = 0
    for image in ax.images:
        _, _, bottom, top = image.get_extent()
        rows = image.get_array()
        for row in range(len(rows)):
            for token in range(rows.shape[1] - 1):
                y = top + (row + 0.5) / len(rows) * (bottom - top)
                x, up = ax.transData.transform((token, y))
                found = pixels[int(len(pixels) - up), int(x)]
                expected = image.cmap(image.norm(rows[row, token]), bytes=True)
                assert np.abs(found.astype(int) - np.array(expected, int)).max() <= 2
                checked += 1
    assert checked > 150


def test_delta_sc_is_drawn_around_zero() -> None:
    scan = make_scan(blocks=8)
    ax = scan.plot_brain("delta_sc", layers="*.mlp")
    norm = ax.images[0].norm
    assert norm.vmin == -norm.vmax
    assert ax.images[0].cmap.name == "PuOr_r"
    values = scan.delta_sc(pattern="*.mlp").values.T
    np.testing.assert_allclose(drawn_rows(ax), np.clip(values, norm.vmin, norm.vmax), rtol=1e-6)


def test_largest_of_few_tokens_does_not_darken_the_others() -> None:
    row = np.array([[500.0, *np.linspace(4, 5, 60)]])
    assert tops(row) == [5.0]
    assert scale_colours(row, "activation").beyond == "max"
    assert scale_colours(row, "activation").shown[0, 0] == 1.0


def test_voxels_of_a_layer_are_rows() -> None:
    scan = make_scan(blocks=2)
    layer = "model.layers.1.self_attn.q_proj"
    ax = scan.plot_voxels(layer)
    values = scan.values(by="voxel", pattern=layer).values.T.astype(float)
    expected = np.array([np.clip(row / row_top(row), 0, 1) for row in values])
    np.testing.assert_allclose(drawn_rows(ax), expected, rtol=1e-6)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["head 0", "head 1"]
    everything = scan.plot_brain(by="voxel", layers="*.mlp")
    assert drawn_rows(everything).shape == (4, 12)
    with pytest.raises(LayerNotFoundError):
        scan.plot_voxels("model.layers.9.mlp")


def test_overview_shows_the_cost_of_whole_blocks() -> None:
    scan = make_scan(blocks=30, tokens=6)
    ax = scan.plot_brain("learning_cost")
    assert drawn_rows(ax).shape == (93, 6)
    assert not np.isnan(drawn_rows(ax)[:, :-1]).any()
    own = scan.plot_brain("learning_cost", layers="*.mlp")
    assert np.isnan(drawn_rows(own)).all()


def test_layers_over_depth() -> None:
    scan = make_scan(blocks=8, tokens=15)
    ax = scan.plot_layers("gradient", layers=["*.mlp", "*.norm", "lm_head"])
    lines = {line.get_label(): line for line in ax.lines}
    names, values = scan.values("gradient", pattern="*.mlp")
    line = lines["layers.*.mlp"] if "layers.*.mlp" in lines else lines["model.layers.*.mlp"]
    np.testing.assert_allclose(line.get_ydata(), np.nanmedian(values, axis=0), rtol=1e-6)
    assert list(line.get_xdata()) == list(range(8))
    (head,) = [line for label, line in lines.items() if label == "lm_head"]
    assert head.get_xdata()[0] > 7, "what comes after the blocks stands after them"
    assert len(names) == 8
    band = ax.collections[0].get_paths()[0].vertices
    low = np.nanquantile(values, 0.1, axis=0)
    assert band[:, 1].min() == pytest.approx(low.min(), rel=1e-6)
    with pytest.raises(InspectionError, match="40 kinds of layers cannot be told apart"):
        Scan(
            Anatomy.of_widths([f"x{i}" for i in range(40)], ["X"] * 40, [4] * 40, [4] * 40),
            [ScannedSequence("0", make_tokens(2), {"activation": np.ones((2, 40), "f4")}, {})],
            {},
        ).plot_layers()


@pytest.mark.parametrize(("blocks", "numbers"), [(4, [0, 1, 2, 3]), (30, list(range(0, 30, 2)))])
def test_what_is_outside_of_blocks_has_its_name_on_the_axis(
    blocks: int, numbers: list[int]
) -> None:
    """A block -1 does not exist."""
    scan = make_scan(blocks=blocks, tokens=6)
    for ax in (scan.plot_layers(), scan.plot_token(1)):
        marks = dict(
            zip(ax.get_xticks(), [t.get_text() for t in ax.get_xticklabels()], strict=True)
        )
        assert [at for at, text in marks.items() if text == str(int(at))] == numbers
        outside = {line.get_label(): line.get_xdata()[0] for line in ax.lines}
        for name in ("embed", "norm", "lm_head"):
            assert marks[outside[name]] == name


def test_few_rows_leave_room_for_the_colour_bar_and_many_have_no_stray_gaps() -> None:
    few = band_edges([Band("x", [row]) for row in range(3)], 7.5)
    assert few[-1][1] > 1.0
    many = band_edges([Band("x", [2 * row, 2 * row + 1]) for row in range(93)], 7.5)
    assert 6.5 < many[-1][1] <= 7.5
    gaps = [after[0] - before[1] for before, after in pairwise(many)]
    assert max(gaps) == pytest.approx(0.0, abs=1e-9)
    some = band_edges([Band("x", [row]) for row in range(12)], 7.5)
    assert min(after[0] - before[1] for before, after in pairwise(some)) > 0.01


def test_token_against_the_others() -> None:
    scan = make_scan(blocks=8, tokens=15)
    ax = scan.plot_token(4, "activation", layers="*.mlp")
    values = np.log10(scan.values("activation", pattern="*.mlp").values.astype(float))
    expected = (values[4] - values.mean(0)) / values.std(0)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), expected, rtol=1e-6)
    assert "[France]" in ax.get_title()
    assert f"surprisal {scan.tokens.surprisal[4]:.2f} nats" in ax.get_title()
    assert "at token 14" in scan.plot_token(-1).get_title()
    with pytest.raises(InspectionError, match="no token 15: this sequence has 15 tokens"):
        scan.plot_token(15)
    with pytest.raises(InspectionError, match=r"no token 'the': .* 15 tokens"):
        scan.plot_token("the")  # type: ignore[arg-type]


def test_one_figure_for_all_metrics(tmp_path: Path) -> None:
    scan = make_scan(blocks=6, tokens=20)
    figure = scan.draw(tmp_path / "scan.png")
    assert (tmp_path / "scan.png").stat().st_size > 20_000
    maps = [ax for ax in figure.axes if ax.images]
    assert [ax.get_title(loc="left") for ax in maps] == [
        "a   activation", "b   gradient", "c   learning cost",
    ]  # fmt: skip
    assert len({ax.get_xlim() for ax in maps}) == 1
    assert maps[1].get_title(loc="right") == "norm of dL/d output"
    assert "L: sum over generated tokens (per='position')" in maps[2].get_xlabel()
    assert figure._suptitle.get_text() == "test model, token by token"
    boxes = [ax.get_position() for ax in maps]
    assert all(above.y0 > below.y1 for above, below in pairwise(boxes))
    only = make_scan(blocks=2, metrics=["activation"]).draw()
    assert len([ax for ax in only.axes if ax.images]) == 1


# -- words ---------------------------------------------------------------------------------------


def test_texts_stand_at_their_tokens() -> None:
    scan = make_scan(tokens=12)
    ax = scan.plot_brain()
    labels = ax.get_xticklabels()
    assert [label.get_text() for label in labels] == [token_label(p) for p in scan.tokens.pieces]
    assert [label.get_position()[0] for label in labels] == list(range(12))
    assert labels[0].get_fontstyle() == "italic", "a special token"
    assert labels[3].get_color() != labels[9].get_color(), "prompt and generated"
    (track,) = ax.child_axes
    heights = [bar.get_height() for bar in track.patches]
    np.testing.assert_allclose(heights, np.nan_to_num(scan.tokens.surprisal), rtol=1e-6)
    assert [text.get_text() for text in track.texts] == ["prompt", "generated"]
    assert "test model: activation" in ax.get_title(loc="left")
    gradient = scan.plot_brain("gradient")
    assert any("sum over generated tokens" in text.get_text() for text in gradient.texts)


def test_blocks_are_named_after_what_is_drawn_of_them() -> None:
    scan = make_scan(blocks=30, tokens=2, metrics=["activation"])
    one = scan.plot_brain(layers="*.mlp", order="depth").get_yticklabels()
    assert [label.get_text() for label in one][:2] == ["layers.0.mlp", "layers.1.mlp"]
    several = scan.plot_brain(layers="*.mlp*", order="depth").get_yticklabels()
    assert {label.get_text() for label in several} <= {f"model.layers.{n}" for n in range(30)}
    kinds = scan.plot_brain(layers=["*.mlp", "*.norm"])
    names = [text.get_text() for text in kinds.texts if "layers" in text.get_text()]
    assert names == ["layers.*.mlp", "layers.*.norm"]


def test_colour_bar_says_unit_and_range() -> None:
    ax = make_scan(blocks=8).plot_brain("gradient", layers="*")
    (bar,) = [each for each in ax.figure.axes if each is not ax and not each.lines]
    assert bar.get_ylabel() == "norm of dL/d output\n/ 99.5th percentile of its row"
    ticks = [text.get_text() for text in bar.get_yticklabels()]
    assert (ticks[0], ticks[-1]) == ("0.01", "1")
    assert any("no value" in text.get_text() for text in bar.texts)


def test_characters_over_several_tokens_are_shown_once() -> None:
    whole = "巴黎!".encode()
    spelling = [whole[:1], whole[1:3], whole[3:6], b"!"]
    scan = make_scan(blocks=1, tokens=4, spelling=spelling)
    ax = scan.plot_brain()
    ax.figure.canvas.draw()
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels[0] == "·"
    assert labels[3] == "!"
    assert "later token" in ax.get_xlabel()


@pytest.fixture
def chinese_font(tmp_path: Path) -> Iterator[str]:
    """A font with two Chinese characters, known to matplotlib for the length of a test."""
    builder = pytest.importorskip("fontTools.fontBuilder").FontBuilder(1000, isTTF=True)
    pens = pytest.importorskip("fontTools.pens.ttGlyphPen")
    names = [".notdef", "ba", "li"]
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord("巴"): "ba", ord("黎"): "li"})
    pen = pens.TTGlyphPen(None)
    pen.moveTo((0, 0)), pen.lineTo((0, 700)), pen.lineTo((700, 700)), pen.closePath()
    glyph = pen.glyph()
    builder.setupGlyf(dict.fromkeys(names, glyph))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (800, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Two Characters", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(tmp_path / "two.ttf")
    known = list(font_manager.fontManager.ttflist)
    font_manager.fontManager.addfont(tmp_path / "two.ttf")
    yield "Two Characters"
    font_manager.fontManager.ttflist = known


def test_installed_font_is_found_for_chinese(
    chinese_font: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    ours = [
        entry
        for entry in font_manager.fontManager.ttflist
        if entry.name in (chinese_font, "DejaVu Sans")
    ]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", ours)
    found = fonts_for(["Paris 巴黎"])
    assert found.families[-1] == chinese_font
    assert not found.missing
    ax = make_scan(blocks=1, tokens=2, spelling=["巴".encode(), "黎".encode()]).plot_brain()
    ax.figure.canvas.draw()
    labels = ax.get_xticklabels()
    assert [label.get_text() for label in labels] == ["巴", "黎"]
    assert chinese_font in labels[0].get_fontfamily()
    assert "no installed font" not in ax.get_xlabel()
    assert not [each for each in recwarn if "Glyph" in str(each.message)]


def test_missing_font_is_said(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    # Those that matplotlib brings, one of which claims to have every character.
    brought = Path(matplotlib.get_data_path())
    ours = [
        each for each in font_manager.fontManager.ttflist if brought in Path(each.fname).parents
    ]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", ours)
    ax = make_scan(blocks=1, tokens=2, spelling=["巴".encode(), b" ok"]).plot_brain()
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["□", "ok"]
    assert "no installed font has 1 character" in ax.get_xlabel()
    assert "Noto Sans CJK" in ax.get_xlabel()
    assert not [each for each in recwarn if "Glyph" in str(each.message)]


@pytest.mark.parametrize(
    ("piece", "label"),
    [
        ("  x", "x"), ("\n", "↵"), (" \n\n", "↵↵"), ("   ", "␣"), ("", "·"), ("\x1b[0m", "?[0m"),
        ("a" * 30, "a" * 13 + "…"), ("巴" * 9, "巴" * 6 + "…"), ("$x$", "$x$"),
    ],
)  # fmt: skip
def test_token_labels(piece: str, label: str) -> None:
    assert token_label(piece) == label


def test_mathematics_in_a_text_is_no_mathematics(tmp_path: Path) -> None:
    spelling = [rb"$\frac", rb"{$", b"$x$", b"_^"]
    scan = make_scan(blocks=1, tokens=4, spelling=spelling)
    scan.plot_brain().figure.savefig(tmp_path / "x.png")
    scan.plot_token(2).figure.savefig(tmp_path / "y.png")


# -- sizes and holes -----------------------------------------------------------------------------


def texts_overlap(ax: Any) -> bool:
    """Whether two labels of an axis lie on each other."""
    ax.figure.canvas.draw()
    renderer = ax.figure.canvas.get_renderer()
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        boxes = [label.get_window_extent(renderer) for label in labels if label.get_text()]
        for one, two in pairwise(boxes):
            width = min(one.x1, two.x1) - max(one.x0, two.x0)
            height = min(one.y1, two.y1) - max(one.y0, two.y0)
            if width > 1.5 and height > 1.5:
                return True
    return False


@pytest.mark.parametrize("order", ["kind", "depth"])
@pytest.mark.slow
def test_many_layers_and_tokens_stay_legible(order: str) -> None:
    scan = make_scan(blocks=250, tokens=1000, metrics=["activation"])
    assert len(scan.layers) == 2003
    ax = scan.plot_brain(layers="*", order=order)
    FigureCanvasAgg(ax.figure)
    assert not texts_overlap(ax)
    width, height = ax.figure.get_size_inches()
    assert width <= 15
    assert height <= 11
    assert "tokens per tick" in ax.get_xlabel()
    assert len(ax.get_xticks()) <= 160
    label = ax.get_xticklabels()[1].get_text()
    every = int(ax.get_xticks()[1])
    assert label.rstrip("…") in token_label("".join(scan.tokens.pieces[every : 2 * every]), 99)


@pytest.mark.parametrize("tokens", [30, 60, 100, 140])
@pytest.mark.one_in(2)
def test_labels_of_usual_sizes_do_not_overlap(tokens: int) -> None:
    ax = make_scan(blocks=30, tokens=tokens, metrics=["activation"]).plot_brain()
    FigureCanvasAgg(ax.figure)
    assert not texts_overlap(ax)


def test_pooled_rows_keep_the_largest_and_nan() -> None:
    values = np.array([[1.0, 1, np.nan], [-5, 2, 3], [0, 1, 1], [0, 0, 4]])
    np.testing.assert_array_equal(pool_rows(values, 2), [[-5, 2, np.nan], [0, 1, 4]])
    assert pool_rows(values, 4) is values


@pytest.mark.parametrize("tokens", [0, 1, 2])
@pytest.mark.one_in(3)
def test_few_tokens(tokens: int, tmp_path: Path) -> None:
    scan = make_scan(blocks=2, tokens=tokens)
    for metric in scan.metrics:
        ax = scan.plot_brain(metric)
        assert ax.get_xlim() == (-0.5, max(tokens, 1) - 0.5)
        scan.plot_layers(metric).figure.canvas.draw()
    assert ("no tokens" in [text.get_text() for text in ax.texts]) is (tokens == 0)
    scan.draw(tmp_path / "scan.png")
    scan.save_html(tmp_path / "scan.html")
    if tokens:
        scan.plot_token(0).figure.canvas.draw()


def test_rows_without_values_are_hatched_and_zeros_are_not(tmp_path: Path) -> None:
    scan = make_scan(blocks=1, tokens=8, metrics=["activation"])
    values = scan.only.layers["activation"]
    values[:, 2], values[:, 3], values[4, 4] = np.nan, 0.0, np.inf
    ax = scan.plot_brain()
    rows = drawn_rows(ax)
    assert np.isnan(rows[2]).all()
    assert (rows[3] == 0).all()
    assert np.isnan(rows[4, 4])
    assert np.isfinite(np.delete(rows[4], 4)).all()
    hatched = [patch for patch in ax.patches if patch.get_hatch()]
    assert len(hatched) == 2, "one for each row with a hole"
    ax.figure.savefig(tmp_path / "holes.png")
    logs = make_scan(blocks=1, tokens=8)
    logs.only.layers["gradient"][:] = 0.0
    assert (drawn_rows(logs.plot_brain("gradient")) == 0.01).all(), "zero is the darkest"
    logs.only.layers["gradient"][:] = np.nan
    logs.plot_brain("gradient", normalise="global").figure.savefig(tmp_path / "nan.png")
    logs.plot_layers("gradient").figure.savefig(tmp_path / "lines.png")
    scan.plot_brain(normalise="global").figure.savefig(tmp_path / "global.png")


def test_overview_leaves_out_what_no_gradient_reaches_and_keeps_what_broke() -> None:
    scan = make_scan(blocks=8)
    rows = len(drawn_rows(scan.plot_brain("gradient")))
    scan.only.layers["gradient"][:, 1] = np.nan
    counts = np.ones((len(scan.layers), 8))
    counts[-1, 0] = 0
    sequence = replace(scan.only, statistics={"gradients": counts})
    ax = Scan(scan.anatomy, [sequence], {}).plot_brain("gradient")
    assert scan.layers[-1] == "lm_head"
    assert "lm_head" not in [label.get_text() for label in ax.get_yticklabels()]
    assert len(drawn_rows(ax)) == rows - 1
    assert np.isnan(drawn_rows(ax)).all(axis=1).sum() == 1, "arrived as nan: hatched"


def test_one_layer(tmp_path: Path) -> None:
    scan = one_layer([1.0, 4.0, 2.0])
    ax = scan.plot_brain()
    np.testing.assert_allclose(drawn_rows(ax), [[0.25, 1.0, 0.5]])  # three tokens, three colours
    assert [text.get_text() for text in ax.get_yticklabels()] == ["mlp"]
    ax.figure.savefig(tmp_path / "one.png")
    assert scan.plot_layers().get_xlabel() == "layer, in model order"


def test_mistakes_say_what_there_is() -> None:
    scan = make_scan(blocks=1, metrics=["activation"])
    with pytest.raises(InspectionError, match="no gradient per layer: it has activation"):
        scan.plot_brain("gradient")
    with pytest.raises(InspectionError, match="normalise='row' is neither 'layer' nor 'global'"):
        scan.plot_brain(normalise="row")
    with pytest.raises(InspectionError, match="order='size' is neither 'kind' nor 'depth'"):
        scan.plot_brain(order="size")
    with pytest.raises(LayerNotFoundError, match="nothing"):
        scan.plot_brain(layers="nothing")
    with pytest.raises(InspectionError, match="nothing to draw"):
        make_scan(blocks=1, metrics=[]).draw()


def test_draws_where_asked_and_changes_no_settings() -> None:
    before = dict(matplotlib.rcParams)
    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    scan = make_scan(blocks=1)
    assert scan.plot_brain(ax=left) is left
    assert scan.plot_layers(ax=right) is right
    free = Figure().add_axes((0.1, 0.1, 0.8, 0.8))
    assert scan.plot_token(1, ax=free) is free
    assert scan.plot_voxels("lm_head", ax=Figure().add_subplot()).images
    assert dict(matplotlib.rcParams) == before
    pyplot = matplotlib.pyplot if hasattr(matplotlib, "pyplot") else None
    assert pyplot is None or not pyplot.get_fignums()


def test_spans() -> None:
    assert spans(np.array([], bool)) == []
    assert spans(np.array([True, False, False, True])) == [
        (0, 1, True), (1, 3, False), (3, 4, True),
    ]  # fmt: skip


def test_plot_layers_of_gradients_is_over_the_positions_that_the_loss_reaches() -> None:
    scan = make_scan(blocks=3, tokens=12, metrics=["activation", "gradient"])
    gradient = scan.only.layers["gradient"]
    head = scan.layers.index("lm_head")
    gradient[:5, head] = 0.0  # the loss is that of the tokens from 6 on, predicted from 5 on
    ax = scan.plot_layers("gradient", layers="*")
    (line,) = [each for each in ax.lines if each.get_label() == "lm_head"]
    np.testing.assert_allclose(line.get_ydata(), [np.median(gradient[5:-1, head])], rtol=1e-6)
    assert "median over 6 to 11 of 12 tokens that the loss reaches" in ax.get_title()
    assert "median over 12 tokens," in scan.plot_layers("activation").get_title()


@pytest.mark.parametrize("name", ["x.zzz", "scan.html"])
def test_a_picture_in_a_format_that_there_is_not(tmp_path: Path, name: str) -> None:
    with pytest.raises(InspectionError, match=r"not a format of pictures.*png"):
        make_scan(1).draw(tmp_path / name)
    assert not list(tmp_path.iterdir())
