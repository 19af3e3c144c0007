"""The server: a board on a port of this machine, for whoever knows the address.

Every address starts with a random token. The Host and the Origin of a request must be ours, so that
a page of another site that finds the port learns nothing. Questions are small and answered from
memory; a client that reads slowly is not waited for by anybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import struct
import sys
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any

from torchfmri._arguments import check_number, require
from torchfmri._viewer.board import TRACKS, Board
from torchfmri._viewer.desk import Desk, Question, to_json
from torchfmri._viewer.page import bundle, served_page
from torchfmri._viewer.state import check_state
from torchfmri.exceptions import InspectionError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_BODY = 64 << 10
"""Bytes of a question or a message."""
MOST_CLIENTS = 32
TICK = 0.05
"""Seconds between looks at whether a board has grown."""
FRAME_COLUMNS = 2048
"""Columns that are pushed at once."""
_HEAD = struct.Struct("<IIII")
"""Of a frame of columns: which watched plane, its version, the first column, how many."""
Asked = Callable[[str], None]


class View:
    """A board that is being served; close it, or leave its `with` block, to stop.

    Args:
        board: What is shown.
        host: The address to bind; others than this machine's own need `remote=True`.
        port: 0 takes a free one.
        token: What the address starts with; random by default.
        remote: Whether other machines may connect.
        on_prompt: Called with a text that is typed into the page; without it the page has no box.
        on_close: Called before the view stops serving, to end what works for it.

    Attributes:
        board: What is shown.
        state: What the page shows, as its address has it: metric, sequence, layer, token, and so
            on. It can be set: every open page follows.

    Example:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> scan = torchfmri.scan(model, tokenizer, "Once upon", max_new_tokens=2, per=None)
        >>> with torchfmri.view(scan, browser=False) as view:
        ...     view.url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(
        self, board: Board, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None,
        remote: bool = False, on_prompt: Asked | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        _require_packages()
        require(isinstance(host, str), "host", host, "give an address, such as '127.0.0.1'")
        check_number("port", port, 0, "give a port, or 0 for a free one")
        require(port < 65_536, "port", port, "give a port up to 65535, or 0 for a free one")
        fits = token is None or (isinstance(token, str) and token.isalnum() and len(token) >= 16)
        require(fits, "token", token, "give at least 16 letters and digits")
        if host not in LOOPBACK and not remote:
            raise InspectionError(
                f"host={host!r} would let other machines in. If that is meant, give remote=True "
                "(--remote). Over SSH it is not needed: forward the port."
            )
        self.board, self.desk = board, Desk(board, secrets.randbelow(1 << 30))
        self._token = token or secrets.token_hex(16)
        self._on_prompt, self._on_close = on_prompt, on_close
        self._state: dict[str, Any] = {}
        self._told: dict[str, Any] = {}  # what Python asked for; a page opens with it
        self._clients: set[_Client] = set()
        self.changes = 0  # how often `changed` was called: a page that connects late compares it
        self._host, self._remote = host, remote
        self._socket = _bind(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = _uvicorn_server(self._app)
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="torchfmri-view", daemon=True
        )
        self._thread.start()
        started.wait(10)
        if board.entries() and not board.live:
            threading.Thread(target=self.desk.warm, name="torchfmri-warm", daemon=True).start()

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        name = f"[{self._host}]" if ":" in self._host else self._host
        name = socket.gethostname() if self._host in ("0.0.0.0", "::") else name
        return f"http://{name}:{self.port}/{self._token}/"

    @property
    def state(self) -> dict[str, Any]:
        """What the page shows."""
        return dict(self._state)

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        now = self._state.get("sequence", 0)
        check_state(state, self.board, now if isinstance(now, int) else 0)
        self._told = {**self._state, **state}
        self._state = dict(self._told)
        self._tell({"type": "state", "state": self._told})

    def changed(self) -> None:
        """Tell the pages that there are other sequences, metrics or findings now."""
        self.changes += 1
        self.desk.drop()
        self._tell({"type": "board"})

    def open(self) -> View:
        """Open the page in a browser; returns the view itself."""
        webbrowser.open(self.url)
        return self

    def wait(self) -> None:
        """Serve until Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            while self._thread.is_alive():
                self._thread.join(0.5)
        self.close()

    def close(self) -> None:
        """Stop serving."""
        self._on_close()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(5)
        self._socket.close()

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def __repr__(self) -> str:
        return f"<View of {self.board.kind} at {self.url}>"

    # -- one request -------------------------------------------------------------------------

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.websockets import WebSocket

        refused = self._refusal(scope)
        if scope["type"] == "websocket":
            socket = WebSocket(scope, receive, send)
            if refused or len(self._clients) >= MOST_CLIENTS or not scope["path"].endswith("/live"):
                await socket.close(1008)
                return
            await _Client(self, socket).run(self._clients)
            return
        if refused:
            status, text = refused
            response = Response(text, status, media_type="text/plain")
        else:
            response = await self._respond(Request(scope, receive))
        response.headers.update(_HEADERS)
        await response(scope, receive, send)

    def _refusal(self, scope: dict[str, Any]) -> tuple[int, str] | None:
        """Why a request is refused; None where it is not."""
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        name = headers.get("host", "").rpartition(":")[0].strip("[]")
        if not self._remote and name not in LOOPBACK:
            return 403, "This server answers to this machine's own names only."
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{headers.get('host', '')}":
            return 403, "This server answers its own page only."
        token = scope["path"].split("/")[1] if scope["path"].count("/") >= 2 else ""
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return 403, "The address is incomplete: open the one that torchfmri printed."
        return None

    async def _respond(self, request: Any) -> Any:
        from starlette.responses import HTMLResponse, JSONResponse, Response

        path = request.url.path.removeprefix(f"/{self._token}/")
        if request.method == "POST" and path == "prompt" and self._on_prompt is not None:
            return await self._take_prompt(request)
        if request.method not in ("GET", "HEAD"):
            return Response("Only GET.", 405)
        if path == "":
            about = self.board.about()
            return HTMLResponse(served_page(f"{about['model']}: {self.board.kind}"))
        if path == "viewer.js":
            return Response(bundle(), media_type="text/javascript")
        if len(request.url.query) > MOST_BODY:
            return Response("The question is too long.", 414)
        given, changes = dict(request.query_params), self.changes
        try:
            answer = await asyncio.to_thread(self.desk.answer, path, given)
        except Question as error:
            return JSONResponse({"error": str(error)}, 404)
        except InspectionError as error:  # a damaged file of the scan
            return JSONResponse({"error": str(error)}, 422)
        if isinstance(answer, bytes):
            stays = path == "tile" and not self.board.live
            headers = {"cache-control": "private, max-age=3600" if stays else "no-store"}
            return Response(answer, media_type="application/octet-stream", headers=headers)
        if path == "board":
            asked = self._on_prompt is not None
            answer = {**answer, "prompts": asked, "state": self._told, "changes": changes}
        return Response(to_json(answer), media_type="application/json")

    async def _take_prompt(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY:
                return JSONResponse({"error": "The prompt is too long."}, 413)
        try:
            text = json.loads(body)["prompt"]
            assert isinstance(text, str)
            assert self._on_prompt is not None
            self._on_prompt(text)
        except (ValueError, KeyError, TypeError, AssertionError):
            return JSONResponse({"error": 'Send {"prompt": "..."}.'}, 400)
        except InspectionError as error:
            return JSONResponse({"error": str(error)}, 409)
        return JSONResponse({})

    # -- the thread --------------------------------------------------------------------------

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not task.done():
                await asyncio.sleep(0.005)
            started.set()
            await task

        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(serve())
        started.set()

    def _tell(self, message: dict[str, Any]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        for client in tuple(self._clients):
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                asyncio.run_coroutine_threadsafe(client.say(message), loop)


_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class _Client:
    """One open page: it watches planes of a sequence and is told what is added to them."""

    def __init__(self, view: View, socket: Any) -> None:
        self._view, self._socket = view, socket
        self._watched: dict[str, Any] | None = None
        self._sent = 0
        self._lock = asyncio.Lock()

    async def run(self, clients: set[_Client]) -> None:
        """Serve the page until it goes."""
        from starlette.websockets import WebSocketDisconnect

        await self._socket.accept()
        clients.add(self)
        pushing = asyncio.create_task(self._push())
        try:
            view = self._view
            await self.say({"type": "hello", "id": view.board.id, "changes": view.changes})
            while True:
                text = await self._socket.receive_text()
                if len(text) > MOST_BODY:
                    await self._socket.close(1009)
                    return
                self._take(json.loads(text))
        except (WebSocketDisconnect, RuntimeError, ValueError, KeyError, TypeError):
            with contextlib.suppress(Exception):
                await self._socket.close(1003)
        finally:
            clients.discard(self)
            pushing.cancel()

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "state" and isinstance(message["state"], dict):
            self._view._state = message["state"]
        elif message["type"] == "watch":
            self._sent = int(message["from"])
            self._watched = {
                "sequence": int(message["sequence"]),
                "metric": str(message["metric"]),
                "planes": [str(each) for each in message["planes"]][:64],
            }

    async def say(self, message: dict[str, Any]) -> None:
        """Send a message."""
        await self._send(lambda: self._socket.send_text(to_json(message)))

    async def _send(self, act: Callable[[], Awaitable[None]]) -> None:
        async with self._lock:
            with contextlib.suppress(Exception):  # it has gone; `run` notices
                await act()

    async def _push(self) -> None:
        """Look again and again whether columns were added, and send them.

        A slow client gets larger pieces less often: what was not sent yet stays in the board.
        """
        while True:
            await asyncio.sleep(TICK)
            watched = self._watched
            if watched is None:
                continue
            desk = self._view.desk
            if await asyncio.to_thread(desk.board.refresh):
                self._view.changed()
            sequence = watched["sequence"]
            if sequence >= len(desk.board.entries()):
                continue
            length = desk.board.length(sequence)
            if self._sent >= length:
                continue
            first, last = self._sent, min(length, self._sent + FRAME_COLUMNS)
            try:
                frames = await asyncio.to_thread(self._frames, watched, first, last)
                columns = desk.board.columns(sequence, first, last)
            except (Question, LookupError, InspectionError):
                continue
            if watched is not self._watched:
                continue  # the page has turned to something else meanwhile
            self._sent = last
            for frame in frames:
                await self._send(lambda frame=frame: self._socket.send_bytes(frame))  # type: ignore[misc]
            told = {"type": "columns", "sequence": sequence, "first": first, "length": last}
            await self.say({**told, **columns})

    def _frames(self, watched: dict[str, Any], first: int, last: int) -> list[bytes]:
        desk, found = self._view.desk, []
        for number, name in enumerate(watched["planes"]):
            metric = TRACKS if name == TRACKS else watched["metric"]
            plane, version = desk.plane(watched["sequence"], metric, name)
            codes = plane.encode(plane.values[first:last])
            found.append(_HEAD.pack(number, version, first, last - first) + codes.tobytes())
        return found


def serve(
    board: Board, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None,
    remote: bool = False, browser: bool = True, on_prompt: Asked | None = None,
    on_close: Callable[[], None] = lambda: None, name: str = "view",
) -> View:  # fmt: skip
    """Serve a board, print its address on standard error, and open a browser where there is one.

    Raises:
        ImportError: starlette and uvicorn are missing (extra `viewer`).
        InspectionError: Other machines would be let in without `remote`, or the port is taken.
    """
    view = View(
        board, host=host, port=port, token=token, remote=remote, on_prompt=on_prompt,
        on_close=on_close,
    )  # fmt: skip
    print(f"torchfmri {name}: {view.url}", file=sys.stderr)
    if remote and host not in LOOPBACK:
        print(
            f"torchfmri {name}: warning: every machine that reaches {host}:{view.port} and knows "
            "the address sees this, and nothing is encrypted.",
            file=sys.stderr,
        )
    if os.environ.get("SSH_CONNECTION"):
        print(
            f"torchfmri {name}: from your own machine: ssh -N -L {view.port}:127.0.0.1:{view.port} "
            f"{os.environ.get('USER', 'you')}@{socket.gethostname()}, then open that address there",
            file=sys.stderr,
        )
    elif browser:
        view.open()
    sys.stderr.flush()
    return view


def _require_packages() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
        import websockets  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "The viewer's server needs starlette, uvicorn and websockets: "
            "pip install 'torchfmri[viewer]'. Without them: scan.save_html('scan.html')."
        ) from error


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise InspectionError(
            f"Cannot bind {host}:{port} ({error.strerror}). Choose another port, or 0."
        ) from error
    return bound


def _uvicorn_server(app: Any) -> Any:
    import uvicorn

    config = uvicorn.Config(
        app, interface="asgi3", proxy_headers=False, log_level="critical", access_log=False,
        lifespan="off", ws="websockets-sansio", server_header=False,
        ws_max_size=MOST_BODY, timeout_graceful_shutdown=1, limit_concurrency=256,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    return server
