import io
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from torchfmri import Inspector
from torchfmri._text.columns import Column, FittedTable, Style
from torchfmri._text.labels import display_width, shorten
from torchfmri._text.rows import Row, group_reasons, make_lines, number_text, share_text
from torchfmri._text.table import html_table, text_table
from torchfmri.statistics import calculate_statistics

NAN, INF = float("nan"), float("inf")


def row(layer: str = "fc", values: object = None, what: str = "activations", **kind: object) -> Row:
    tensor = torch.linspace(-1, 1, 101) if values is None else torch.as_tensor(values)
    return Row(layer, str(kind.get("kind", "Linear")), what, 1, calculate_statistics(tensor))


def table(rows: list[Row], missing=None, notes=None, **options: object) -> str:
    return text_table(
        rows,
        "the title",
        missing or {},
        notes or {},
        unfolded="inspection.table(fold=False)",
        reasons="inspection.missing",
        **options,
    )


class Output(io.StringIO):
    """Standard output that is a terminal, or not, with a given encoding."""

    def __init__(self, encoding: str = "utf-8", terminal: bool = False) -> None:
        super().__init__()
        self._encoding, self._terminal = encoding, terminal

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_line_has_the_numbers_of_the_layer() -> None:
    text = table([row("encoder.fc", [[1.0, 2.0], [3.0, 0.0]], kind="Thing")])
    (line,) = [line for line in text.splitlines() if line.startswith("encoder.fc")]
    assert line.split()[1:] == [
        "Thing",
        "2x2",
        "1.5",
        "1.118",
        "0",
        "3",
        "0",
        "25%",
        *line.split()[9:],
    ]
    assert text.startswith("the title\nno NaN or Inf\n")


def test_gradients_have_a_section_that_says_what_they_are() -> None:
    text = table([row(), row(what="gradients"), row(what="parameter_gradients")])
    assert "gradients (dL/d output)" in text
    assert "parameter_gradients (dL/d parameter)" in text


def test_nan_and_inf_are_counted_and_marked_without_colour() -> None:
    text = table([row("good"), row("broken", [1.0, NAN, INF, -INF])])
    assert "NaN or Inf in 1 of 2 rows, first (in model order): activations of broken" in text
    (line,) = [line for line in text.splitlines() if line.startswith("! broken")]
    assert "1 NaN, 2 Inf" in line
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.0, 0.0, 0.0], "all zero"),
        ([2.0, 2.0], "constant"),
        ([NAN, NAN], "all NaN"),
        ([INF, NAN], "none finite"),
        ([], "empty"),
    ],
)
def test_a_distribution_that_is_none_is_named(values: list[float], words: str) -> None:
    assert words in table([row(values=values)])


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("fold", [True, False])
def test_no_line_is_wider_than_the_terminal(width: int, fold: bool) -> None:
    rows = [
        row(f"model.decoder.layers.{index}.self_attention.q_proj", kind="VeryLongTypeNameIndeed")
        for index in range(12)
    ]
    rows.append(row("层" * 40, [NAN, 1.0, 2.0]))
    missing = {"model.layers": "never called in this run; " + "a long reason " * 10}
    text = table(rows, missing, {"a note " * 12: ["fc"]}, width=width, fold=fold)
    assert max(map(display_width, text.splitlines())) <= width


def test_columns_that_do_not_fit_are_named() -> None:
    assert "no room for" not in table([row()], width=150)
    assert "no room for type, shape" in table([row("encoder.layers.attention")], width=70)


def test_two_columns_of_one_title_are_named_once() -> None:
    columns = [Column("over depth", ["x" * 20], at) for at in range(3)]
    fitted = FittedTable(["layer"], [*columns, Column("loss", ["1"], 9)], 30, Style(False, False))
    assert fitted.dropped == ["over depth", "over depth"]
    assert " ".join(fitted.missing_columns()) == "no room for over depth in 30 columns"


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    assert max(map(display_width, table([row()]).splitlines())) <= 64


