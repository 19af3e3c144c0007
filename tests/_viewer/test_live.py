"""Live: every token arrives, a server that is killed and started again is resumed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from boards import StreamBoard, stream_column
from browser import APP, Page, opened_page

import torchfmri
from torchfmri import Scanner, ScanOptions
from torchfmri._scan import LiveBoard
from torchfmri._scan.run import live as live_module
from torchfmri._viewer import Desk, View
from torchfmri._viewer.tiles import Plane
from torchfmri.cli.chat import Chat
from torchfmri.exceptions import InspectionError

TOKEN = "0123456789abcdef"
HERE = Path(__file__).parent

CODES = f"""() => {{
  const app = {APP}, plane = app.plane('layers'), found = [];
  for (let t = 0; t < app.data.columns; t++) found.push(plane.code(7, t));
  return found;
}}"""


def check_columns(page: Page, view: View, count: int) -> None:
    """The page has every column once, with the byte that the server has for it."""
    page.until(f"{APP}.data.columns === {count}", timeout=30_000)
    page.js("app.set({follow: false, first: 0, last: 0})")
    page.until(f"{APP}.plane('layers').header?.columns === {count}")
    for first in range(0, count, 500):  # look at all of them, so that tiles are there
        page.set(first=first, last=min(first + 500, count))
    plane, version = view.desk.plane(0, "activation", "layers")
    assert page.js("app.plane('layers').header.version") == version
    expected = plane.coded(0, count)[7]
    assert page.page.evaluate(CODES) == expected.tolist()
    pieces = page.page.evaluate(
        f"() => Array.from({{length: {count}}}, (_, t) => {APP}.data.piece(t)?.text)"
    )
    assert pieces == [f" t{t}" for t in range(count)]


def stream(board: StreamBoard, rate: int, seconds: float) -> None:
    started = time.monotonic()
    while (now := time.monotonic() - started) < seconds:
        board.add(int(now * rate) - len(board.table))
        time.sleep(0.005)
    board.add(int(rate * seconds) - len(board.table))


@pytest.mark.parametrize(
    "seconds", [2, pytest.param(10, marks=pytest.mark.slow)]
)  # TORCHFMRI_LIVE_SECONDS=60 for a minute
def test_two_hundred_tokens_a_second_none_lost(page: Page, seconds: int) -> None:
    seconds = max(seconds, int(os.environ.get("TORCHFMRI_LIVE_SECONDS", "0")))
    board = StreamBoard()
    with View(board, token=TOKEN) as view:
        page.page.goto(view.url)
        page.page.wait_for_selector(".heat[data-state=empty]")
        stream(board, 200, seconds)
        assert page.js("app.ui.live.textContent").startswith("LIVE")
        check_columns(page, view, 200 * seconds)


@pytest.mark.slow
def test_three_pages_of_which_one_reloads_and_one_is_slow(page: Page, chromium: Any) -> None:
    board = StreamBoard()
    with (
        View(board, token=TOKEN) as view,
        opened_page(chromium) as reloading,
        opened_page(chromium) as slow,
    ):
        line = slow.page.context.new_cdp_session(slow.page)
        line.send("Network.enable")
        speed = {"downloadThroughput": 20_000, "uploadThroughput": 20_000}
        line.send("Network.emulateNetworkConditions", {"offline": False, "latency": 300, **speed})
        for each in (page, reloading, slow):
            each.page.goto(view.url)
        source = threading.Thread(target=stream, args=(board, 200, 5))
        source.start()
        for _ in range(2):
            time.sleep(1.2)
            reloading.page.reload()
        source.join()
        for each in (page, reloading, slow):
            check_columns(each, view, 1000)
            assert not each.errors


def test_pausing_keeps_the_view_and_loses_nothing(page: Page) -> None:
    board = StreamBoard()
    board.add(50)
    with View(board, token=TOKEN) as view:
        page.open(view.url)
        page.press("End", "Home")  # whoever moves is not followed
        page.page.wait_for_timeout(100)
        board.add(300)
        page.until(f"{APP}.data.columns === 350")
        assert page.js("app.state.column") == 0
        assert page.js("app.state.follow") is False
        page.page.locator("button.live").click()
        assert page.js("app.state.follow") is True
        page.press(" ", " ")  # pauses, and follows again
        board.add(10)
        page.until(f"{APP}.state.column === 359")
        check_columns(page, view, 360)


LATE_HEADER = f"""() => {{
  const line = {APP}.options.transport, ask = line.ask;
  line.ask = async (name, given) => {{
    const found = await ask(name, given);
    if (name === 'plane' && given.plane === 'layers') await new Promise(go => window.hand = go);
    return found;
  }};
  {APP}.plane('layers').renew();
}}"""


def test_columns_that_come_while_a_header_is_on_its_way_are_not_lost(page: Page) -> None:
    """A page that reconnects asks for the header again; the last columns may come meanwhile."""
    board = StreamBoard()
    board.add(50)
    with View(board, token=TOKEN) as view:
        page.open(view.url)

        page.page.evaluate(LATE_HEADER)
        page.until("window.hand")
        board.add(10)
        page.until(f"{APP}.data.columns === 60")
        page.page.evaluate("() => window.hand()")
        check_columns(page, view, 60)


SERVER = """
import sys, time
sys.path.insert(0, {here!r})
from boards import StreamBoard
from torchfmri._viewer import View
board = StreamBoard()
board.add({start})
with View(board, port={port}, token={token!r}) as view:
    print(view.port, flush=True)
    for _ in range({more}):
        board.add(1)
        time.sleep(0.005)
    time.sleep(60)
