"""The command `torchfmri view`: scans, a contrast, or a training run in a browser.

`chat`, `scan --live` and others take the options of their page from here, so that every command
that serves one has the same.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from torchfmri._scan import board_of, difference_of
from torchfmri._viewer import View, serve


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri view`."""
    parser.add_argument(
        "what",
        metavar="SCAN",
        help="a scan (NAME.fmri), a contrast (NAME.contrast), or a Monitor's run or folder of runs",
    )
    parser.add_argument("other", nargs="?", metavar="SCAN2", help="show SCAN2 - SCAN")
    add_server_arguments(parser)


def add_server_arguments(parser: ArgumentParser) -> None:
    """The options of every command that serves a page."""
    group = parser.add_argument_group("the page")
    group.add_argument("--port", type=int, default=0, metavar="N", help="default: a free one")
    group.add_argument("--host", default="127.0.0.1", help="what to bind (default: %(default)s)")
    group.add_argument("--token", help="what the address starts with (default: random)")
    group.add_argument(
        "--remote", action="store_true", help="let other machines in; nothing is encrypted"
    )
    group.add_argument("--no-browser", action="store_true", help="only print the address")


def served(options: Namespace, board: Any, name: str, **further: Any) -> View:
    """The board on a port, as the options say."""
    return serve(
        board, host=options.host, port=options.port, token=options.token, remote=options.remote,
        browser=not options.no_browser, name=name, **further,
    )  # fmt: skip


def run(options: Namespace) -> tuple[dict[str, Any], str, int]:
    """Serve until Ctrl-C."""
    for name in filter(None, (options.what, options.other)):
        if not Path(name).exists():
            raise FileNotFoundError(f"There is no {name!r}. Give a scan, a contrast, or a run.")
    board: Any = board_of(options.what)
    if options.other is not None:
        board = difference_of(board, board_of(options.other))
    with served(options, board, "view") as view:
        url = view.url
        view.wait()
    return {"url": url}, "", 0
