"""The server: who is answered, what is refused, and what a slow or rude client can do."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boards import ArrayBoard, StreamBoard
from scans import make_anatomy, make_sequence

import torchfmri
from torchfmri import Scan
from torchfmri._scan.store.manifest import SequenceEntry, describe, parse_description
from torchfmri._viewer import Desk, Entry, View, serve
from torchfmri._viewer.client import Client
from torchfmri.exceptions import InspectionError

pytest.importorskip("starlette")
websockets = pytest.importorskip("websockets")
connect = pytest.importorskip("websockets.sync.client").connect

TOKEN = "0123456789abcdef"


@pytest.fixture
def view() -> Iterator[View]:
    board = ArrayBoard(np.random.default_rng(0).lognormal(0, 1, (700, 9)).astype(np.float32))
    with View(board, token=TOKEN) as served:
        yield served


def ask(
    view: View, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    line = http.client.HTTPConnection("127.0.0.1", view.port, timeout=10)
    line.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        line.putheader(name, value)
    if body is not None:
        line.putheader("Content-Length", str(len(body)))
    line.endheaders(body)
    response = line.getresponse()
    found = response.status, response.read(), response.headers
    line.close()
    return found


def test_answers_with_the_token(view: View) -> None:
    status, page, headers = ask(view, f"/{TOKEN}/")
    assert status == 200
    assert b"default-src 'none'" in page.replace(b"&#x27;", b"'")
    assert headers["x-frame-options"] == "DENY"
    status, text, _ = ask(view, f"/{TOKEN}/board")
    assert status == 200
    assert json.loads(text)["layers"][:2] == ["layers.0", "layers.1"]
    status, tile, headers = ask(view, f"/{TOKEN}/tile?level=0&x=2&plane=layers&metric=activation")
    assert (status, len(tile)) == (200, 9 * (700 - 512))
    assert "max-age" in headers["cache-control"]


@pytest.mark.parametrize(
    "path", ["/", "/board", "/wrong0123456789ab/board", f"/{TOKEN[:-1]}/", "//"]
)
def test_no_token_no_answer(view: View, path: str) -> None:
    status, text, _ = ask(view, path)
    assert status == 403
    assert b"layers" not in text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:80", "0.0.0.0:1", ""]
)
def test_a_foreign_host_is_refused(view: View, host: str) -> None:
    # A name of the attacker's that resolves to this machine (DNS rebinding) arrives like this.
    assert ask(view, f"/{TOKEN}/board", Host=host)[0] in (400, 403)


def test_own_names_are_answered(view: View) -> None:
    for host in (f"127.0.0.1:{view.port}", f"localhost:{view.port}"):
        assert ask(view, f"/{TOKEN}/board", Host=host)[0] == 200
        assert ask(view, f"/{TOKEN}/board", Host=host, Origin=f"http://{host}")[0] == 200
    # On port 80 a browser leaves the port out.
    for host, status in (("localhost", 200), ("[::1]", 200), ("evil.example", 403), ("::1.x", 403)):
        assert ask(view, f"/{TOKEN}/board", Host=host)[0] == status, host


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1"]
)
def test_a_foreign_origin_is_refused(view: View, origin: str) -> None:
    assert ask(view, f"/{TOKEN}/board", Origin=origin)[0] == 403

    address = f"ws://127.0.0.1:{view.port}/{TOKEN}/live"
    with pytest.raises(websockets.InvalidStatus) as refused:
        connect(address, origin=origin)
    assert refused.value.response.status_code == 403
    with connect(address, origin=f"http://127.0.0.1:{view.port}") as line:
        assert json.loads(line.recv())["type"] == "hello"


@pytest.mark.parametrize(
    "path",
    [
        "../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "static/viewer.js", "viewer.js/../../x",
        "tile?level=0&x=-1", "tile?level=99", "tile?level=99999999999", "tile?level=0&x=999999",
        "tile?x=999999999999",
        "tile?x=1e3", "nothing", "panels?column=999999999999", "sequence?sequence=999999999999",
        "tile?sequence=7", "tile?plane=../../meta.json", "values?row=99", "columns?chunk=x",
        "plane?metric=__class__", "tile?level=%D9%A1",
    ],
)  # fmt: skip
def test_what_does_not_exist_is_refused_in_words(view: View, path: str) -> None:
    status, text, _ = ask(view, f"/{TOKEN}/{path}")
    assert status in (403, 404), text
    assert b"Traceback" not in text
    assert b"root:" not in text


def test_what_is_far_beyond_the_end_is_empty(view: View) -> None:
    for path in ("columns?chunk=999999999999", "sequences?first=999999999999"):
        status, text, _ = ask(view, f"/{TOKEN}/{path}")
        found = json.loads(text)
        assert (status, found.get("pieces", found.get("found"))) == (200, [])
    assert ask(view, f"/{TOKEN}/values?first=999999999999")[:2] == (200, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(view: View, method: str) -> None:
    assert ask(view, f"/{TOKEN}/board", method, b"{}")[0] == 405
    assert ask(view, f"/{TOKEN}/prompt", method, b'{"prompt": "x"}')[0] == 405


def test_too_much_is_refused() -> None:
    said: list[str] = []
    with View(StreamBoard(), token=TOKEN, on_prompt=said.append) as view:
        assert ask(view, f"/{TOKEN}/prompt", "POST", b'{"prompt": "hello"}')[0] == 200
        assert said == ["hello"]
        large = json.dumps({"prompt": "x" * 100_000}).encode()
        assert ask(view, f"/{TOKEN}/prompt", "POST", large)[0] == 413
        assert ask(view, f"/{TOKEN}/prompt", "POST", b"[1]")[0] == 400
        assert ask(view, f"/{TOKEN}/prompt", "POST", b'{"prompt": 7}')[0] == 400
        assert said == ["hello"]

        with connect(f"ws://127.0.0.1:{view.port}/{TOKEN}/live") as line:
            line.recv()
            line.send("x" * 100_000)
            with pytest.raises(websockets.ConnectionClosed) as closed:
                line.recv(timeout=10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        assert ask(view, f"/{TOKEN}/board")[0] == 200, "it goes on"


def test_too_many_values_at_once_are_refused(monkeypatch: pytest.MonkeyPatch, view: View) -> None:
    monkeypatch.setattr("torchfmri._viewer.desk.MOST_VALUES", 100)
    status, text, _ = ask(view, f"/{TOKEN}/values?metric=activation")
    assert status == 404
    assert b"Zoom in" in text
    assert len(ask(view, f"/{TOKEN}/values?metric=activation&first=3&last=5")[1]) == 4 * 9 * 2


def test_a_slow_client_is_not_waited_for_and_costs_little() -> None:
    board = StreamBoard(400)
    with View(board, token=TOKEN) as view:
        slow = socket.create_connection(("127.0.0.1", view.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13"
        slow.sendall(
            f"GET /{TOKEN}/live HTTP/1.1\r\nHost: 127.0.0.1:{view.port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\n{key}\r\n\r\n".encode()
        )
        assert b"101" in slow.recv(200)
        watch = json.dumps(
            {
                "type": "watch",
                "sequence": 0,
                "metric": "activation",
                "planes": ["layers"],
                "from": 0,
            }
        ).encode()
        mask = b"\x00\x00\x00\x00"  # of a client's frames; this one changes nothing
        slow.sendall(bytes([0x81, 0x80 | 126]) + len(watch).to_bytes(2, "big") + mask + watch)
        for _ in range(20):  # it never reads; 8 MB wait for it at most in pieces
            board.add(100)
            time.sleep(0.01)
        started = time.monotonic()
        for _ in range(20):
            assert ask(view, f"/{TOKEN}/board")[0] == 200
        assert time.monotonic() - started < 10
        slow.close()


def test_sending_takes_a_small_share_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that a page watches needs the processor itself."""
    calls = 0

    def expensive(self: Client, watched: Any, first: int, last: int) -> list[bytes]:
        nonlocal calls
        calls += 1
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return []

    monkeypatch.setattr(Client, "_frames", expensive)
    board = StreamBoard()
    with (
        View(board, token=TOKEN) as view,
        connect(f"ws://127.0.0.1:{view.port}/{TOKEN}/live") as line,
    ):
        watched = {"metric": "activation", "planes": ["layers"], "sequence": 0, "from": 0}
        line.send(json.dumps({"type": "watch", **watched}))
        started = time.monotonic()
        while time.monotonic() - started < 1.5:
            board.add(1)
            time.sleep(0.01)
    assert 1 <= calls <= 4, "not every 0.05 s"


