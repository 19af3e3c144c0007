"""The server: a board on a port of this machine, for whoever knows the address.

`torchfmri.view`, the commands and `Monitor(view=True)` make a `View` of it. It serves from a
thread of its own with an own event loop, so that it works inside of a notebook and beside
training. It binds to this machine unless `remote=True` says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchfmri._arguments import check_number, require
from torchfmri._viewer.board import LAYERS, TRACKS, Board
from torchfmri._viewer.client import MOST_MESSAGE
from torchfmri._viewer.desk import Desk
from torchfmri._viewer.site import LOOPBACK, Asked, Site
from torchfmri._viewer.state import check_state
from torchfmri.exceptions import InspectionError

_PATIENCE = 10.0
"""Seconds that closing waits for the server's thread."""
_HEADER = 10.0
"""Seconds that a connection has for the header of its first request: connections are limited, so
those that never ask must not keep others out."""


@dataclass(frozen=True)
class Crosshair:
    """The numbers at the crosshair of a page, exactly as they are stored.

    Attributes:
        layer: The row: a layer, or a part of one such as "mlp[0:64]".
        column: The number of the token, step or block.
        text: What the column is: the token, the number of the step.
        metric: What the page shows.
        values: Metric -> its value there, of all that the page can show.
        curves: Curve -> its value at that column, such as surprisal.
    """

    layer: str
    column: int
    text: str
    metric: str
    values: Mapping[str, float]
    curves: Mapping[str, float]

    @property
    def value(self) -> float:
        """That of the metric that the page shows."""
        return self.values[self.metric]


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
        host: As given.
        port: The port that it is bound to.
        state: What the page shows, as its address has it: metric, sequence, layer, token, and so
            on. It can be set: every open page follows.

    Examples:
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
        self._site = Site(
            self.desk, token or secrets.token_hex(16), remote=remote, on_prompt=on_prompt
        )
        self.host, self._on_close = host, on_close
        self._socket = _bind(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._server = _uvicorn_server(self._site)
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
        name = f"[{self.host}]" if ":" in self.host else self.host
        name = socket.gethostname() if self.host in ("0.0.0.0", "::") else name
        return f"http://{name}:{self.port}/{self._site.token}/"

    @property
    def state(self) -> dict[str, Any]:
        """What the page shows."""
        return dict(self._site.state)

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        site = self._site
        now = site.state.get("sequence", 0)
        check_state(state, self.board, now if isinstance(now, int) else 0)
        site.told = {**site.state, **state}
        site.state = dict(site.told)
        site.tell({"type": "state", "state": site.told})

    @property
    def crosshair(self) -> Crosshair:
        """The numbers at the crosshair.

        Raises:
            InspectionError: No page is open, and no state was set: there is no crosshair.
        """
        return read_crosshair(self.board, self._site.state)

    def changed(self) -> None:
        """Tell the pages that there are other sequences, metrics or findings now."""
        self._site.changed()

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
        self._thread.join(_PATIENCE)  # a busy thread ends later, and closes its socket itself

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<View of {self.board.kind} at {self.url}>"

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            self._site.loop = asyncio.get_running_loop()
            task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not task.done():
                await asyncio.sleep(0.005)
            started.set()
            await task

        # Nobody else may close the socket: asyncio looks at it while it shuts the server down.
        with self._socket, contextlib.suppress(asyncio.CancelledError):
            asyncio.run(serve())
        started.set()


def read_crosshair(board: Board, state: Mapping[str, Any]) -> Crosshair:
    """Return the numbers of a board at the crosshair of a state.

    Raises:
        InspectionError: The state has no crosshair.
    """
    row, sequence, column = (state.get(key, 0) for key in ("layer", "sequence", "column"))
    layer = str(row).partition("[")[0]
    plane = LAYERS if row == layer else layer
    if layer not in board.layers or row not in board.names(plane):
        raise InspectionError(
            f"There is no crosshair: state['layer'] is {state.get('layer')!r}. Open the page, or "
            "set view.state = {'layer': ..., 'column': ...} with a layer of view.board.layers."
        )
    place = list(board.names(plane)).index(str(row))
    metrics = [each.name for each in board.metrics(sequence)]
    values = {}
    for metric in metrics:
        with contextlib.suppress(LookupError):  # parts do not have every metric
            values[metric] = float(board.values(sequence, metric, plane)[column, place])
    curves = board.values(sequence, TRACKS, TRACKS)[column].tolist()
    names = [each.name for each in board.tracks(sequence)]
    text = str(board.columns(sequence, column, column + 1)["pieces"][0])
    text = text if board.axis == "token" else text.strip()
    return Crosshair(
        layer=str(row), column=column, text=text, values=values,
        metric=str(state.get("metric") or metrics[0]), curves=dict(zip(names, curves, strict=True)),
    )  # fmt: skip


def serve(board: Board, *, browser: bool = True, name: str = "view", **options: Any) -> View:
    """Serve a board, print its address on standard error, and open a browser where there is one.

    Args:
        board: What is shown.
        browser: False to print the address alone.
        name: The command that serves it, as messages call it.
        **options: Those of `View`.

    Raises:
        ImportError: starlette and uvicorn are missing (extra `viewer`).
        InspectionError: Other machines would be let in without `remote`, or the port is taken.
    """
    view = View(board, **options)
    print(f"torchfmri {name}: {view.url}", file=sys.stderr)
    for problem in board.about().get("problems", ()):
        print(f"torchfmri {name}: warning: not read: {problem}", file=sys.stderr)
    if view.host not in LOOPBACK:
        print(
            f"torchfmri {name}: warning: every machine that reaches {view.host}:{view.port} and "
            "knows the address sees this, and nothing is encrypted.",
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
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(_HEADER, self._end_if_silent)

        def _end_if_silent(self) -> None:
            asked: Any = self.scope  # None until the header is complete
            if not asked:
                self.transport.close()

    config = uvicorn.Config(
        app, interface="asgi3", http=Protocol, proxy_headers=False,
        log_level="critical", access_log=False, lifespan="off", ws="websockets-sansio",
        server_header=False, ws_max_size=MOST_MESSAGE, ws_per_message_deflate=False,
        timeout_graceful_shutdown=1, limit_concurrency=256,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    return server
