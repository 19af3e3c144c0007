"""A NaN that a model computed is told from what was not measured: in the table, CSV and SVG."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from browser import Page
from scans import make_scan

from torchfmri import Scan
from torchfmri._viewer import Desk, View
from torchfmri._viewer.desk import NOTHING
from torchfmri._viewer.page import whole_page

BAD, LAST = 4, 7


def broken() -> tuple[Scan, str]:
    """A scan with a NaN at one token, whose last token was never run, and the layer of the NaN."""
    scan = make_scan(blocks=1, tokens=LAST + 1, metrics=["activation"])
    table = scan.only.layers["activation"]
    table[-1] = np.nan
    row = scan.layers.index("model.layers.0.mlp")
    # Any of the NaNs, even the one by which others are known.
    table[BAD, row : row + 1].view(np.uint32)[:] = NOTHING
    return scan, "model.layers.0.mlp"


def test_the_desk_marks_what_was_not_measured() -> None:
    scan, layer = broken()
    table = scan.only.layers["activation"]
    row = scan.layers.index(layer)
    questions = [
        ({}, (slice(None), slice(None))),
        ({"row": str(row)}, (slice(None), slice(row, row + 1))),
        ({"first": "3", "last": "6"}, (slice(3, 6), slice(None))),
        ({"first": "7", "row": str(row)}, (slice(7, None), slice(row, row + 1))),
    ]
    for given, part in questions:
        answer = Desk(scan._board()).answer("values", given)
        assert isinstance(answer, bytes)
        expected = table[part].T
        sent = np.frombuffer(answer, "<f4").reshape(expected.shape)
        np.testing.assert_array_equal(sent, expected)
        lost = np.zeros(table.shape, bool)
        lost[LAST] = True
        np.testing.assert_array_equal(sent.view("<u4") == NOTHING, lost[part].T)


def check_page(page: Page, layer: str, folder: Path) -> None:
    page.set(depth="all", follow=False)
    page.press("t")
    row = page.page.locator(".popup tbody tr", has=page.page.get_by_text(layer, exact=True))
    cells = row.locator("td")
    cells.nth(LAST).wait_for()
    assert cells.nth(BAD).inner_text() == "NaN"
    assert cells.nth(LAST).inner_text() == "–"
    assert cells.nth(LAST).get_attribute("title") == "not measured"
    assert "–: not measured" in page.text(".popup")
    page.press("Escape")
    files = {}
    for kind in ("csv", "svg"):
        with page.page.expect_download() as found:
            page.js(f"app.save({kind!r})")
        files[kind] = folder / f"saved.{kind}"
        found.value.save_as(files[kind])
    names, *lines = csv.reader(io.StringIO(files["csv"].read_text("utf-8")))
    at = names.index(layer)
    assert [lines[BAD][at], lines[LAST][at]] == ["nan", ""]
    assert all(np.isfinite(float(line[at])) for line in lines[:BAD])
    drawn = files["svg"].read_text("utf-8")
    assert f"{layer}, {BAD}: nan" in drawn
    assert f"{layer}, {LAST}: not measured" in drawn


def test_in_a_page_that_is_served(page: Page, tmp_path: Path) -> None:
    scan, layer = broken()
    with View(scan._board()) as view:
        check_page(page.open(view.url), layer, tmp_path)


def test_in_a_page_that_is_a_file(page: Page, tmp_path: Path) -> None:
    scan, layer = broken()
    path = tmp_path / "page.html"
    path.write_text(whole_page(scan._board()), "utf-8")
    check_page(page.open(path.as_uri()), layer, tmp_path)


def test_details_do_not_wait_for_a_tile_to_tell(page: Page) -> None:
    """A tile that was on its way counted as one that says NaN, and the details kept saying so."""
    scan = make_scan(blocks=1, tokens=LAST + 1)  # no gradient at the last token
    late: list[Any] = []
    with View(scan._board()) as view:
        page.open(view.url)
        page.page.route(
            "**/tile?*metric=gradient*", lambda route: late.append(route)
        )  # it is not answered
        page.js("app.set({ metric: 'gradient', follow: false })")
        page.press("End")
        page.page.locator(f".details[data-column='{LAST}']:not([aria-busy])").wait_for()
        page.until("app.state.metric === 'gradient' && app.metric.unit.startsWith('norm')")
        page.page.locator(".details .value b:text-is('not measured')").wait_for()
        assert late, "tiles were asked for"
        assert "NaN" not in page.text(".details") + page.text(".status")
        page.page.goto("about:blank")


def test_details_name_a_token_whose_text_comes_late(page: Page) -> None:
    scan = make_scan(blocks=1, tokens=LAST + 1)
    late: list[Any] = []
    with View(scan._board()) as view:
        page.page.route("**/columns?*", lambda route: late.append(route))
        page.open(view.url)
        page.page.locator(".details .token q:text-is('…')").wait_for()
        for each in late:
            each.continue_()
        page.page.locator(".details .token q:not(:text-is('…'))").wait_for()


def test_a_saved_page_lists_its_sequence_by_how_it_begins(page: Page, tmp_path: Path) -> None:
    scan, _ = broken()
    path = tmp_path / "page.html"
    path.write_text(whole_page(scan._board()), "utf-8")
    page.open(path.as_uri()).press("s")
    entry = page.page.locator(".picker b")
    entry.wait_for()
    assert entry.inner_text() == scan.only.beginning != scan.only.name