"""


def start_server(port: int, start: int, more: int) -> tuple[subprocess.Popen[str], int]:
    code = SERVER.format(here=str(HERE), port=port, start=start, more=more, token=TOKEN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        return process, int(stdout.readline())


@pytest.mark.slow
def test_a_killed_server_is_resumed_without_duplicates(page: Page) -> None:
    process, port = start_server(0, 100, 200)
    try:
        page.open(f"http://127.0.0.1:{port}/{TOKEN}/")
        page.until(f"{APP}.data.columns >= 150", timeout=30_000)
        process.send_signal(signal.SIGKILL)
        process.wait()
        page.page.wait_for_selector(".banner:not([hidden])")
        shown = page.js("app.data.columns")
        assert f"Disconnected. Showing the last {shown} tokens." in page.text(".banner")
        assert page.js("app.ui.heat.dataset.state") == "drawn", "what came stays in view"
        process, _ = start_server(port, shown + 20, 30)
        page.page.wait_for_selector(".banner", state="hidden", timeout=30_000)
        count = shown + 50
        page.until(f"{APP}.data.columns === {count}", timeout=30_000)
        every = f"Array.from({{length: {count}}}, (_, t) => {APP}.data.piece(t)?.text)"
        page.until(f"{every}.every(each => each !== undefined)", timeout=30_000)
        pieces = page.page.evaluate(f"() => {every}")
        assert pieces == [f" t{t}" for t in range(count)]
        page.set(follow=False, first=0, last=0)
        plane = f"{APP}.plane('layers')"
        page.until(f"{plane}.header && {plane}.header.columns === {count}")
        page.settle()
        header = page.js("app.plane('layers').header")
        codes = np.array(page.page.evaluate(CODES), float)
        scale, limit = header["scale"][7], header["limit"][7]
        expected = np.array([stream_column(t, 40)[7] for t in range(count)], np.float64)
        wanted = np.arcsinh(expected / scale) / np.arcsinh(limit / scale) * 126
        np.testing.assert_allclose(codes - 128, wanted, atol=0.51)
    finally:
        process.kill()
        process.wait()
        page.errors[:] = [each for each in page.errors if "ERR_CONNECTION" not in each]


def test_the_scale_of_a_stream_is_that_of_most_of_it() -> None:
    board, coded = StreamBoard(), []
    desk = Desk(board)
    for _ in range(700):
        board.add()
        plane, _ = desk.plane(0, "activation", "layers")
        coded.append(plane.coded_columns)
        assert plane.columns == len(coded)
        assert plane.columns <= max(128, 4 * plane.coded_columns)
    assert len(set(coded)) < 10, "seldom, because pages fetch its tiles anew"
    assert coded[-1] > 128
    whole = Plane(board.values(0, "activation", "layers")[: coded[-1]], "activation")
    np.testing.assert_array_equal(plane.tops, whole.tops)


def test_columns_that_came_while_disconnected_are_asked_for(page: Page) -> None:
    board = StreamBoard()
    board.add(100)
    with View(board, token=TOKEN) as view:
        page.open(view.url)
        page.until(f"{APP}.data.piece(99)?.text")
        page.js("void app.data.chunks.get(0).fill(undefined, 40, 60)")  # they came to nobody
        page.js("void app.data.choose(0, true)")  # as after a connection was lost
        page.until(f"{APP}.data.piece(50)?.text === ' t50'")


# -- a model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scanner() -> Scanner:
    model, tokenizer = torchfmri.load_model("tiny")
    return Scanner(model, tokenizer, ScanOptions(per="cached"))


def test_a_live_board_has_what_the_scan_has(scanner: Scanner) -> None:
    anatomy, meta = scanner.describe("Once upon", 6)
    board = LiveBoard(anatomy, meta)
    assert not board.going
    board.begin("live")
    assert board.going
    live: dict[str, Any] = {}
    explained: list[bool] = []  # whether every NaN so far is one that was not measured

    def on_token(token: torchfmri.LiveToken) -> None:
        board.on_token(token)
        live["layers"] = board.values(0, "activation", "layers").copy()
        live["missing"] = board.missing(0, "activation", "layers")
        live["pieces"] = board.columns(0, 0, 99)["pieces"]
        absent = False if live["missing"] is None else live["missing"]
        explained.append(bool((np.isnan(live["layers"]) <= absent).all()))

    scan = scanner.scan("Once upon", 6, on_token=on_token, generate={"do_sample": False})
    assert [each.name for each in board.metrics(0)] == ["activation"]
    known = scan.values("activation").values
    seen = np.isfinite(live["layers"])
    assert seen.mean() > 0.5
    np.testing.assert_allclose(live["layers"][seen], known[seen], rtol=1e-3)
    assert live["pieces"] == scan.tokens.pieces
    absent = live["missing"]
    assert (np.isnan(live["layers"]) == absent).all(), "nothing of it is NaN that was computed"
    assert absent.any(), "the head at the prompt, and the last token"
    prompt = int((~scan.tokens.generated).sum())
    assert all(explained[prompt - 1 :]), "also before the first token is written"
    board.finish(scan)
    assert not board.going
    np.testing.assert_array_equal(board.values(0, "activation", "layers"), known)
    assert "gradient" in [each.name for each in board.metrics(0)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tell_every", [100.0, 0.01, 0.0])
def test_tokens_that_wait_to_be_told_are_the_same(scanner: Scanner, tell_every: float) -> None:
    told: list[torchfmri.LiveToken] = []
    scan = scanner.scan(
        "Once upon", 8, on_token=told.append, tell_every=tell_every, generate={"do_sample": False}
    )
    assert [each.position for each in told] == list(range(len(scan[0])))
    assert [each.id for each in told] == scan.tokens.ids.tolist()
    values = scan.values("activation").values
    for token in told[:-1]:
        seen = np.isfinite(token.activation)  # the head is run where it is needed alone
        known = values[token.position]
        assert seen.mean() > 0.5
        seen &= np.isfinite(known)
        np.testing.assert_allclose(token.activation[seen], known[seen], rtol=1e-3)
        if token.generated:  # of a prompt `generate` computes no logits
            assert token.surprisal == pytest.approx(
                float(scan.tokens.surprisal[token.position]), rel=1e-3, abs=1e-4
            )
    with pytest.raises(InspectionError, match="tell_every=-1"):
        scanner.scan("Once upon", 2, on_token=told.append, tell_every=-1)


@pytest.mark.parametrize(
    ("tell_every", "waited", "worked", "told"),
    [
        (0.0, 0.0, 0.0, True),  # at once
        (0.1, 0.05, 9.0, False),  # not before the time
        (0.1, 0.2, 0.05, False),  # it would take more than a fiftieth of the work
        (0.1, 0.2, 0.11, True),
        (0.1, 1.1, 0.0, True),  # but nobody waits for ever
    ],
)
def test_telling_takes_a_small_share_of_the_work(
    monkeypatch: pytest.MonkeyPatch, tell_every: float, waited: float, worked: float, told: bool
) -> None:
    recording = live_module.LiveRecording.__new__(live_module.LiveRecording)
    recording._tell_every, recording._cost = tell_every, 0.002
    recording._told_at = recording._worked = 50.0
    clock = SimpleNamespace(monotonic=lambda: 50.0 + waited, thread_time=lambda: 50.0 + worked)
    monkeypatch.setattr(live_module, "time", clock)
    assert recording._is_time() is told


def test_a_page_that_follows_asks_little(page: Page) -> None:
    """Every question costs the process that scans; a page that follows gets what it needs."""
    board = StreamBoard()
    board.add(20)
    with View(board, token=TOKEN) as view:
        page.open(view.url)
        page.page.wait_for_timeout(300)
        asked = len(page.requests)
        started = time.monotonic()
        stream(board, 60, 3)
        page.until(f"{APP}.data.columns === 180")
        seconds = time.monotonic() - started
        count = len(page.requests) - asked
        assert count <= 12 + 2 * seconds, page.requests[asked:]


def test_a_scan_that_fails_leaves_the_board_as_it_was(scanner: Scanner) -> None:
    anatomy, meta = scanner.describe("Once upon", 6)
    board = LiveBoard(anatomy, meta)
    board.begin("live")
    board.finish(None)
    assert len(board.entries()) == 0


@pytest.fixture
def chat(scanner: Scanner, tmp_path: Path) -> Iterator[tuple[Chat, View]]:
    anatomy, meta = scanner.describe("Once upon", 6)
    board = LiveBoard(anatomy, meta)
    answers = Chat(scanner, board, 6, tmp_path / "chat.fmri", chat=False)
    with View(board, token=TOKEN, on_prompt=answers.ask) as view:
        board.changed = view.changed
        yield answers, view


def test_a_chat_answers_and_keeps_its_scans(
    page: Page, chat: tuple[Chat, View], tmp_path: Path
) -> None:
    answers, view = chat
    page.page.goto(view.url)
    page.page.wait_for_selector(".cover h2:text('Ask something')")
    for number, prompt in enumerate(("Once upon", "The capital")):
        page.page.locator(".prompt textarea").fill(prompt)
        page.press("Enter")
        page.until(
            f"app.data.board.sequences === {number + 1} && app.state.sequence === {number}"
            f" && app.data.sequence?.name.startsWith('00{number + 1}')"
            " && app.data.sequence.metrics.length > 1",  # the newest is shown, with its gradients
            timeout=240_000,
        )
    page.settle()
    kept = torchfmri.load(tmp_path / "chat.fmri")
    assert kept.names == ("001 Once upon", "002 The capital")
    assert "gradient" in kept.metrics or "gradient" in kept[0].layers
    assert page.js("app.data.columns") == len(kept[1])
    with pytest.raises(InspectionError, match="empty"):
        answers.ask("  ")


def test_a_chat_says_what_it_works_on_and_what_failed(
    page: Page, chat: tuple[Chat, View], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, view = chat
    said: set[str] = set()
    real = answers._say
    monkeypatch.setattr(answers, "_say", lambda now: (said.add(now), real(now)))
    page.page.goto(view.url)
    page.page.wait_for_selector(".cover h2:text('Ask something')")
    page.page.locator(".prompt textarea").fill("Once upon")
    page.press("Enter")
    page.until("app.data.sequence?.metrics.length > 1", timeout=240_000)
    assert "Answering" in said
    assert any(each.startswith("Computing gradients") for each in said)
    page.page.wait_for_selector(".doing", state="hidden")  # nothing is worked on any more

    def fail(*_: Any, **__: Any) -> None:
        raise InspectionError("the cat has unplugged the model")

    monkeypatch.setattr(answers._scanner, "scan", fail)
    page.page.locator(".prompt textarea").fill("What now?")
    page.press("Enter")
    page.page.wait_for_selector(".doing.problem")
    assert "the cat has unplugged the model" in page.text(".doing")
    assert "“What now?” failed" in page.text(".doing")
    assert page.js("app.data.board.sequences") == 1, "what is there stays"


def test_a_chat_goes_on_after_a_prompt_that_its_tokenizer_refuses(
    page: Page, chat: tuple[Chat, View]
) -> None:
    answers, view = chat
    page.page.goto(view.url)
    page.page.wait_for_selector(".cover h2:text('Ask something')")
    answers.ask("Hello \ud83c")  # half of an emoji
    page.page.wait_for_selector(".doing.problem")
    assert "“Hello ?” failed: TypeError: " in page.text(".doing")
    answers.ask("Once upon")
    page.until("app.data.sequence?.metrics.length > 1", timeout=240_000)
    assert page.js("app.data.board.sequences") == 1


def test_a_chat_refuses_a_prompt_that_is_longer_than_the_model_takes(
    chat: tuple[Chat, View],
) -> None:
    answers, _ = chat
    answers.board.tokenizer = torchfmri.load_model("tiny").tokenizer
    answers.ask("word " * 3000)
    begun = time.monotonic()
    while not answers.board.problem and time.monotonic() < begun + 30:
        time.sleep(0.01)
    assert "and the model was made for 256 at most. Shorten it." in answers.board.problem
    answers.ask("Once upon")
    answers._waiting.put(None)
    answers._thread.join(240)
    assert [each.name for each in answers.board.entries()] == ["002 Once upon"]


def test_prompts_that_wait_are_counted(
    scanner: Scanner, capsys: pytest.CaptureFixture[str]
) -> None:
    board = LiveBoard(*scanner.describe("Once upon", 400))
    answers = Chat(scanner, board, 400, None, chat=False)
    for prompt in ("Once upon", "a second", "a third"):
        answers.ask(prompt)
    while "Answering" not in board.doing()["now"]:
        time.sleep(0.01)
    assert board.doing()["now"] == "Answering, 2 prompts waiting"
    capsys.readouterr()
    answers.close()
    assert board.doing()["now"] == ""
    told = "torchfmri chat: not answered: “Once upon”, “a second”, “a third”\n"
    assert capsys.readouterr().err == told


def test_a_chat_that_is_closed_stops_at_the_next_token(
    scanner: Scanner, capsys: pytest.CaptureFixture[str]
) -> None:
    board = LiveBoard(*scanner.describe("Once upon", 400))
    answers = Chat(scanner, board, 400, None, chat=False)
    tokens = 0
    told = board.on_token

    def on_token(token: torchfmri.LiveToken) -> None:
        nonlocal tokens
        tokens += 1
        told(token)

    board.on_token = on_token  # type: ignore[method-assign]
    answers.ask("Once upon")
    answers.ask("a prompt that waits")
    while not tokens:
        time.sleep(0.01)
    answers.close()
    assert not answers._thread.is_alive()
    assert tokens < 400
    assert not board.entries(), "what was stopped is not kept"
    assert "failed" not in capsys.readouterr().err


@pytest.mark.slow
def test_watching_a_scan_costs_little(scanner: Scanner) -> None:
    """A page that watches must not slow the scan; the command measures it, see docs/viewer.md."""
    script = [
        sys.executable,
        "-m",
        "benchmarks",
        "viewer",
        "--json",
        "--rounds",
        "3",
        "--tokens",
        "24",
    ]
    root = HERE.parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    done = subprocess.run(
        script, capture_output=True, text=True, env=environment, cwd=root, check=True
    )
    found = json.loads(done.stdout)
    print(found)
    assert found["live_tokens"] == found["plain_tokens"]
    assert found["process_ratio"] < 2, "a fixed cost, beside a scan that takes half a second"


def test_an_answer_that_is_over_does_not_end_at_what_was_not_measured(
    page: Page, chat: tuple[Chat, View]
) -> None:
    _, view = chat
    page.page.goto(view.url)
    page.page.wait_for_selector(".cover h2:text('Ask something')")
    page.page.locator(".prompt textarea").fill("Once upon\na time")
    page.press("Enter")
    page.until("app.data.sequence?.metrics.length > 1 && !app.data.board.going", timeout=240_000)
    page.until("app.state.column === app.data.columns - 2")
    page.until("app.ui.details.dataset.column === String(app.data.columns - 2)")
    assert page.text(".value b") != "not measured"