def test_a_view_that_is_closed_lets_go_of_its_port_and_thread() -> None:
    with View(ArrayBoard(np.ones((3, 2), np.float32)), token=TOKEN) as view:
        port = view.port
        assert ask(view, f"/{TOKEN}/board")[0] == 200
    assert not [each for each in threading.enumerate() if each.name == "torchfmri-view"]
    with View(ArrayBoard(np.ones((3, 2), np.float32)), port=port, token=TOKEN) as again:
        assert again.port == port
        with pytest.raises(InspectionError, match="Cannot bind"):
            View(ArrayBoard(np.ones((3, 2), np.float32)), port=port)


def test_whoever_never_asks_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchfmri._viewer.server._HEADER", 0.5)
    with View(ArrayBoard(np.ones((3, 2), np.float32)), token=TOKEN) as view:
        asks = socket.create_connection(("127.0.0.1", view.port))
        silent = socket.create_connection(("127.0.0.1", view.port))
        asks.settimeout(60)
        silent.settimeout(60)
        request = f"GET /{TOKEN}/board HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
        asks.sendall(request + b"\r\n")
        silent.sendall(request)  # its header does not end
        assert asks.recv(100).startswith(b"HTTP/1.1 200")
        assert silent.recv(100) == b"", "it is closed"
        asks.sendall(request + b"\r\n")
        while b"HTTP/1.1 200" not in asks.recv(1 << 16):
            pass
        asks.close()
        silent.close()


