"""What a newcomer meets first: the answer in a sentence, names that can be read, a search."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from boards import ArrayBoard
from browser import Page
from scans import make_scan
from test_contrast_page import contrast_of

import torchfmri
from torchfmri import Contrast
from torchfmri._contrast import ContrastBoard
from torchfmri._records import Step
from torchfmri._viewer import RunBoard, View, ViewedRun

TOKEN = "0123456789abcdef"


def spoken(pieces: list[str]) -> ArrayBoard:
    """A board whose columns are these texts."""
    values = np.random.default_rng(0).random((len(pieces), 3)).astype(np.float32)
    return ArrayBoard(values, pieces=pieces)


def search(page: Page, text: str, keys: str = "Enter") -> tuple[int, str]:
    """Where a search leads, and what is said about it."""
    page.page.locator("header input").fill(text)
    said = page.text(".status")
    page.page.locator("header input").press(keys)
    page.until(f"app.ui.status.textContent !== {said!r}")
    return page.js("app.state.column"), page.text(".status")


def test_a_phrase_is_found_over_several_tokens(page: Page) -> None:
    pieces = ["The", " E", "iff", "el", " To", "wer", " is", "\n", " in", " Paris", ".", " The",
              " Eiffel", " Tower", " To", "wer"]  # fmt: skip
    with View(spoken(pieces), token=TOKEN) as view:
        page.open(view.url)
        assert search(page, "eiffel tower") == (1, "tokens 1 to 5: Eiffel Tower")
        assert search(page, "eiffel tower")[0] == 12, "the next one"
        assert search(page, "Eiffel  Tower")[0] == 1, "and around, with blanks as they come"
        assert search(page, "eiffel tower", "Shift+Enter")[0] == 12, "backwards"
        assert search(page, "is in Paris")[0] == 6, "over a line"
        assert search(page, "fel to")[0] == 12, "from the middle of a token"
        assert search(page, "Paris") == (9, "token 9: Paris")
        column, said = search(page, "eiffel paris")
        assert column == 9
        assert said == "No token and no layer contains “eiffel paris”."
        assert search(page, "layers.2")[1] == "layer layers.2"


def test_a_phrase_is_found_where_texts_are_not_loaded_yet(page: Page) -> None:
    pieces = [" x"] * 5000
    pieces[4095:4098] = [" over", " the", " edge"]  # two chunks of texts
    with View(spoken(pieces), token=TOKEN) as view:
        page.open(view.url)
        assert search(page, "over the edge") == (4095, "tokens 4095 to 4097: over the edge")


def test_a_long_prompt_arrives_whole_or_is_refused(page: Page) -> None:
    asked: list[str] = []
    with View(spoken(["a", "b"]), token=TOKEN, on_prompt=asked.append) as view:
        page.open(view.url)
        box = page.page.locator(".prompt textarea")
        prompt = "first line\nsecond line\n" + "word " * 6000
        box.fill(prompt)
        box.press("Enter")
        page.until("app.root.querySelector('.prompt textarea').value === ''")
        assert asked == [prompt], "every line of it"
        box.fill("x" * 70_000)
        box.press("Enter")
        page.page.wait_for_selector(".doing.problem")
        assert "too long: it may have 64 kB. Nothing was asked" in page.text(".doing")
        assert len(box.input_value()) == 70_000, "it can be shortened"
        assert len(asked) == 1
        assert page.errors.pop().startswith("Failed to load resource")


def test_all_layers_can_be_read_at_1280(page: Page) -> None:
    scan = make_scan(blocks=30, tokens=40)
    with torchfmri.view(scan, browser=False) as view:
        page.open(view.url)
        page.set(depth="all")
        shown = page.js("app.scene.height / app.scene.rowHeight")
        assert shown < len(scan.layers)
        labels = page.js("[...app.root.querySelectorAll('[role=treeitem]')].map(e => e.title)")
        names = [each.split(" · ")[0] for each in labels]
        assert names == list(scan.layers)[: len(names)], "every row has its name"
        assert abs(len(names) - shown) <= 1
        boxes = page.js(
            "[...app.root.querySelectorAll('[role=treeitem]')]"
            ".map(e => [e.offsetTop, e.offsetHeight])"
        )
        assert all(a[0] + a[1] <= b[0] + 1 for a, b in pairwise(boxes))
        assert f"of {len(scan.layers)}" in page.text(".axis-title")
        assert page.page.locator(".thumb").is_visible()
        page.set(depth="blocks")
        assert not page.page.locator(".thumb").is_visible()


@pytest.fixture(scope="module")
def planted() -> Contrast:
    return contrast_of(3.0)


@pytest.mark.parametrize("width", [1280, 1920])
def test_tables_fit_into_the_details(page: Page, planted: Contrast, width: int) -> None:
    page.page.set_viewport_size({"width": width, "height": 800})
    with torchfmri.view(planted, browser=False) as view:
        page.open(view.url)
        page.page.wait_for_selector("[data-panel=cell]")
        wide = page.js(
            "[...app.root.querySelectorAll('.panel .scroll')]"
            ".map(e => e.scrollWidth - e.clientWidth)"
        )
        assert len(wide) == 2
        assert max(wide) <= 0
        assert page.js("app.ui.details.scrollWidth - app.ui.details.clientWidth") <= 0


@pytest.mark.parametrize("width", [1280, 1920])
def test_numbers_of_a_table_are_not_broken(page: Page, planted: Contrast, width: int) -> None:
    page.page.set_viewport_size({"width": width, "height": 800})
    with View(ContrastBoard(planted), token=TOKEN) as view:
        page.open(view.url)
        cells = page.page.locator("[data-panel=peaks] td.figure")
        cells.first.wait_for()
        assert cells.count() >= 4
        lines = """[...app.root.querySelectorAll('[data-panel=peaks] td.figure')].map(cell => {
            const range = document.createRange();
            range.selectNodeContents(cell);
            return range.getClientRects().length;
        })"""
        assert set(page.js(lines)) == {1}


def test_a_contrast_says_its_answer(page: Page, planted: Contrast) -> None:
    board = ContrastBoard(planted)
    count, strongest = int(planted.survives.sum()), planted.ranked(1)[0]
    said = board.headline(0)
    assert said.startswith(
        f"{count} of {len(planted)} voxels differs between a and b (FDR 0.05; 12 and 12 prompts)."
    )
    assert str(planted.columns.layer[strongest]) == "model.layers.1.mlp"
    assert " of block 1, more in a (g " in said
    with torchfmri.view(planted, browser=False) as view:
        page.open(view.url)
        assert page.text(".headline") == said
        legend = page.text(".legend")
        for words in ("more in a", "more in b", "outlined: differs, and at most 5 % of these",
                      "fainter: weaker evidence"):  # fmt: skip
            assert words in legend
        page.press("c", "c", "c")
        page.until("app.ui.headline.textContent.includes('without a threshold')")


def test_a_contrast_without_a_difference_says_so() -> None:
    null = contrast_of(0.0)
    found = replace(null, survives=np.zeros(len(null), bool))
    said = ContrastBoard(found).headline(0)
    assert said.startswith(f"None of {len(null)} voxels differs between a and b")
    assert "may be chance" in said
    untested = replace(found, p=np.full(len(null), np.nan))
    assert ContrastBoard(untested).headline(0).startswith("Effect sizes only between a and b")


def run_of(losses: list[float]) -> RunBoard:
    run = ViewedRun("net")
    for number, loss in enumerate(losses):
        run.add(Step(number=number, loss=loss, seconds=0.1), {})
    return RunBoard(run=run)


def test_a_run_says_how_its_loss_went() -> None:
    said = run_of([2.0, 1.0, 0.25, 0.5]).headline(0)
    assert said == "4 steps: the loss went from 2 to 0.5 (lowest 0.25 at step 2)."
    said = run_of([2.0, 1.0, np.nan, np.inf]).headline(0)
    assert said == "4 steps: the loss went from 2 to NaN or infinity, from step 2 on."
    assert run_of([np.nan, np.nan]).headline(0) == ""
    assert run_of([1.0]).headline(0) == ""
