"""The server: a board on a port of this machine, for whoever knows the address."""

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
from types import TracebackType
from typing import Any

from torchfmri._arguments import check_number, require
from torchfmri._viewer.board import Board
from torchfmri._viewer.client import MOST_MESSAGE
from torchfmri._viewer.desk import Desk
from torchfmri._viewer.site import LOOPBACK, Asked, Site
from torchfmri._viewer.state import check_state
from torchfmri.exceptions import InspectionError


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
        self._host, self._on_close = host, on_close
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
        name = f"[{self._host}]" if ":" in self._host else self._host
        name = socket.gethostname() if self._host in ("0.0.0.0", "::") else name
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

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            self._site.loop = asyncio.get_running_loop()
            task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not task.done():
                await asyncio.sleep(0.005)
            started.set()
            await task

        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(serve())
        started.set()


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
    for problem in board.about().get("problems", ()):
        print(f"torchfmri {name}: warning: not read: {problem}", file=sys.stderr)
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
        ws_max_size=MOST_MESSAGE, ws_per_message_deflate=False,
        timeout_graceful_shutdown=1, limit_concurrency=256,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    return server
