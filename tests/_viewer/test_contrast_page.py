"""The page of a contrast: its colours, what fades, what is outlined, and the table of peaks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Page
from scans import make_anatomy, make_sequence

import torchfmri
from torchfmri import Contrast, Scan
from torchfmri._contrast import ContrastBoard
from torchfmri._scan import board_of
from torchfmri.exceptions import InspectionError

PLANTED = "model.layers.1.mlp"


def contrast_of(effect: float, seed: int = 0, prompts: int = 12) -> Contrast:
    """Two conditions of random prompts; in one layer the first is louder."""
    anatomy = make_anatomy(3)
    sequences = []
    for at in range(2 * prompts):
        condition = "ab"[at % 2]
        sequence = make_sequence(
            anatomy, 6, metrics=["activation"], seed=1000 * seed + at, condition=condition
        )
        if condition == "a":
            for tables, layers in ((sequence.layers, anatomy.layers), (sequence.voxels, None)):
                own = (
                    [layers.index(PLANTED)] if layers is not None
                    else list(range(*anatomy.voxels_of(PLANTED).indices(1 << 20)))
                )  # fmt: skip
                tables["activation"][:, own] *= 1 + effect
        sequences.append(sequence)
    return Scan(anatomy, sequences, {"model": "m"}).contrast("a", "b", level="voxel")


@pytest.fixture(scope="module")
def planted() -> Contrast:
    return contrast_of(3.0)


def cell_of(board: ContrastBoard, index: int) -> tuple[str, int]:
    return board._cells[str(board.contrast.columns.layer[index])]


def test_every_column_of_a_contrast_has_one_cell(planted: Contrast) -> None:
    board = ContrastBoard(planted)
    seen = []
    for kind in board.layers:
        values = board.values(0, "g", kind)
        names = board.names(kind)
        assert values.shape == (board.length(0), len(names))
        seen += values[np.isfinite(values)].tolist()
        missing = board.missing(0, "g", kind)
        assert missing is not None
        assert (np.isfinite(values) == ~missing).all()
    np.testing.assert_allclose(sorted(seen), np.sort(planted.g), rtol=1e-6)
    table = board.values(0, "g", "layers")
    order = planted.ranked(None)
    for index in range(len(planted)):
        row, column = cell_of(board, index)
        own = planted.columns.layer == planted.columns.layer[index]
        strongest = next(each for each in order if own[each])
        assert table[column, board.layers.index(row)] == np.float32(planted.g[strongest])
    assert board.values(0, "tracks", "tracks").sum() == planted.survives.sum() > 0


@pytest.fixture(scope="module")
def graded(planted: Contrast) -> Contrast:
    """A contrast whose p-values run from tiny to 1, so that each threshold takes others."""
    p = np.random.default_rng(0).permutation(np.geomspace(1e-6, 1.0, len(planted)))
    q = p * np.nan
    order = p.argsort()
    q[order] = np.minimum.accumulate((p[order] * len(p) / np.arange(1, len(p) + 1))[::-1])[::-1]
    return replace(planted, p=p, q=q, survives=q <= 0.05)


def test_each_threshold_outlines_what_scipy_would(graded: Contrast) -> None:
    stats = pytest.importorskip("scipy.stats")
    planted, board = graded, ContrastBoard(graded)
    assert board.about()["choices"] == ["FDR 0.05", "FDR 0.01", "Bonferroni 0.05", "none"]
    tested = ~np.isnan(planted.p)
    p = planted.p[tested]
    fdr = stats.false_discovery_control(p, method="bh")
    expected = [fdr <= 0.05, fdr <= 0.01, p * len(p) <= 0.05, np.zeros(len(p), bool)]
    counts = []
    for sequence, wanted in enumerate(expected):
        survivors = {cell_of(board, index) for index in np.flatnonzero(tested)[wanted]}
        outlined = board.values(sequence, "survives", "layers")
        assert {(board.layers[row], block) for block, row in np.argwhere(outlined > 0)} == survivors
        assert board.values(sequence, "tracks", "tracks").sum() == wanted.sum()
        marked = [row for row in board.panels(sequence)[0].data["rows"] if row[0]]
        assert len(marked) == min(20, wanted.sum())
        np.testing.assert_array_equal(
            board.values(sequence, "g", "layers"), board.values(0, "g", "layers")
        )
        counts.append(int(wanted.sum()))
    assert counts[0] > counts[1] > counts[2] > counts[3] == 0, "the thresholds do differ"


def test_sentence_map_and_peaks_name_the_same_as_strongest(planted: Contrast) -> None:
    # Welch's degrees of freedom differ, so the smallest p is not always that of the largest t.
    own = np.flatnonzero(planted.columns.layer == PLANTED)
    p, statistic, g = (each.copy() for each in (planted.p, planted.statistic, planted.g))
    p[own[0]], statistic[own[0]], g[own[0]] = 1e-12, -20.0, -7.5
    p[own[1]], statistic[own[1]], g[own[1]] = 1e-11, 30.0, 11.0
    board = ContrastBoard(replace(planted, p=p, statistic=statistic, g=g))
    peak = board.panels(0)[0].data["rows"][0]
    row, column = cell_of(board, own[0])
    assert (peak[2]["layer"], peak[2]["column"], peak[3]) == (row, column, "-7.5")
    assert board.values(0, "g", "layers")[column, board.layers.index(row)] == np.float32(-7.5)
    said = board.headline(0)
    assert f"Strongest evidence: {peak[2]['text']} of block 1, more in b (g -7.5, p " in said
    (cell,) = board.panels_at(0, row, column)
    assert cell.title == board.contrast.columns[[own[0]]].names[0]


def test_the_table_of_peaks_is_not_cut(page: Page, planted: Contrast) -> None:
    with torchfmri.view(planted, browser=False) as view:
        page.open(view.url)
        table = page.page.locator("[data-panel=peaks] .scroll")
        table.wait_for()
        assert table.evaluate("each => each.scrollWidth <= each.clientWidth + 1")


def test_without_a_threshold_p_is_called_p(graded: Contrast) -> None:
    board = ContrastBoard(graded)
    assert board.panels(3)[0].title == "Peaks: no threshold"
    for sequence, expected in ((0, "q"), (3, "p")):
        peaks = board.panels(sequence)[0].data
        assert peaks["columns"][-1] == expected
        (place,) = [(each[2]["layer"], each[2]["column"]) for each in peaks["rows"][:1]]
        (cell,) = board.panels_at(sequence, *place)
        said = [key for key, _ in cell.data["rows"]]
        assert ("q" in said) == ("survives" in said) == (sequence == 0)


def test_an_own_threshold_comes_first_and_is_not_listed_twice(planted: Contrast) -> None:
    for control, alpha, first in (
        ("fdr", 0.01, "FDR 0.01"), ("fpr", 0.001, "uncorrected 0.001"), (None, 0.05, "none"),
    ):  # fmt: skip
        own = replace(planted, height_control=control, alpha=alpha)
        choices = ContrastBoard(own).about()["choices"]
        assert choices[0] == first
        assert len(choices) == len(set(choices))


def test_the_threshold_is_switched_by_a_key_and_a_button(page: Page, graded: Contrast) -> None:
    with torchfmri.view(graded, browser=False) as view:
        page.open(view.url)
        page.until("app.data.whole('survives', 'layers') !== null")
        page.settle()
        pixels, layer = page.pixels(), page.js("app.state.layer")
        page.press("?")
        assert "each row a kind of layer" in page.text("[role=dialog]"), "of a contrast, not a scan"
        page.press("Escape", "c", "c", "c")  # none
        page.until("app.data.sequence.overlay.meaning.startsWith('no threshold')")
        page.until("app.data.whole('survives', 'layers') !== null")
        page.settle()
        assert np.abs(page.pixels() - pixels).max() > 60, "the outlines are gone"
        assert page.js("app.state.layer") == layer, "the crosshair stays"
        page.page.wait_for_selector(".legend:has-text('no threshold')")
        page.page.locator("[aria-label='Threshold of the outlines'] button").nth(2).click()
        page.until("app.data.sequence.overlay.meaning.endsWith('(Bonferroni 0.05)')")
        page.until("location.hash.includes('sequence=2')")


def test_an_answer_that_comes_late_does_not_replace_a_later_choice(
    page: Page, graded: Contrast
) -> None:
    with torchfmri.view(graded, browser=False) as view:
        page.open(view.url)
        page.settle()
        page.js("""(() => {
            const ask = app.data.transport.ask.bind(app.data.transport);
            app.data.transport.ask = async (what, given) => {
                const found = await ask(what, given);
                const late = what === "sequence" && given.sequence === 1;
                await new Promise((go) => setTimeout(go, late ? 600 : 0));
                app.late ||= late;
                return found;
            };
            app.set({ sequence: 1 });
            app.set({ sequence: 2 });
        })()""")
        page.until("app.late")
        page.until("app.data.sequence.overlay.meaning.endsWith('(Bonferroni 0.05)')")
        page.settle()
        assert page.js("app.data.sequence.overlay.meaning").endswith("(Bonferroni 0.05)")


def test_the_page_outlines_what_survives_and_nothing_else(page: Page, planted: Contrast) -> None:
    board = ContrastBoard(planted)
    survivors = {cell_of(board, index) for index in np.flatnonzero(planted.survives)}
    assert 0 < len(survivors) < sum(np.isfinite(board.values(0, "g", "layers")).ravel())
    with torchfmri.view(planted, browser=False) as view:
        page.open(view.url)
        page.until("app.data.whole('survives', 'layers') !== null")
        page.press("Home")  # the crosshair away from the planted layer
        page.js("app.goTo('norm', 0)")
        page.settle()
        pixels, scene = page.pixels(), page.js("app.scene")
        rows = [row["name"] for row in page.js("app.rows")]
        ink = np.array([0x16, 0x18, 0x1D])
        for kind in board.layers:
            for column in range(board.length(0)):
                y = int((rows.index(kind) + 0.5 - scene["top"]) * scene["rowHeight"])
                x = int(column * scene["cell"]) + 1  # the left edge of the cell
                edge = np.abs(pixels[y, x - 1 : x + 3] - ink).max(1).min() < 30
                if kind != "norm" and column != 0:
                    assert edge == ((kind, column) in survivors), (kind, column)
        assert "12 and 12 prompts" in page.text(".headline")
        page.page.get_by_role("button", name="notes").click()
        assert "12 prompts of 'a' and 12 prompts of 'b'" in page.text(".popup")
        page.press("Escape")
        assert "outlined: differs" in page.text(".legend")
        assert "more in b" in page.text(".bar")
        peak = page.page.locator("[data-panel=peaks] button.link").first
        assert "mlp" in peak.inner_text()
        peak.click()
        assert page.js("app.state.layer") == board._cells[PLANTED][0]
        assert page.js("app.state.column") == board._cells[PLANTED][1]
        page.page.wait_for_selector("[data-panel=cell]")
        assert "yes" in page.text("[data-panel=cell]")


def test_colour_is_the_effect_and_weak_cells_fade(page: Page, planted: Contrast) -> None:
    board = ContrastBoard(planted)
    opacity = board.values(0, "opacity", "layers")
    with torchfmri.view(planted, browser=False) as view:
        page.open(view.url)
        page.until("app.data.whole('opacity', 'layers') !== null")
        page.js("app.goTo('norm', 0)")
        page.settle()
        pixels, scene = page.pixels(), page.js("app.scene")
        rows = [row["name"] for row in page.js("app.rows")]

        def colour(kind: str, column: int) -> Any:
            y = int((rows.index(kind) + 0.5 - scene["top"]) * scene["rowHeight"])
            return pixels[y, int((column + 0.5) * scene["cell"])]

        kind, column = board._cells[PLANTED]
        strong = colour(kind, column)
        assert strong[0] > strong[2] + 40, "red: more in a"
        weak = np.nan_to_num(opacity, nan=1.0)
        at = np.unravel_index(weak.argmin(), weak.shape)
        assert weak[at] < 0.3
        faint = colour(board.layers[int(at[1])], int(at[0]))
        assert (255 - faint).max() < 100, "nearly the background"


@pytest.mark.slow
def test_null_data_outline_nothing(page: Page) -> None:
    """Acceptance 10: of ten contrasts without an effect at most two show any survivor."""
    outlined = 0
    for seed in range(10):
        null = contrast_of(0.0, seed=seed + 1)
        outlined += bool(ContrastBoard(null).values(0, "survives", "layers").any())
    assert outlined <= 2
    with torchfmri.view(null, browser=False) as view:
        page.open(view.url)
        assert page.text(".headline").startswith("None of") or outlined


def test_one_prompt_each_shows_effects_without_p_values(page: Page) -> None:
    with torchfmri.view(contrast_of(1.0, prompts=1), browser=False) as view:
        page.open(view.url)
        assert "nothing is tested" in page.text(".legend")
        assert "fainter" not in page.text(".legend")
        assert page.page.locator(".legend .survivor").count() == 0, "nothing is outlined"
        assert page.page.locator(".bar .not-measured + span").inner_text() == "not there"
        page.page.locator(".details:not([aria-busy]) [data-panel=cell]").wait_for()
        details = page.text(".details")
        for wrong in ("survive", "interval", " to –", "NaN"):
            assert wrong not in details
        assert "not tested" in page.text("[data-panel=cell]")
        assert page.js("app.data.bands.length") == 0, "no track of survivors"
        largest = page.page.locator("[data-panel=peaks] tbody tr").first.locator("td").last
        effect = np.abs(view.board.contrast.effect)
        assert abs(float(largest.inner_text().replace("−", "-"))) == pytest.approx(
            effect.max(), rel=1e-2
        )
        assert page.page.locator(".metrics button, [aria-label='What to show'] button").count() == 1


def test_copied_python_works_from_another_folder(
    tmp_path: Path, planted: Contrast, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.save(tmp_path / "x.contrast")
    model = torch.nn.Sequential(torch.nn.Identity())
    monitor = torchfmri.Monitor(model, folder=tmp_path / "run")
    with monitor.step():
        model(torch.ones(1))
    monitor.detach()
    monkeypatch.chdir(tmp_path)
    boards = [board_of(name) for name in ("x.contrast", "run")]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for board in boards:
        again = board_of(eval(board.about()["python"], {"torchfmri": torchfmri}))
        assert again.layers == board.layers


def test_a_saved_contrast_is_viewed_by_its_path(tmp_path: Path, planted: Contrast) -> None:
    path = tmp_path / "planted.contrast"
    planted.save(path)
    with torchfmri.view(path, browser=False) as view:
        assert view.board.about()["python"] == f"torchfmri.load_contrast({str(path)!r})"
        view.state = {"metric": "effect", "layer": "mlp", "column": 1}
    with pytest.raises(InspectionError, match="two scans"):
        torchfmri.view(planted, planted, browser=False)


def test_what_is_the_same_in_every_prompt_is_no_nan(page: Page) -> None:
    anatomy = make_anatomy(2)
    sequences = [
        make_sequence(anatomy, 6, metrics=["activation"], seed=at, condition="ab"[at % 2])
        for at in range(12)
    ]
    same = "model.layers.0.mlp"
    place = anatomy.layers.index(same)
    for each in sequences:
        each.layers["activation"][:, place] = 1.0
    contrast = Scan(anatomy, sequences, {"model": "m"}).contrast("a", "b", level="layer")
    board = ContrastBoard(contrast)
    row, column = board._cells[same]
    at = column, board.layers.index(row)
    for metric, tested in (("g", False), ("statistic", False), ("effect", True)):
        missing = board.missing(0, metric, "layers")
        assert missing is not None
        assert missing[at] == np.isnan(board.values(0, metric, "layers")[at]) == (not tested)
    with torchfmri.view(contrast, browser=False) as view:
        page.open(view.url)
        page.js(f"app.goTo({row!r}, {column})")
        page.until("app.root.querySelector('.value b')?.textContent === 'not tested'")
        assert "the same in every prompt" in page.text(".details .sentence")
        assert "not tested" in page.text(".bar")
        assert "NaN" not in page.text(".bar") + page.text(".details")


def test_layers_after_the_blocks_do_not_stand_beneath_the_last_kind(page: Page) -> None:
    with torchfmri.view(contrast_of(3.0), browser=False) as view:
        page.open(view.url)
        rows = {row["name"]: row for row in page.js("app.rows")}
    outside = [name for name in rows if name.endswith("norm") and "layernorm" not in name]
    assert outside
    for name in outside:
        assert (rows[name]["depth"], rows[name]["label"]) == (0, name)


def test_no_probability_is_zero(planted: Contrast) -> None:
    board = ContrastBoard(replace(planted, p=planted.p * 0, q=planted.q * 0))
    assert board.headline(0).endswith(", p <1e-300).")
    (peaks,) = board.panels(0)
    assert {row[-1] for row in peaks.data["rows"]} == {"<1e-300"}


def test_few_prompts_are_a_finding_and_power_is_a_note() -> None:
    few = ContrastBoard(contrast_of(1.0, prompts=3))
    assert [each.severity for each in few.health(0)] == ["warn"]
    assert few.health(0)[0].text.startswith("little power: with 3 prompts in a group")
    enough = ContrastBoard(contrast_of(1.0, prompts=6))
    assert not enough.health(0)
    assert any(each.startswith("power: ") for each in enough.about()["notes"])


def test_the_table_of_a_contrast_is_read_by_pandas(
    page: Page, tmp_path: Path, planted: Contrast
) -> None:
    pandas = pytest.importorskip("pandas")
    board = ContrastBoard(planted)
    with torchfmri.view(planted, browser=False) as view:
        page.open(view.url)
        with page.page.expect_download() as waited:
            page.js("void app.save('csv')")
        waited.value.save_as(tmp_path / "x.csv")
    frame = pandas.read_csv(tmp_path / "x.csv", dtype={"block": str}).set_index("block")
    assert list(frame.index) == board.columns(0, 0, 99)["pieces"]
    names = [name.removesuffix(".1") for name in frame]  # of two columns "block" one is renamed
    shown = board.values(0, "g", "layers")[:, [board.layers.index(name) for name in names]]
    np.testing.assert_array_equal(frame.to_numpy(np.float32), shown)