def test_a_view_may_be_closed_while_its_server_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchfmri._viewer.server._PATIENCE", 0.05)
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    view, free = View(ArrayBoard(np.ones((3, 2), np.float32)), token=TOKEN), threading.Event()
    view._site.loop.call_soon_threadsafe(free.wait)
    view.close()
    assert view._thread.is_alive(), "it was not busy, so this shows nothing"
    free.set()
    view._thread.join(60)
    assert not raised, raised[0].exc_value
    assert view._socket.fileno() == -1, "the port is free again"


def test_other_machines_need_a_flag_and_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    board = ArrayBoard(np.ones((3, 2), np.float32))
    with pytest.raises(InspectionError, match=r"host='0\.0\.0\.0' would let other machines in"):
        View(board, host="0.0.0.0")
    with serve(board, host="0.0.0.0", remote=True, browser=False):
        pass
    assert "warning: every machine" in capsys.readouterr().err


def test_over_ssh_the_line_says_how_to_forward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 1 10.0.0.2 22")
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("no browser over SSH"))
    with serve(ArrayBoard(np.ones((3, 2), np.float32))) as view:
        said = capsys.readouterr().err
    assert f"ssh -N -L {view.port}:127.0.0.1:{view.port}" in said


def test_bad_options_are_named() -> None:
    board = ArrayBoard(np.ones((3, 2), np.float32))
    for options, said in (
        ({"token": "short"}, "at least 16"), ({"port": -1}, "port"), ({"port": 70_000}, "65535"),
        ({"token": "x" * 15 + "/"}, "letters and digits"), ({"host": 7}, "host"),
    ):  # fmt: skip
        with pytest.raises(InspectionError, match=said):
            View(board, **options)  # type: ignore[arg-type]


def test_the_server_writes_nothing(
    view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("", "viewer.js", "board", "sequences", "sequence", "columns", "plane", "tile"):
        assert ask(view, f"/{TOKEN}/{path}")[0] == 200, path
    assert not list(tmp_path.iterdir())


def test_prompts_are_listed_and_found_by_their_text(tmp_path: Path) -> None:
    anatomy = make_anatomy(1)
    sequences = [
        make_sequence(anatomy, 6, seed=at, spelling=[b"<s>", b"The ", animal, *[b" runs"] * 3])
        for at, animal in enumerate((b"cat", b"dog\n", "été".encode()))
    ]
    scan = Scan(anatomy, sequences, {"model": "m"})
    scan.save(tmp_path / "x.fmri")
    for board in (scan._board(), torchfmri.load(tmp_path / "x.fmri")._board()):
        desk = Desk(board)
        listed = desk.answer("sequences", {})
        assert isinstance(listed, dict)
        texts = [each["text"] for each in listed["found"]]
        assert texts == ["The cat", "The dog", "The été"], "the prompt, without special tokens"
        found = desk.answer("sequences", {"search": "DOG the"})
        assert isinstance(found, dict)
        assert [each["index"] for each in found["found"]] == [1]


def test_manifests_without_texts_are_as_they_were() -> None:
    entry = SequenceEntry("a", 3, "c")
    assert "text" not in entry.record()
    assert "text" not in describe([entry]), "segments of earlier versions have the same description"
    (again,) = parse_description(describe([SequenceEntry("a", 3, "c", text="The cat")]), "here")
    assert again.text == "The cat"


def test_a_search_finds_what_the_list_shows() -> None:
    class Many(ArrayBoard):
        def entries(self) -> list[Entry]:
            return [
                Entry(f"{at:06d}-{at * 7919:011x}", 3, "ab"[at % 2], f"Tom has number {at} of 72")
                for at in range(72)
            ]

    desk = Desk(Many(np.zeros((3, 2), np.float32)))

    def found(text: str) -> list[int]:
        answer = desk.answer("sequences", {"search": text})
        assert isinstance(answer, dict)
        return [each["index"] for each in answer["found"]]

    assert found("number 7") == [7, 70, 71]
    assert found("Number  71") == [71]
    assert found("71 number") == [71], "in any order, where nobody has them in this one"
    assert found("000003-") == [3]
    assert found("72 b") == list(range(1, 72, 2))
    assert found("zzz") == []
    assert found("") == list(range(72))
