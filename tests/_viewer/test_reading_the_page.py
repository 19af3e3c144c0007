"""What can be read on the page: tables, bars and values, at every width."""

import base64
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from boards import ArrayBoard
from browser import Page, opened_page
from scans import make_scan
from test_contrast_page import contrast_of

import torchfmri
from torchfmri import Scan
from torchfmri._contrast import ContrastBoard
from torchfmri._records import Series, Step
from torchfmri._viewer import Board, DiffBoard, RunBoard, View, ViewedRun
from torchfmri._viewer.page import served_page
from torchfmri._viewer.still import still
from torchfmri._viewer.widget import _figure

TOKEN = "0123456789abcdef"
BROKEN = """[...app.root.querySelectorAll('.panel th, .panel .whole')].filter(each => {
  const range = document.createRange();
  range.selectNodeContents(each);
  return new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1;
}).map(each => each.textContent)"""
CUT = """[...app.root.querySelectorAll('.panel .scroll')]
  .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent)"""


@pytest.mark.parametrize("width", [1280, 1920])
def test_tables_of_heads_and_lenses_are_neither_broken_nor_cut(chromium: Any, width: int) -> None:
    named = torchfmri.load_model("tiny")
    scan = torchfmri.scan(
        *named, "The capital of France", 3, per=None, attention=True, lens=True
    )  # fmt: skip
    with (
        torchfmri.view(scan, tokenizer=named.tokenizer, browser=False) as view,
        opened_page(chromium, viewport={"width": width, "height": 900}) as page,
    ):
        page.open(view.url)
        page.js("app.goTo('model.layers.2.self_attn', 5)")
        page.page.wait_for_selector(".details[data-column='5']:not([aria-busy]) [data-panel=lens]")
        heads = page.text("[data-panel=attention] thead").split()
        assert heads == ["head", "entropy", "distance", "first", "previous", "induction"]
        assert page.js("app.root.querySelectorAll('[data-panel=lens] .whole').length") == 6
        assert page.js(BROKEN) == []
        assert page.js(CUT) == []
        page.page.get_by_role("button", name="layers.3", exact=True).click()
        assert page.js("app.state.layer") == "model.layers.3", "short names lead to their layers"


def test_a_click_on_a_part_brings_its_row_into_view(page: Page) -> None:
    with torchfmri.view(make_scan(blocks=30, tokens=9), browser=False) as view:
        page.open(view.url)
        page.set(depth="all")
        page.js("app.goTo('model.layers.20.mlp', 4)")
        page.page.wait_for_selector(".details[data-column='4']:not([aria-busy]) .bars button")
        page.page.locator(".bars button").last.click()
        page.until("app.state.layer.includes('[') && app.rowIndex >= 0")
        page.settle()
        page.until(
            "app.rowIndex >= app.scene.top && "
            "app.rowIndex < app.scene.top + app.scene.height / app.scene.rowHeight"
        )


@pytest.mark.parametrize("width", [640, 700])
def test_a_narrow_page_shows_the_value_and_the_whole_footer(chromium: Any, width: int) -> None:
    scan = make_scan(blocks=2, tokens=9)
    with (
        torchfmri.view(scan, browser=False) as view,
        opened_page(chromium, viewport={"width": width, "height": 900}) as page,
    ):
        page.open(view.url)
        page.js("app.goTo('model.layers.1.mlp', 4)")
        page.page.wait_for_selector(".details[data-column='4']:not([aria-busy]) .value b")
        page.settle()
        box = page.page.locator(".value b").bounding_box()
        assert box is not None
        assert 0 <= box["x"] < width
        assert box["y"] + box["height"] < 900
        assert page.js("app.ui.map.getBoundingClientRect().height") >= 120
        over = page.js(
            "[...app.root.querySelectorAll('footer *')].filter(e => e.offsetParent && "
            f"e.getBoundingClientRect().right > {width}).map(e => e.textContent)"
        )
        assert over == []
        shown, all_of_it = page.js("[app.ui.status.clientWidth, app.ui.status.scrollWidth]")
        assert shown >= all_of_it > 0


def test_a_telephone_shows_every_metric_and_has_room_to_search(chromium: Any) -> None:
    with (
        View(make_scan(blocks=6, tokens=18)._board(), token=TOKEN) as view,
        opened_page(chromium, viewport={"width": 390, "height": 844}) as page,
    ):
        page.open(view.url)
        assert page.js("app.scene.height") >= 120
        assert page.js("app.ui.search.getBoundingClientRect().width") >= 80
        page.page.wait_for_selector(".details:not([aria-busy]) .histogram")
        assert 0 < page.js("app.root.querySelector('.histogram').clientHeight") <= 90
        page.page.get_by_role("button", name="Activation vs gradient").click()
        page.until("app.state.metric === 'delta_sc'")
        box = page.js("app.ui.metrics.getBoundingClientRect().right")
        assert box <= 390, "it scrolls inside of the page"
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 390


