"""Tables of names and columns: they fit, they name what does not, and they are escaped."""

import pytest

from torchfmri._text.columns import Column
from torchfmri._text.grid import Grid
from torchfmri._text.labels import display_width


def build(lines: int = 3) -> Grid:
    names = [f"layers.{index}.attention.projection" for index in range(lines)]
    columns = [
        Column(title, [f"{index * 1000}" for index in range(lines)], importance)
        for importance, title in enumerate(["first <column>", "second", "third", "fourth"])
    ]
    return Grid("what it is about", "layer", names, columns, ["a <note>"], frozenset([0]))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_lines_fit(width: int) -> None:
    text = build().text(width)
    assert max(map(display_width, text.splitlines())) <= width
    assert "a <note>" in text
    # Either it is shown, or it is said that there was no room.
    assert all(title in text for title in ("first <column>", "second", "third", "fourth"))
    assert ("no room for" in text) == (width < 80)


def test_names_stay_apart_when_they_are_shortened() -> None:
    names = [line.split()[0] for line in build().text(40).splitlines() if line.startswith("lay")]
    assert len(set(names)) == len(names) >= 3


def test_html_is_escaped_and_ends() -> None:
    html = build().html()
    assert "<column>" not in html
    assert "&lt;note&gt;" in html
    assert html.endswith("</div>")
    assert html.count("<div") == html.count("</div>")


def test_html_is_cut_where_it_would_be_too_long() -> None:
    html = build(20_000).html()
    assert len(html.encode()) < 200_000
    assert "more lines." in html
    assert html.count("<div") == html.count("</div>")
