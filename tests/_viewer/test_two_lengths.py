"""Two scans of which one has more tokens: what only one of them said is marked."""

import numpy as np
import pytest
from browser import Page
from scans import make_anatomy, make_sequence, make_tokens
from test_copied_python import copied, run

import torchfmri
from torchfmri import Scan
from torchfmri._viewer import DiffBoard, View

LAYER = "model.layers.0.mlp"
SHORT, LONG = 6, 9


def scan_of(tokens: int, seed: int) -> Scan:
    anatomy = make_anatomy(1)
    return Scan(anatomy, [make_sequence(anatomy, tokens, seed=seed)], {"model": "m"})


@pytest.mark.parametrize("lengths", [(LONG, SHORT), (SHORT, LONG)])
def test_a_token_that_only_one_has_is_marked(lengths: tuple[int, int]) -> None:
    before, after = (scan_of(each, at) for at, each in enumerate(lengths))
    board = DiffBoard(before._board(), after._board())
    longer = max(before, after, key=lambda each: len(each.only)).only.tokens
    for first, last in ((0, LONG), (SHORT, LONG), (LONG - 1, LONG), (SHORT - 1, SHORT + 1)):
        told = board.columns(0, first, last)
        texts = [each.strip(" ") for each in longer.pieces[first:last]]
        for at, text in enumerate(texts):
            if first + at >= SHORT:
                texts[at] = f"∅ ≠ {text}" if lengths[0] == LONG else f"{text} ≠ ∅"
        assert [each.strip(" ") for each in told["pieces"]] == texts
        assert told["ids"] == longer.ids[first:last].tolist()
        assert len(told["generated"]) == len(told["special"]) == last - first


def test_where_both_have_a_token_it_is_written_by_the_second() -> None:
    before, after = scan_of(LONG, 0), scan_of(SHORT, 1)
    told = DiffBoard(before._board(), after._board()).columns(0, 0, LONG)
    own, other = after.only.tokens.generated, before.only.tokens.generated[SHORT:]
    assert told["generated"] == [*own.astype(int), *other.astype(int)]
    assert (own != before.only.tokens.generated[:SHORT]).any(), "it does make a difference"


def test_the_texts_of_tokens_are_a_slice_of_all() -> None:
    tokens = make_tokens(4, [b"a", b"\xe2\x82", b"\xac", b"b"])
    for first in range(7):
        for last in range(first, 7):
            assert tokens.pieces_of(first, last) == tokens.pieces[first:last]


@pytest.mark.parametrize("lengths", [(LONG, SHORT), (SHORT, LONG)])
def test_python_copied_at_a_token_that_only_one_has(lengths: tuple[int, int], page: Page) -> None:
    scans = [scan_of(each, at) for at, each in enumerate(lengths)]
    with torchfmri.view(*scans, browser=False) as view:
        code, shown = copied_beyond(page, view, "first" if lengths[0] == LONG else "second")
    found = run(code, before=scans[0], after=scans[1])
    assert found.column == LONG - 1
    assert np.isnan([shown, found.value]).all(), "there is nothing to subtract"
    assert "∅" in found.text


def copied_beyond(page: Page, view: View, which: str) -> tuple[str, float]:
    """As `copied`, with what the page says of such a token."""
    page.open(view.url)
    page.js(f"app.goTo({LAYER!r}, {LONG - 1})")
    cell = f".details[data-row='{LAYER}'][data-column='{LONG - 1}']:not([aria-busy])"
    page.page.wait_for_selector(cell)
    assert f"only in {which}" in page.text(".details .token")
    assert page.text(".details .value b") == "not measured"
    span = page.page.locator(f".strip [data-t='{LONG - 1}']")
    assert "d" in (span.get_attribute("class") or "").split(), "in italics"
    assert "∅" in (span.get_attribute("title") or "")
    return copied(page, view, LAYER, LONG - 1)


def test_names_of_curves_are_whole_in_a_narrow_window(page: Page) -> None:
    page.page.set_viewport_size({"width": 1024, "height": 640})
    with torchfmri.view(scan_of(LONG, 0), scan_of(SHORT, 1), browser=False) as view:
        page.open(view.url)
        page.until("app.root.querySelectorAll('.track-names div').length >= 2")
        page.until("app.data.known('tracks', 'tracks')?.header")
        page.settle()
        left = """[...app.root.querySelectorAll('.track-names div > *')].map(
            (each) => each.getBoundingClientRect().left
                - each.parentElement.getBoundingClientRect().left
        )"""
        assert min(page.js(left)) >= 0, "nothing is cut off at the left"
