"""The command `torchfmri view`: scans, a contrast, or a training run in a browser.

`chat`, `scan --live` and others take the options of their page from here, so that every command
that serves one has the same. Names of options are public, and `run` waits until Ctrl-C.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from torchfmri._scan import board_of, difference_of
from torchfmri._viewer import View, serve
from torchfmri.cli.options import CommandOptions, Result


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri view`."""
    text = "a scan (NAME.fmri), a contrast (NAME.contrast), or a Monitor's run or folder of runs"
    parser.text("what", text, "SCAN")
    parser.text("other", "show SCAN2 - SCAN", "SCAN2", nargs="?")
    add_server_arguments(parser)


def add_server_arguments(parser: CommandOptions) -> None:
    """Add the options of every command that serves a page."""
    group = parser.group("the page")
    group.argument(
        "--port", type=int, default=0, metavar="N", help="port of the page (default: a free one)"
    )
    group.argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    group.argument("--token", help="secret in the address of the page (default: random)")
    group.switch("--remote", "let other machines in; nothing is encrypted")
    group.switch("--no-browser", "only print the address")


def served(options: Namespace, board: Any, name: str, **further: Any) -> View:
    """Serve a board as the options say, and return its view."""
    settings = {each: getattr(options, each) for each in ("host", "port", "token", "remote")}
    return serve(board, browser=not options.no_browser, name=name, **settings, **further)


def run(options: Namespace) -> Result:
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
