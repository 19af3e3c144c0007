"""Which sequence a page opens at while answers come, and how it follows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from boards import ArrayBoard, StreamBoard
from browser import Page
from numpy.typing import NDArray

from torchfmri._viewer import Entry, View

OLD = 2
NOW = OLD


class Answers(StreamBoard):
    """Two answers that are complete, and one that is being written."""

    def entries(self) -> Sequence[Entry]:
        return [Entry(f"answer {at}", self.length(at)) for at in range(OLD + 1)]

    def length(self, sequence: int) -> int:
        return len(self.table) if sequence == NOW else 5 + sequence

    def values(self, sequence: int, metric: str, plane: str) -> NDArray[Any]:
        if sequence == NOW:
            return super().values(sequence, metric, plane)
        table = np.ones((self.length(sequence), len(self.layers)), np.float32)
        return ArrayBoard(table, self.layers).values(0, metric, plane)

    def columns(self, sequence: int, first: int, last: int) -> dict[str, Any]:
        table = np.ones((self.length(sequence), 1), np.float32)
        return ArrayBoard(table).columns(0, first, last)


def answers() -> Answers:
    board = Answers()
    board.add(15)
    return board


def check_following(page: Page, board: Answers) -> None:
    page.until(f"app.ready && app.data.index === {NOW} && app.state.sequence === {NOW}")
    page.until(f"app.state.column === {board.length(NOW) - 1}")
    assert page.js("app.ui.live.textContent").startswith("LIVE")
    board.add(3)
    page.until(f"app.state.column === {board.length(NOW) - 1}")


def test_a_fresh_page_opens_at_the_answer_that_is_written(page: Page) -> None:
    board = answers()
    with View(board) as view:
        check_following(page.open(view.url), board)


def test_a_reload_opens_at_the_answer_that_is_written(page: Page) -> None:
    board = answers()
    with View(board) as view:
        page.open(f"{view.url}#sequence=1&column=2&follow=true")
        assert page.js("app.state.sequence") == 1, "a link opens what it says"
        page.page.reload()
        check_following(page, board)


def test_a_reload_stays_where_somebody_has_paused(page: Page) -> None:
    with View(answers()) as view:
        page.open(f"{view.url}#sequence=1&column=2&follow=false")
        page.page.reload()
        page.until("app.ready && app.data.index === 1 && app.state.column === 2")


def test_a_link_to_the_first_answer_says_so(page: Page) -> None:
    with View(answers()) as view:
        page.open(view.url)
        page.set(sequence=0, follow=False)
        page.until("app.data.index === 0")
        link = page.js("app.link()")
        page.page.goto("about:blank")
        page.open(link)
        assert page.js("app.state.sequence") == 0


def test_who_asks_goes_to_the_answer(page: Page) -> None:
    board, asked = answers(), []
    with View(board, on_prompt=asked.append) as view:
        page.open(f"{view.url}#sequence=0&follow=false")
        page.page.locator(".prompt textarea").fill("Once upon")
        page.press("Enter")
        page.until(f"app.state.follow && app.data.index === {NOW}")
        assert asked == ["Once upon"]
        board.add(3)
        page.until(f"app.state.column === {board.length(NOW) - 1}")


def test_the_address_is_written_while_the_state_changes_all_the_time(page: Page) -> None:
    with View(answers()) as view:
        page.open(view.url)
        later = "(app.set({column: 3}), window.due = app.saved, app.set({column: 4}), app.saved)"
        due = page.js(later)
        assert due == page.page.evaluate("() => window.due") != 0, "a change does not put it off"
        page.until("/column=4&?/.test(location.hash)")


def test_a_page_without_a_width_shows_all_columns(page: Page) -> None:
    with View(answers()) as view:
        page.open(view.url)
        shown = page.js("(app.viewport.scene.width = 0, app.connection.followed())")
        assert shown == {"column": 14, "first": 0, "last": 0}


@pytest.mark.parametrize("last", [1_000_000_000, 16])
def test_an_address_beyond_the_end_shows_what_there_is(page: Page, last: int) -> None:
    with View(ArrayBoard(np.ones((15, 4), np.float32))) as view:
        page.open(view.url)
        page.set(first=0, last=15)
        cell = page.js("app.scene.cell")
        page.set(first=0, last=last)
        assert page.js("app.scene.cell") == cell