def test_shortened_names_keep_numbers_and_stay_apart() -> None:
    names = [f"model.decoder.layers.{index}.self_attention.q_proj" for index in range(30)]
    short = {shorten(name, 26) for name in names}
    assert len(short) == 30
    assert all(display_width(name) <= 26 and name.endswith("q_proj") for name in short)
    assert display_width(shorten("x" * 100, 20)) == 20


def test_blocks_where_the_output_can_take_them_ascii_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [row("层.fc", torch.randn(1000, generator=torch.Generator().manual_seed(0)))]
    monkeypatch.setattr("sys.stdout", Output("utf-8"))
    assert "█" in table(rows)
    monkeypatch.setattr("sys.stdout", Output("ascii"))
    plain = table(rows, {"layer": "reason…"})
    plain.encode("ascii")
    assert "@" in plain


@pytest.mark.parametrize(
    ("terminal", "no_color", "term", "coloured"),
    [
        (True, None, "xterm", True),
        (False, None, "xterm", False),
        (True, "1", "xterm", False),
        (True, "", "xterm", True),
        (True, None, "dumb", False),
    ],
)
def test_colour_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    no_color: str | None,
    term: str,
    coloured: bool,
) -> None:
    monkeypatch.setattr("sys.stdout", Output(terminal=terminal))
    monkeypatch.setenv("TERM", term)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    text = table([row(values=[NAN, 1.0])])
    assert ("\x1b[" in text) is coloured


def test_colours_do_not_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("a"), row("b", [NAN])]
    plain = table(rows, width=90)
    monkeypatch.setattr("sys.stdout", Output(terminal=True))
    assert re.sub(r"\x1b\[[0-9;]*m", "", table(rows, width=90)) == plain


def test_escape_sequences_in_names_do_not_reach_the_terminal() -> None:
    text = table([row("evil\x1b[2J\n")], {"x\x1b[31m": "why\x07"})
    assert "\x1b" not in text
    assert "\x07" not in text


def test_long_tables_fold_what_differs_only_in_numbers() -> None:
    rows = [row(f"layers.{index}.{name}") for index in range(40) for name in ("up", "down", "norm")]
    rows[7 * 3] = row("layers.7.up", [0.0, 0.0])
    rows[9 * 3 + 1] = row("layers.9.down", [NAN, 1.0])
    text = table(rows)
    shown = [line.split()[0] for line in text.splitlines() if line.startswith(("layers", "! "))]
    assert sorted(shown) == sorted(
        ["layers.*.up", "layers.*.down", "layers.*.norm", "layers.7.up", "!"]
    )
    assert "39 layers" in text
    assert "40 layers" in text
    assert "120 rows on 5 lines" in text
    assert table(rows, fold=False).count("\nlayers.") == 119


def test_folded_statistics_are_those_of_all_layers_together() -> None:
    tensors = [torch.full((10,), float(index)) + torch.rand(10) for index in range(3)]
    rows = [row(f"layers.{index}.fc", tensor) for index, tensor in enumerate(tensors)]
    (line,) = make_lines(rows, fold=True)["activations"]
    whole = calculate_statistics(torch.stack(tensors))
    assert line.name == "layers.*.fc"
    assert line.statistics.count == 30
    assert line.statistics.mean == pytest.approx(whole.mean)
    assert line.statistics.std == pytest.approx(whole.std)
    assert list(line.scales) == [each.statistics.std for each in rows if each.statistics]


def test_the_trend_over_depth_goes_the_way_of_the_scales() -> None:
    base = torch.randn(500, generator=torch.Generator().manual_seed(0))
    growing = [row(f"layers.{index}.fc", base * 10.0**index) for index in range(6)]
    line = next(
        each for each in table(growing, fold=True).splitlines() if each.startswith("layers")
    )
    trend = line.split()[-1]
    assert len(trend) == 6
    assert list(trend) == sorted(trend)
    assert trend[0] != trend[-1]


def test_what_is_missing_is_listed_once_per_kind_with_its_reason() -> None:
    missing = {
        **{f"layers.{n}.drop": f"never called; watch 'layers.{n}'" for n in range(6)},
        "pooler": "no gradient arrived",
    }
    assert group_reasons(missing) == [
        ("layers.*.drop", 6, "never called; watch 'layers.*'"),
        ("pooler", 1, "no gradient arrived"),
    ]
    text = table([row()], missing)
    assert "not captured\n  layers.*.drop (6 layers): never called; watch 'layers.*'" in text
    assert "  pooler: no gradient arrived" in text


