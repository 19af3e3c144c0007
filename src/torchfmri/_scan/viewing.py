"""Show scans, contrasts and training runs in a browser: `torchfmri.view`.

This file finds the `Board` that fits what it is given and starts the server of `_viewer`. The
command line uses `board_of` and `difference_of` too. A new thing to look at needs a `Board` of its
own and a line in `board_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torchfmri._arguments import check_flag, require
from torchfmri._contrast import Contrast, ContrastBoard, load_contrast
from torchfmri._records import History
from torchfmri._scan.loading import load
from torchfmri._scan.pictures.scan_board import ScanBoard
from torchfmri._scan.scan_record import Scan
from torchfmri._viewer import Board, DiffBoard, Panel, RunBoard, View, ViewedRun, runs_in, serve
from torchfmri.exceptions import InspectionError

Viewed = Scan | Contrast | History | str | PathLike[str]


def view(
    what: Viewed,
    other: Viewed | None = None,
    *,
    browser: bool = True,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    remote: bool = False,
    state: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    panels: Sequence[Panel] = (),
) -> View:
    """Show a scan, a contrast or a training run in a browser; the view serves until it is closed.

    Args:
        what: A `Scan` or the folder of one; a `Contrast` or its file; the `History` of a Monitor,
            or the folder that a Monitor writes (`Monitor(folder="run")`), also while it trains; or
            a folder of those.
        other: Another scan: the page shows `other` - `what`, layer by layer, token by token.
        browser: Whether to open a browser; the address is printed in any case.
        host: What to bind to; other addresses than this machine's own need `remote`.
        port: 0 takes a free one.
        token: What the address starts with, 16 letters and digits or more; random by default.
        remote: Whether other machines may connect. Nothing is encrypted.
        state: What to show first, such as `view.state` of another time.
        tokenizer: The model's tokenizer, to spell the tokens that a lens names (`scan(lens=True)`);
            without it those that are not in the text are numbers.
        panels: Further panels of a scan, such as `lesions.panel(scan.layers)`.

    Raises:
        FileFormatError: The path holds neither a scan, nor a contrast, nor a run.
        ImportError: starlette and uvicorn are missing (extra `viewer`).
    """
    check_flag("browser", browser)
    check_flag("remote", remote)
    mapped = state is None or isinstance(state, Mapping)
    require(mapped, "state", state, "give a mapping, such as view.state of another view")
    board = board_of(what)
    if isinstance(board, ScanBoard):
        board.tokenizer = tokenizer
        board.further = tuple(panels)
    else:
        require(not panels, "panels", panels, "only the page of a scan has further ones")
    if other is not None:
        board = difference_of(board, board_of(other))
    shown = serve(board, host=host, port=port, token=token, remote=remote, browser=browser)
    if state is not None:
        shown.state = dict(state)
    return shown


def difference_of(first: Board, second: Board) -> Board:
    """Return the board of the difference `second` - `first`.

    Raises:
        InspectionError: They have different columns, such as tokens and steps.
    """
    if first.axis != second.axis or ContrastBoard.kind in (first.kind, second.kind):
        raise InspectionError(
            f"The difference of a {first.kind} and a {second.kind} cannot be shown: give two "
            "scans, or two runs."
        )
    return DiffBoard(first, second)


def board_of(what: Viewed) -> Board:
    """Return the board of a scan, a contrast, a history, or the path of one of these."""
    if isinstance(what, Scan):
        return what._board()
    if isinstance(what, Contrast):
        return ContrastBoard(what)
    if isinstance(what, History):
        return RunBoard(run=ViewedRun.of_history(what))
    meaning = "give a Scan, a Contrast, a Monitor's history, or the path of one of these"
    require(isinstance(what, str | PathLike), "what", what, meaning)
    path = Path(what)
    if path.suffix == ".contrast" and path.is_file():
        return ContrastBoard(load_contrast(path), path)
    if runs_in(path):
        return RunBoard(path)
    if path.is_dir() and not any(path.iterdir()):
        raise InspectionError(
            f"{str(path)!r} is empty: neither a scan nor a run is in it. Give the folder of a scan "
            "(NAME.fmri), or one that a Monitor writes."
        )
    return load(path)._board()
