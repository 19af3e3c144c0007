"""Where the crosshair is: it is always in view, and a link leads to it wherever it was set."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boards import ArrayBoard, StreamBoard
from browser import Page, opened_page
from scans import make_anatomy, make_scan, make_sequence
from test_contrast_page import contrast_of

from torchfmri import Anatomy, Scan, ScannedSequence, Tokens
from torchfmri._contrast import ContrastBoard
from torchfmri._viewer import Board, DiffBoard, View

TOKEN = "0123456789abcdef"
DEEP = "model.layers.4.mlp.up_proj"
IN_VIEW = """app.rowIndex >= Math.floor(app.scene.top)
  && app.rowIndex < app.scene.top + app.scene.height / app.scene.rowHeight"""


def plain_scan(tokens: int, written: int) -> Scan:
    """A scan of layers alone, as whoever builds one has it: nothing was measured of voxels."""
    anatomy = Anatomy.of_widths(["layers.0", "layers.1", "head"], ["M"] * 3, [8] * 3, [4] * 3)
    values = np.random.default_rng(0).random((tokens, 3)).astype(np.float32) + 1
    tokens_ = Tokens(
        ids=np.arange(tokens),
        spelling=tuple(b" w%d" % at for at in range(tokens)),
        surprisal=np.ones(tokens, np.float32),
        entropy=np.ones(tokens, np.float32),
        generated=np.arange(tokens) >= tokens - written,
        special=np.zeros(tokens, bool),
    )
    return Scan(anatomy, [ScannedSequence("p", tokens_, {"activation": values}, {})], {})


def test_a_crosshair_that_is_folded_away_goes_to_the_layer_above(page: Page) -> None:
    with View(make_scan(blocks=6, tokens=20)._board(), token=TOKEN) as view:
        page.open(view.url)
        page.js(f"app.goTo('{DEEP}', 7)")
        page.page.get_by_role("button", name="blocks", exact=True).click()
        page.page.wait_for_selector(".details[data-row='model.layers.4']")
        assert page.js("[app.state.layer, app.state.column]") == ["model.layers.4", 7]
        assert page.js("app.rows[app.rowIndex].name") == "model.layers.4"
        page.press("ArrowDown")
        assert page.js("app.state.layer") == "model.layers.5", "not the first of all"


def test_python_and_addresses_bring_their_layer_into_view(page: Page) -> None:
    with View(make_scan(blocks=6, tokens=20)._board(), token=TOKEN) as view:
        page.open(view.url)
        view.state = {"layer": DEEP, "column": 4}
        page.until(f"app.state.layer === '{DEEP}'")
        page.settle()
        assert page.js(IN_VIEW)
        assert page.js("app.state.column") == 4
        view.state = {"depth": "all", "toggled": [], "layer": "model.layers.5.norm"}
        page.until("app.state.layer === 'model.layers.5.norm'")
        page.settle()
        assert page.js(IN_VIEW), "it is scrolled to"
        page.page.evaluate(f"location.hash = 'depth=blocks&layer={DEEP}[0:2]&column=3'")
        page.until("app.state.column === 3")
        page.until("app.rowIndex >= 0")
        assert page.js(IN_VIEW)
        page.page.evaluate("location.hash = 'layer=nowhere&column=2'")
        page.until("app.state.column === 2")
        page.settle()
        assert page.js("app.rowIndex") == 0, "a name that makes no sense is not kept"
        page.press("ArrowDown")
        page.page.evaluate("location.hash = 'layer=neither&column=1'")  # the rows stay as they are
        page.until("app.state.column === 1")
        page.settle()
        assert page.js("app.rowIndex") == 0


def boards() -> dict[str, tuple[Board, dict[str, Any]]]:
    """Boards that choose for themselves how they open, and what somebody changes that to."""
    first, second = (make_scan(blocks=2, tokens=9)._board() for _ in range(2))
    second.scan[0].layers["activation"][5] *= 2
    return {
        "contrast": (ContrastBoard(contrast_of(3.0)), {"norm": "row", "column": 0}),
        "difference": (DiffBoard(first, second), {"column": 0}),
        "small": (make_scan(blocks=1, tokens=9)._board(), {"depth": "blocks", "column": 0}),
        "told": (make_scan(blocks=6, tokens=9)._board(), {"column": 0, "norm": "row"}),
    }


@pytest.mark.parametrize("kind", list(boards()))
def test_a_link_says_what_a_page_would_choose_for_itself(
    page: Page, chromium: Any, kind: str
) -> None:
    board, change = boards()[kind]
    with View(board, token=TOKEN) as view:
        if kind == "told":
            view.state = {"column": 6, "norm": "global", "map": "cividis"}
            change["map"] = "viridis"
        page.open(view.url)
        before = page.js("app.state")
        assert any(before[key] != value for key, value in change.items())
        page.set(**change, follow=False)
        page.page.wait_for_timeout(250)
        assert page.js("app.link()") == page.page.url
        with opened_page(chromium) as other:
            other.open(page.page.url)
            assert other.js("app.state") == page.js("app.state")


def test_a_long_prompt_opens_at_the_first_token_that_was_written(page: Page) -> None:
    with View(plain_scan(2600, 100)._board(), token=TOKEN) as view:
        page.open(view.url)
        assert page.js("app.state.column") == 2500
        page.open(f"{view.url}#column=0&layer=layers.1")
        assert page.js("app.state.column") == 0


def test_a_page_that_is_opened_during_an_answer_is_at_its_end(page: Page) -> None:
    board = StreamBoard()
    board.add(30)  # and no more for now: gradients are being computed, perhaps
    with View(board, token=TOKEN) as view:
        page.open(view.url)
        page.until("app.state.column === 29")
        page.press("Home")
        page.page.wait_for_timeout(400)
        assert page.js("app.state.column") == 0, "whoever moves is not moved"


def test_where_voxels_were_not_measured_none_are_asked_for(page: Page) -> None:
    with View(plain_scan(9, 3)._board(), token=TOKEN) as view:
        page.open(view.url)
        page.page.wait_for_selector(".details:not([aria-busy]) .value")
        rows = page.js("app.rows.length")
        page.press("x")
        page.until("app.ui.status.textContent.includes('not measured of the voxels')")
        assert page.js("app.rows.length") == rows
        assert not [each for each in page.requests if "plane=layers.0" in each]


def test_voxels_of_some_metrics_are_shown_with_these_alone(page: Page) -> None:
    anatomy = make_anatomy(1)
    sequence = make_sequence(anatomy, 9, metrics=["activation", "gradient"])
    del sequence.voxels["gradient"]
    with View(Scan(anatomy, [sequence], {})._board(), token=TOKEN) as view:
        page.open(view.url)
        page.js("app.goTo('model.layers.0.mlp', 3)")
        page.press("x")
        page.until("app.rows.some(row => row.plane !== 'layers')")
        page.press("ArrowDown")
        page.until("app.state.layer.includes('[')")
        page.press("2")
        page.until("app.state.metric === 'gradient'")
        page.settle()
        assert page.js("app.rows.every(row => row.plane === 'layers')")
        assert page.js("app.state.layer") == "model.layers.0.mlp"


def test_a_saved_page_says_which_voxels_are_not_part_of_it(page: Page, tmp_path: Path) -> None:
    make_scan(blocks=1, tokens=9).save_html(tmp_path / "x.html")
    page.open((tmp_path / "x.html").as_uri())
    page.js("app.goTo('model.layers.0.mlp', 3)")
    page.set(metric="delta_sc")
    page.press("x")
    page.until("app.ui.status.textContent.includes('not part of this saved page')")
    assert page.js("app.rows.every(row => row.plane === 'layers')")
    page.press("1", "x")
    page.until("app.rows.some(row => row.plane === 'model.layers.0.mlp')")


def test_what_stands_at_the_crosshair_is_read_out(page: Page) -> None:
    scan = make_scan(blocks=1, tokens=9)
    with View(scan._board(), token=TOKEN) as view:
        page.open(view.url)
        page.press("ArrowRight")
        page.until("app.ui.status.textContent.includes(`token ${app.state.column}`)")
        assert page.js("app.ui.status.getAttribute('aria-live')") == "polite"
        layer, column = page.js("[app.state.layer, app.state.column]")
        value = scan.values("activation", pattern=layer).values[column, 0]
        said = page.text(".status").rpartition(": ")[2]
        assert float(said) == pytest.approx(float(value), rel=6e-4)


def test_sequences_are_turned_by_keys(page: Page) -> None:
    with View(make_scan(blocks=1, tokens=9, sequences=3)._board(), token=TOKEN) as view:
        page.open(view.url)
        page.press("PageDown")
        page.until("app.data.index === 1")
        page.press("PageUp")
        page.until("app.data.index === 0")
        page.press("PageUp")
        page.until("app.ui.status.textContent === 'This is the first one.'")
        page.press("s")
        page.page.wait_for_selector(".picker button")
        page.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "Enter")
        page.until("app.data.index === 1")


def test_a_board_says_where_it_opens_and_what_voxels_have() -> None:
    scan = plain_scan(9, 3)._board()
    assert (scan.opens(0), list(scan.voxels(0))) == (6, [])
    whole = make_scan(blocks=1, tokens=9)._board()
    assert list(whole.voxels(0)) == [each.name for each in whole.metrics(0)]
    assert list(DiffBoard(whole, scan).voxels(0)) == []
    assert ArrayBoard(np.ones((3, 2), np.float32)).opens(0) == 0