MISPLACED = """[...app.root.querySelectorAll('header, .toolbar, footer, .bar')].flatMap(row => {
  const seen = each => each.getClientRects().length && !each.matches('.space');
  const shown = [...row.children].filter(seen);
  const boxes = shown.map(each => each.getBoundingClientRect());
  const outside = box => box.right > innerWidth + 1 || box.left < -1;
  const over = (box, other) => box.left < other.right - 1 && box.top < other.bottom - 1;
  return shown.filter((_, at) => outside(boxes[at]) || (at && over(boxes[at], boxes[at - 1])));
}).map(each => each.className + ' ' + each.textContent)"""
"""What reaches out of the window, or lies over what stands before it."""


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1920, 1080)])
def test_nothing_overlaps_or_is_outside_of_the_window(
    chromium: Any, tmp_path: Path, width: int, height: int, theme: str
) -> None:
    first, second = (make_scan(blocks=6, tokens=40)._board() for _ in range(2))
    boards = {
        "scan": make_scan(blocks=30, tokens=60)._board(),
        "difference": DiffBoard(first, second),
        "contrast": ContrastBoard(contrast_of(3.0)),
    }
    pictures = []
    for name, board in boards.items():
        with (
            View(board, token=TOKEN) as view,
            opened_page(
                chromium, viewport={"width": width, "height": height}, color_scheme=theme
            ) as page,
        ):
            page.open(view.url)
            page.page.wait_for_selector(".details:not([aria-busy]) .value")
            assert page.js(MISPLACED) == [], name
            size = page.page.evaluate(
                "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
            )
            assert size == [width, height], name
            assert page.js("app.scene.height") > height / 3, "the map has most of the room"
            pictures.append(page.page.screenshot(path=tmp_path / f"{name}.png"))
            dark = page.js("getComputedStyle(app.ui.body).backgroundColor") == "rgb(15, 17, 21)"
            assert dark == (theme == "dark")
            page.js("app.ui.status.style.marginLeft = '-900px'")
            assert page.js(MISPLACED) != [], "it would be seen"
    assert len(set(pictures)) == len(boards)


def test_the_status_of_a_difference_is_not_cut_at_1280(page: Page) -> None:
    first, second = (make_scan(blocks=2, tokens=9)._board() for _ in range(2))
    with View(DiffBoard(first, second), token=TOKEN) as view:
        page.open(view.url)
        page.js("app.goTo('model.layers.1.mlp.down_proj', 4)")
        page.until("app.ui.status.textContent.includes('down_proj, token 4')")
        shown, all_of_it = page.js("[app.ui.status.clientWidth, app.ui.status.scrollWidth]")
        assert shown >= all_of_it
        over = "app.ui.bar.getBoundingClientRect().right <= app.ui.status.getBoundingClientRect().x"
        assert page.js(over), "and nothing lies over it"


def test_the_peaks_of_a_contrast_are_seen_without_scrolling(page: Page) -> None:
    with View(ContrastBoard(contrast_of(3.0)), token=TOKEN) as view:
        page.open(view.url)
        page.page.wait_for_selector(".details:not([aria-busy]) [data-panel=cell]")
        row = "app.root.querySelectorAll('[data-panel=peaks] tbody tr')[4]"
        below = page.js("app.ui.details.getBoundingClientRect().bottom")
        assert page.js(f"{row}.getBoundingClientRect().bottom") <= below, "five of them"


def test_the_table_begins_at_the_crosshair_and_leads_on(page: Page) -> None:
    values = np.random.default_rng(0).lognormal(0, 1, (1500, 3)).astype(np.float32)
    with View(ArrayBoard(values), token=TOKEN) as view:
        page.open(view.url)
        page.js("app.goTo('layers.1', 1200)")
        page.press("t")
        head = ".table th[aria-current]"
        page.page.wait_for_selector(head)
        assert page.text(head).startswith("1200 ")
        place = page.js(
            "[...app.root.querySelectorAll('.table thead th')].findIndex(e => e.ariaCurrent)"
        )
        cell = page.page.locator(f".table tbody tr:nth-child(2) :nth-child({place + 1})")
        assert np.float32(cell.get_attribute("title")) == values[1200, 1]
        seen = {1200}
        for name in ("40 after", "40 before"):
            said = page.text(".table [role=status]")
            while (button := page.page.get_by_role("button", name=name)).is_enabled():
                button.click()
                page.until(
                    f"app.root.querySelector('.table [role=status]').textContent !== {said!r}"
                )
                said = page.text(".table [role=status]")
                first, last = map(int, re.findall(r"columns (\d+) to (\d+)", said)[0])
                seen |= set(range(first, last + 1))
        assert seen >= set(range(1500))