def test_a_row_without_statistics_is_never_silently_left_out() -> None:
    text = table([row(), Row("lonely", "Linear", "gradients", 1, None)])
    assert "lonely: gradients: nothing arrived" in text


def test_notes_and_padding() -> None:
    tensor, mask = torch.randn(2, 5, 3), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    padded = Row("fc", "Linear", "activations", 1, calculate_statistics(tensor, mask=mask))
    text = table([padded], notes={"a reservation": ["a", "b", "c", "d", "e"], "of the model": [""]})
    assert "padding is left out: 7 of 10 positions counted (1 row)" in text
    assert "a reservation: a, b, c and 2 more" in text
    assert "  of the model\n" in text + "\n"


def test_nothing_at_all() -> None:
    assert table([]) == "the title\nno NaN or Inf"
    assert "the title" in html_table([], "the title", {}, {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-99.98, "-99.98"),
        (0.012345, "0.0123"),
        (1234567.0, "1.2e6"),
        (-1.23e-7, "-1.2e-7"),
        (NAN, "-"),
        (12345, "12345"),
        (2**63, "9.2e18"),
        (99_999.7, "1.0e5"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


def test_shares_say_all_and_none_only_where_exact() -> None:
    shares = [share_text(part, 1000) for part in (0, 1, 500, 999, 1000)]
    assert shares == ["0", "<1%", "50%", ">99%", "100%"]


# -- HTML ------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that tags are balanced, and collects them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def test_html_escapes_every_text_from_outside() -> None:
    rows = [row("<b>", kind="<i>"), row("<b>", [NAN, 1.0], what="gradients")]
    text = html_table(rows, "<u>", {"<s>": "<script>"}, {"<em>": ["<q>"]})
    page = Page(text)
    for tag in ("i", "u", "s", "script", "em", "q"):
        assert page.count(tag) == 0
    assert page.count("b") == 2  # ours: the verdict and the count of NaN
    for written in ("<b>", "<i>", "<u>", "<s>", "<script>", "<em>", "<q>"):
        assert written in page.words


def test_html_brings_everything_with_it_and_can_be_read_aloud() -> None:
    page = Page(html_table([row("a"), row("b", what="gradients")], "title", {}, {}))
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href", "onload", "onclick"} & set(attributes)
    assert page.count("table") == page.count("caption") == 2
    assert all(attributes.get("scope") for tag, attributes in page.tags if tag == "th")
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) == 2
    assert all(each["role"] == "img" and "median" in str(each["aria-label"]) for each in drawings)
    assert "gradients: dL/d output" in page.words


def test_html_sets_no_text_colour_but_for_warnings() -> None:
    text = html_table([row()], "title", {}, {})
    colours = set(re.findall(r"(?<![-\w])color:([^;}]+)", text))
    assert colours <= {"inherit", "#d1495b"}
    assert 'fill="currentColor"' in text


@pytest.mark.parametrize("numbered", [True, False])
def test_html_of_a_large_model_stays_below_200_kb(numbered: bool) -> None:
    base = torch.randn(300, generator=torch.Generator().manual_seed(0))
    names = [f"model.layers.{n}.mlp" if numbered else f"layer_{n}_" + "x" * 60 for n in range(700)]
    rows = [row(name, base, what) for name in names for what in ("activations", "gradients")]
    missing = {f"missing_{n}_" + "y" * 80: "a reason " * 9 for n in range(700)}
    text = html_table(rows, "title", missing, {})
    assert len(text.encode()) < 200_000
    page = Page(text)
    if numbered:
        assert "1,400 rows as 2" in page.words
    else:
        assert "left out for size" in page.words
    assert "more: see inspection.missing" in page.words


def test_inspection_uses_the_tables() -> None:
    torch.manual_seed(0)
    inspector = Inspector(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    inspection = inspector.run_inspection(torch.randn(3, 4))
    assert "Linear" in inspection.table()
    assert Page(inspection._repr_html_()).count("table") == 1
