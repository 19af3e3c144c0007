"""Where a page opens and what it says first: a sentence that is true, at a cell that matters."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from boards import ArrayBoard
from browser import Page, opened_page
from scans import make_anatomy, make_scan, make_sequence
from torch import nn

import torchfmri
from torchfmri import Monitor, Scan, Tokens
from torchfmri._records import Series, Step
from torchfmri._scan import difference_of
from torchfmri._scan.pictures import scan_board
from torchfmri._scan.pictures.token_texts import tokens_sentence
from torchfmri._viewer import DiffBoard, RunBoard, View
from torchfmri._viewer.desk import Desk, own_texts, to_json
from torchfmri._viewer.run_board import ViewedRun
from torchfmri.statistics import calculate_statistics

TOKEN = "0123456789abcdef"


def tokens_of(texts: list[bytes], surprisal: list[float], written: int) -> Tokens:
    count = len(texts)
    return Tokens(
        ids=np.arange(count),
        spelling=tuple(texts),
        surprisal=np.array(surprisal, np.float32),
        entropy=np.zeros(count, np.float32),
        generated=np.arange(count) >= count - written,
        special=np.array([each.startswith(b"<") for each in texts], bool),
    )


def test_the_sentence_of_a_scan_is_its_tokens() -> None:
    texts = [b"<s>", b" What", b" now", b" Go", b" home", b"<end>"]
    surprisal = [math.nan, 9.0, 8.0, math.log(2), math.log(4), 7.0]
    said = tokens_sentence(tokens_of(texts, surprisal, 3))
    assert said == (
        "The model read 3 tokens and wrote 3. Least expected: “home” (token 4, probability 25 %)."
    ), "neither what it read nor its end counts"
    said = tokens_sentence(tokens_of(texts[:3], [math.nan, math.log(1000), 2.0], 0))
    assert said == "The model read 3 tokens. Least expected: “What” (token 1, probability 0.1 %)."
    said = tokens_sentence(tokens_of(texts, [math.nan] * 6, 3))
    assert said == "The model read 3 tokens and wrote 3.", "an encoder expects nothing"
    assert tokens_sentence(tokens_of([], [], 0)) == ""


def test_the_sentence_shows_what_is_hidden_as_the_text_does(page: Page) -> None:
    anatomy = make_anatomy(1)
    spelling = [b" a", b" b", "\u202eevil\u202c".encode(), b" d"]
    sequence = make_sequence(anatomy, 4, spelling=spelling)
    sequence.tokens.surprisal[:] = [math.nan, 1.0, 9.0, 1.0]
    with torchfmri.view(Scan(anatomy, [sequence], {}), browser=False) as view:
        page.open(view.url)
        assert "Least expected: “‹202e›evil‹202c›” (token 2" in page.text(".headline")
        page.page.goto("about:blank")


def test_no_difference_is_as_dark_or_light_as_the_page(chromium: Any) -> None:
    before, after = two_scans()
    after.only.layers["activation"][5, 2] *= 3
    board = difference_of(before._board(), after._board())
    for theme, centre in (("light", (236, 229, 224)), ("dark", (25, 12, 9))):
        with (
            View(board, token=TOKEN) as view,
            opened_page(chromium, color_scheme=theme) as page,
        ):
            page.open(view.url)
            page.set(depth="all", norm="row")
            page.js("app.goTo(app.data.board.layers[0], 0)")
            page.settle()
            scene, pixels = page.js("app.scene"), page.pixels()
            place = [int(2.5 * scene["rowHeight"]), int(5.5 * scene["cell"])]
            changed, same = pixels[*place], pixels[place[0], int(7.5 * scene["cell"])]
            assert np.abs(same - np.array(centre)).max() <= 4
            assert (changed.mean() > same.mean()) == (theme == "dark")
            page.press("d")
            page.until(f"app.screen.look.dark === {str(theme == 'light').lower()}")


@pytest.mark.parametrize("wrote", [0, 4])
def test_a_nan_in_a_prompt_is_named_where_it_was_computed_first(wrote: int) -> None:
    """Later layers mix tokens, so that a NaN reaches tokens before the one that it came from."""
    model, tokenizer = torchfmri.load_model("tiny")
    layer = "model.layers.2.mlp"

    def break_late_tokens(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
        if out.shape[1] > 5:
            out = out.clone()
            out[:, 5:] = math.nan
        return out

    model.get_submodule(layer).register_forward_hook(break_late_tokens)
    options = {"per": None} if wrote else {}
    scan = torchfmri.scan(model, tokenizer, "Once upon a time there was a girl.", wrote, **options)
    values = scan.values("activation", pattern="*.self_attn.o_proj").values
    assert np.isnan(values[0]).any(), "it did reach the first token"
    [alarm] = [each for each in scan._board().health(0) if each.severity == "alarm"]
    assert (alarm.layer, alarm.column) == (layer, 5)


def test_a_run_that_is_over_opens_where_it_broke(page: Page, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer, folder=tmp_path / "run")
    for number in range(12):
        with monitor.step() as step:
            x = torch.randn(8, 4)
            if number == 7:
                x[0, 0] = math.nan
            loss = model(x).square().mean()
            step.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    monitor.detach()
    with torchfmri.view(tmp_path / "run", browser=False) as view:
        page.open(view.url)
        page.page.wait_for_selector(".live:not([hidden])")
        page.page.wait_for_timeout(500)  # the server has said by now that nothing is going on
        assert page.text(".live") == "ended"
        assert page.js("app.state.column") == 7
        assert "not measured" not in page.text(".bar"), "of the rows that are shown"


def test_a_healthy_run_that_is_over_opens_at_its_end(page: Page, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.01), folder=tmp_path / "run")
    for _ in range(5):
        with monitor.step() as step:
            step.loss(model(torch.randn(8, 4)).square().mean())
    monitor.detach()
    with torchfmri.view(tmp_path / "run", browser=False) as view:
        page.open(view.url)
        page.until("app.state.column === 4")


def test_a_difference_says_what_differs_and_opens_there(page: Page) -> None:
    anatomy = make_anatomy(2)
    before = Scan(anatomy, [make_sequence(anatomy, 9, seed=1)], {"model": "m"})
    after = Scan(anatomy, [make_sequence(anatomy, 9, seed=1)], {"model": "m"})
    layer = "model.layers.1.mlp"
    own = anatomy.layers.index(layer)
    changed = after.only.layers["activation"]
    changed[5, own] *= 2
    column = before.only.layers["activation"][:, own].astype(np.float64)
    share = 100 * column[5] / np.sqrt((column**2).sum())
    with torchfmri.view(before, after, browser=False) as view:
        page.open(view.url)
        count = len(anatomy.layers)
        assert page.text(".headline") == (
            f"Activation differs in 1 of {count} layers, most in {layer}, by {share:.2g} %."
        )
        assert page.js("[app.state.layer, app.state.column]") == [layer, 5]
        page.page.goto("about:blank")  # it would ask a server that is gone
    with torchfmri.view(before, before, browser=False) as view:
        page.open(view.url)
        said = f"No difference: activation is the same in {count} layers."
        assert page.text(".headline") == said
        page.page.wait_for_selector(".details .sentence")
        assert "values in this row are the same" in page.text(".details")


def two_scans(tokens: int = 9, sequences: int = 1) -> tuple[Scan, Scan]:
    """Two scans of equal values."""
    anatomy = make_anatomy(2)
    before, after = (
        Scan(anatomy, [make_sequence(anatomy, tokens, seed=at) for at in range(count)], {})
        for count in (1, sequences)
    )
    return before, after


def respelled(scan: Scan, first: int) -> Scan:
    """The scan with other texts from a token on."""
    old = scan.only.tokens.spelling
    spelling = tuple(each if at < first else b" other" for at, each in enumerate(old))
    return Scan(
        scan.anatomy,
        [replace(scan.only, tokens=replace(scan.only.tokens, spelling=spelling))],
        {},
    )


def test_texts_that_differ_from_the_first_token_on_are_not_called_the_same() -> None:
    before, after = two_scans()
    after = respelled(after, 0)
    after.only.layers["activation"][5] *= 2
    board = difference_of(before._board(), after._board())
    said = board.headline(0)
    assert said.startswith("Activation differs in")
    assert said.endswith(" % (by position: the texts differ from token 0 on).")
    assert "the same" not in said
    assert f"differs in {len(board.layers)} of {len(board.layers)} layers" in said
    assert board.start["column"] == 5


def test_a_difference_says_up_to_where_it_compares_the_same_texts() -> None:
    before, after = two_scans()
    after = respelled(after, 1)
    after.only.layers["activation"][5] *= 2
    board = difference_of(before._board(), after._board())
    assert board.start == {"column": 1}, "where there is something to see"
    said = board.headline(0)
    assert said == (
        f"Activation is the same in {len(before.layers)} layers (up to token 0, as long as the "
        "texts are the same)."
    )


def test_sequences_without_a_partner_are_counted() -> None:
    before, after = two_scans(sequences=20)
    found = [each.text for each in difference_of(before._board(), after._board()).health(0)]
    said = "Only 1 of the 20 sequences of second can be compared, by their places: first has 1"
    assert said in found
    assert not difference_of(before._board(), before._board()).health(0)


def test_rounding_is_no_difference_but_is_said() -> None:
    before, after = two_scans()
    values = after.only.layers["activation"]
    count = len(before.layers)
    values[:, 2] = np.nextafter(values[:, 2], np.float32(9e9))
    board = difference_of(before._board(), after._board())
    said = board.headline(0)
    assert said.startswith(f"Activation is the same in {count} layers up to rounding (at most ")
    assert board.start == {}
    values[:, 3] *= np.float32(1.001)
    assert f"differs in 1 of {count} layers, most in {before.layers[3]}, by 0.1 %; " in (
        board.headline(0)
    )
    assert board.headline(0).endswith("1 more differ by rounding alone.")
    values[4, 1] = np.nan
    assert f"in 2 of {count} layers, most in {before.layers[1]}" in board.headline(0)


def test_the_difference_of_runs_speaks_of_steps() -> None:
    def run(numbers: list[int]) -> RunBoard:
        viewed = ViewedRun("net")
        for number in numbers:
            viewed.add(Step(number=number, loss=1.0, seconds=0.1), {})
        return RunBoard(run=viewed)

    board = DiffBoard(run([0, 1, 2]), run([0, 1, 5]))
    (found,) = board.health(0)
    assert found.text.startswith("The step numbers differ from step 2 on")


def test_the_difference_of_runs_counts_the_layers_that_have_the_metric() -> None:
    def run(scale: float) -> RunBoard:
        viewed = ViewedRun("net")
        found = {
            Series(name, what): calculate_statistics(torch.full((4,), scale * size))
            for name, what, size in [
                ("0", "activations", 1.0),
                ("2", "activations", 2.0),
                ("0.weight", "parameters", 1.0),
            ]
        }
        for number in range(3):
            viewed.add(Step(number=number, loss=1.0, seconds=0.1), found)
        return RunBoard(run=viewed)

    said = DiffBoard(run(1.0), run(1.5)).headline(0)
    assert said == "Activations differ in 2 of 2 layers, most in layer 0, by 50 %."
    assert DiffBoard(run(1.0), run(1.0)).headline(0) == (
        "No difference: activations are the same in 2 layers."
    )


def test_equal_values_are_not_called_higher(page: Page) -> None:
    values = np.zeros((20, 2), np.float32)
    values[0], values[19] = -1, 1
    with View(ArrayBoard(values), token=TOKEN) as view:
        page.open(view.url)
        for column, said in [
            (5, "Higher than 5 % of this row’s tokens, as high as 17 others"),
            (0, "The lowest of this row’s tokens (z"),
            (19, "The highest of this row’s tokens (z"),
        ]:
            page.js(f"app.goTo('layers.1', {column})")
            page.page.wait_for_selector(f".details[data-column='{column}']:not([aria-busy])")
            assert page.text(".sentence").startswith(said)


def test_text_from_right_to_left_is_read_so(page: Page) -> None:
    pieces = ["<s>", "ש", "ל", "ו", "ם", " ע", "ולם", "</s>", " Hello", " you"]
    values = np.random.default_rng(0).random((len(pieces), 2)).astype(np.float32)
    with View(ArrayBoard(values, pieces=pieces), token=TOKEN) as view:
        page.open(view.url)
        place = "[...app.root.querySelectorAll('.strip [data-t]')]"
        page.until(f"{place}.length === 10")
        left = page.js(f"{place}.map(e => e.getBoundingClientRect().x)")
        assert left[1] > left[2] > left[3] > left[4] > left[5] > left[6], "as it is written"
        assert left[8] < left[9]
        page.page.locator(".strip [data-t='4']").click()
        page.until("app.state.column === 4")


def test_joiners_are_part_of_words_and_codes_stay_whole_beside_them(page: Page) -> None:
    pieces = ["می\u200cخواهم", " क्\u200dष", " 👩\u200d👩\u200d👧", "\u200c", "a\u200db", "שלום",
              " עולם", "\u202e", " of", "x\U000e0041", "🏴\U000e0067\U000e0062\U000e007f",
              "\u2060\u061c", "\u2028 \ufeff"]  # fmt: skip
    values = np.ones((len(pieces), 2), np.float32)
    with View(ArrayBoard(values, pieces=pieces), token=TOKEN) as view:
        page.open(view.url)
        page.page.wait_for_selector(".strip [data-t='12']")
        texts = page.js("[...app.root.querySelectorAll('.strip [data-t]')].map(e => e.textContent)")
        assert texts[:3] == pieces[:3], "as it is written in Persian, in Hindi and of emoji"
        assert texts[3:5] == ["‹200c›", "a‹200d›b"], "where nothing is joined, they are seen"
        assert texts[9] == "x‹e0041›", "a letter that nobody sees"
        assert texts[10] == pieces[10], "letters that make a flag of it"
        assert texts[11:] == ["‹2060›‹61c›", "‹2028› ‹feff›"]
        code = "app.root.querySelector('.strip [data-t=\"7\"]')"
        assert page.js(f"{code}.textContent") == "‹202e›"
        assert page.js(f"{code}.getClientRects().length") == 1
        # Every letter of the code is behind the one before it: none was drawn into the Hebrew.
        page.js(f"window.letters = {code}.querySelector('bdi').firstChild")
        left = page.js(
            f"Array.from({code}.textContent, (_, i) => {{ const range = document.createRange();"
            f"range.setStart(letters, i); range.setEnd(letters, i + 1);"
            "return range.getBoundingClientRect().x; })"
        )
        assert left == sorted(left)
        assert len(set(left)) == 6
        page.page.locator(".strip bdi", has_text="202e").click()
        page.until("app.state.column === 7")


def test_a_sequence_is_named_without_what_all_begin_with(page: Page) -> None:
    rule = "You are a helpful assistant."
    assert own_texts([f"{rule} Why?", f"{rule} When?"]) == ["… Why?", "… When?"]
    for texts in (["Why?", "When?"], [rule, rule], [f"{rule} Why?"], [], ["", f"{rule} Why?"]):
        assert own_texts(texts) == texts
    anatomy = make_anatomy(1)
    start = [b"<s>", b"You are kind, ", b"and helpful. "]
    sequences = [
        make_sequence(anatomy, 12, seed=at, spelling=[*start, city, *[b" x"] * 8])
        for at, city in enumerate((b"Rome", b"Bern"))
    ]
    with torchfmri.view(Scan(anatomy, sequences, {"model": "m"}), browser=False) as view:
        page.open(view.url)
        assert page.text(".chip").startswith("… Rome")
        page.press("s")
        page.page.wait_for_selector(".picker button")
        names = page.page.locator(".picker b").all_inner_texts()
        assert [each[:6] for each in names] == ["… Rome", "… Bern"]
        page.page.locator(".box input").fill("helpful bern")
        page.until("app.root.querySelectorAll('.picker button').length === 1")


@pytest.mark.parametrize("begun", [False, True])
def test_a_scan_that_is_added_to_shows_what_is_new(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr(scan_board, "LOOK", 0.1)
    anatomy = make_anatomy(1)
    first, second = (
        Scan(anatomy, [make_sequence(anatomy, 9, seed=seed)], {"model": "m"}) for seed in range(2)
    )
    (first if begun else Scan(anatomy, [], {"model": "m"})).save(tmp_path / "x.fmri")
    with torchfmri.view(tmp_path / "x.fmri", browser=False) as view:
        if begun:
            page.open(view.url)
            page.set(column=2)
        else:
            page.page.goto(view.url)
            page.page.wait_for_selector(".cover h2:text('Nothing here yet')")
        second.save(tmp_path / "x.fmri", append=True)
        page.until(f"app.data.board.sequences === {1 + begun} && app.ready")
        page.settle()
        assert page.js("app.state.sequence") == 0
        if begun:
            assert page.js("app.state.column") == 2, "whoever reads is not moved"
            page.set(sequence=1)
            page.until("app.data.index === 1")


def test_half_of_a_character_does_not_stop_an_answer() -> None:
    board = ArrayBoard(np.ones((2, 1), np.float32), pieces=["a", "\ud83d"])
    assert to_json(Desk(board).answer("columns", {})) == (
        '{"pieces":["a","?"],"ids":[0,1],"generated":[0,0],"special":[0,0]}'
    )


def test_a_number_without_a_metric_says_what_there_is(page: Page) -> None:
    with View(ArrayBoard(np.ones((3, 2), np.float32)), token=TOKEN) as view:
        page.open(view.url)
        page.press("4")
        said = "Nothing has the number 4: only Activation can be shown here."
        page.until(f"app.ui.status.textContent === {said!r}")


@pytest.mark.parametrize("tokens", [0, 6])
def test_a_map_without_values_has_no_numbers_at_its_bar(page: Page, tokens: int) -> None:
    with View(ArrayBoard(np.full((tokens, 4), np.nan, np.float32)), token=TOKEN) as view:
        page.open(view.url, "drawn" if tokens else "empty")
        page.until("app.ui.bar.textContent.startsWith('No values')")
        assert "≥" not in page.text(".bar")
        assert ("NaN or infinite" in page.text(".bar")) == (tokens > 0)


def test_a_low_page_keeps_its_map(chromium: Any) -> None:
    with (
        View(make_scan(blocks=2, tokens=9)._board(), token=TOKEN) as view,
        opened_page(chromium, viewport={"width": 1280, "height": 600}) as page,
    ):
        page.open(view.url)
        assert page.js("app.scene.height") > 200
        assert page.js("app.ui.strip.offsetHeight") < 60, "no larger than its text"


def test_copied_python_of_a_sum_of_layers_gives_the_sum_alone(page: Page) -> None:
    """`scan.values` has no learning cost of a block; the page adds up the layers inside of it."""
    scan = make_scan(blocks=2, tokens=9)
    with torchfmri.view(scan, browser=False) as view:
        page.open(view.url)
        page.set(metric="learning_cost")
        page.js("app.goTo('model.layers.1.mlp', 3)")
        assert "scan.values" not in page.js("app.python()")
        page.js("app.goTo('model.layers.1.mlp.up_proj', 3)")
        assert "scan.values" in page.js("app.python()")