def run_of(levels: list[float]) -> RunBoard:
    run = ViewedRun("net")
    for number, level in enumerate(levels):
        run._know([Series("layer", "parameters")])
        run._append(Step(number=number, loss=1.0, seconds=0.1), np.array([level]), np.ones(1, bool))
    return RunBoard(run=run)


def test_the_colours_of_parameters_begin_at_the_lowest_value_of_the_row(page: Page) -> None:
    with View(run_of([0.5 + 0.01 * step for step in range(40)]), token=TOKEN) as view:
        page.open(view.url)
        page.set(metric="parameters")
        pixels = page.pixels()
        row = pixels[20]
        assert row[4].tolist()[2] > row[4].tolist()[1], "the lowest is dark and blue"
        assert row[-6].tolist()[0] > 200, "the highest is yellow"
        assert page.text(".bar .end") == "≤ 0.5"


def test_the_still_picture_says_where_its_colours_begin() -> None:
    def said(board: Board) -> str:
        return _figure(board, base64.b64encode(still(board)).decode(), "name")

    assert "each row from its lowest value (dark) to its largest value" in said(run_of([0.5, 0.6]))
    few, many = (ArrayBoard(np.ones((columns, 2), np.float32)) for columns in (4, 300))
    assert "each row from 0 (dark) to its second largest value (bright)" in said(few)
    assert "each row from 0 (dark) to its 99.5th percentile (bright)" in said(many)


def written(scan: Scan) -> Scan:
    """The scan with a prompt that surprises much, and an answer that surprises little."""
    sequence = scan.only
    count = len(sequence)
    answer = np.arange(count) >= count // 2
    surprisal = np.where(answer, 0.5, 20.0).astype(np.float32)
    surprisal[-1] = 1.0
    tokens = replace(sequence.tokens, surprisal=surprisal, generated=answer)
    return Scan(scan.anatomy, [replace(sequence, tokens=tokens)], dict(scan.meta))


def test_the_bars_of_surprisal_end_at_what_was_written(page: Page) -> None:
    with torchfmri.view(written(make_scan(blocks=2, tokens=10)), browser=False) as view:
        page.open(view.url)
        assert "to 1 nats, ▔ beyond" in page.text(".track-names")
        tall = page.js(
            "(() => { const w = app.ui.tracks.width, c = app.ui.tracks.getContext('2d');"
            " const x = Math.round(app.scene.cell * 9.5);"
            " const d = c.getImageData(x, 0, 1, 28).data;"
            " return Array.from({length: 27}, (_, y) => d[4 * y + 3]).filter(Boolean).length; })()"
        )
        assert tall >= 20, "the largest of the answer fills its band"


class BusyBoard(ArrayBoard):
    """A board on which something is worked at for long."""

    live = True

    def doing(self) -> dict[str, str]:
        return {"now": "Computing gradients", "problem": ""}


def test_what_takes_long_says_for_how_long(page: Page) -> None:
    with View(BusyBoard(np.ones((4, 2), np.float32)), token=TOKEN) as view:
        page.open(view.url)
        page.until("/^Computing gradients, for [1-9]\\d* s$/.test(app.ui.doing.textContent)")


def test_a_deeply_nested_prompt_is_refused() -> None:
    with View(BusyBoard(np.ones((4, 2), np.float32)), token=TOKEN, on_prompt=print) as view:
        asked = Request(f"{view.url}prompt", b"[" * 60_000, method="POST")
        with pytest.raises(HTTPError) as refused:
            urlopen(asked)
        assert refused.value.code == 400


def test_a_saved_page_names_no_folder(tmp_path: Path) -> None:
    make_scan(blocks=2, tokens=9).save(tmp_path / "deep.fmri")
    torchfmri.load(tmp_path / "deep.fmri").save_html(tmp_path / "deep.html")
    text = (tmp_path / "deep.html").read_text()
    assert str(tmp_path) not in text
    assert "torchfmri.load('deep.fmri')" in text


def test_a_page_whose_scripts_are_forbidden_says_so(chromium: Any, tmp_path: Path) -> None:
    make_scan(blocks=2, tokens=9).save_html(tmp_path / "page.html")
    with opened_page(chromium) as page:
        policy = {"content-security-policy": "default-src 'none'", "content-type": "text/html"}
        body = (tmp_path / "page.html").read_text()
        page.page.route("**/*", lambda route: route.fulfill(body=body, headers=policy))
        page.page.goto("http://page.test/")
        said = page.page.get_by_text("forbids them")
        said.wait_for(timeout=5000)
        assert said.is_visible()
    with opened_page(chromium) as page:
        page.open((tmp_path / "page.html").as_uri())
        assert not page.page.get_by_text("forbids them").is_visible()
    assert "forbids them" in served_page("title")
