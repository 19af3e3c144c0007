"""The viewer in a notebook: the same page, its questions answered through the kernel.

`scan.widget()` returns it. Questions and answers travel as messages of the kernel and not through
a port, so that it works wherever the notebook does. The picture must stay part of the output: it
is what an exported notebook shows.
"""

from __future__ import annotations

import base64
import uuid
from functools import partial
from html import escape
from typing import Any

from torchfmri._viewer.board import Board
from torchfmri._viewer.desk import Desk, DeskQuestion, to_json
from torchfmri._viewer.page import bundle
from torchfmri._viewer.still import labelled, shown_rows, still, top_words
from torchfmri._viewer.tiles import RANGED
from torchfmri.exceptions import InspectionError


def widget_of(board: Board, height: int = 640) -> Any:
    """Return an anywidget that shows a board; its `state` is what the page shows.

    Args:
        board: What is shown.
        height: In pixels.

    Raises:
        ImportError: anywidget is missing (extra `notebook`).
    """
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise ImportError(
            "A widget needs anywidget: pip install 'torchfmri[notebook]'. "
            "Without it: torchfmri.view(scan), or scan.save_html('scan.html')."
        ) from error

    class Viewer(anywidget.AnyWidget):
        _esm = bundle()
        state = traitlets.Dict().tag(sync=True)
        height = traitlets.Int(640).tag(sync=True)
        # What a notebook shows whose kernel is gone, and the class of its element in the notebook.
        still = traitlets.Unicode("").tag(sync=True)
        still_class = traitlets.Unicode("").tag(sync=True)

        def _ipython_display_(self, **options: Any) -> None:
            """Show the widget, and after it the picture, which the widget hides while it works."""
            from IPython.display import display

            for data in _outputs(self, board):
                display(data, raw=True)  # type: ignore[no-untyped-call]

        def _repr_mimebundle_(self, **options: Any) -> Any:
            """Return the widget, and a still picture for whoever takes one of several kinds."""
            bundles = super()._repr_mimebundle_(**options)
            data = bundles[0] if isinstance(bundles, tuple) else bundles
            if data is not None:
                data |= _plain_kinds(board, self.still)
            return bundles

    desk = Desk(board)
    shown = bool(board.entries()) and board.length(0) > 0 and bool(board.metrics(0))
    picture = base64.b64encode(still(board)).decode("ascii") if shown else ""
    widget = Viewer(height=height, still=picture, still_class=f"torchfmri-still-{uuid.uuid4().hex}")
    widget.on_msg(partial(_answer, desk, widget))
    return widget


def _answer(desk: Desk, widget: Any, _: Any, question: Any, __: Any) -> None:
    """Answer a question of the page."""
    number = question.get("number") if isinstance(question, dict) else None
    try:
        found = desk.answer(str(question["name"]), dict(question["given"]))
    except (DeskQuestion, InspectionError, KeyError, TypeError) as error:
        widget.send({"number": number, "error": str(error)})
        return
    if isinstance(found, bytes):
        widget.send({"number": number}, [found])
    else:
        widget.send({"number": number, "json": to_json(found)})


def _plain_kinds(board: Board, picture: str) -> dict[str, str]:
    """Return what those get who cannot show a widget."""
    said = {"text/plain": f"torchfmri viewer: {board.about()['model']}"}
    return {**said, "image/png": picture} if picture else said


def _outputs(widget: Any, board: Board) -> list[dict[str, Any]]:
    """Return what a cell puts out: the widget, and its picture.

    Of one output with both, nbconvert would take the widget, which nobody draws without a network.
    """
    view = widget._repr_mimebundle_()
    view = view[0] if isinstance(view, tuple) else view
    if not widget.still:
        return [view]
    figure = {"text/html": _figure(board, widget.still, widget.still_class)}
    without = {key: each for key, each in view.items() if key != "image/png"}
    return [without, {**figure, **_plain_kinds(board, widget.still)}]


def _figure(board: Board, picture: str, name: str) -> str:
    """Return the picture with what it shows below it."""
    metric = next(each for each in board.metrics(0) if each.shown)
    shown, every = len(shown_rows(board.layers)), len(board.layers)
    rows = f"{every:,}" if shown == every else f"{shown:,} of {every:,}"
    lengths = f"{board.length(0):,} {board.axis}s across, {rows} layers down"
    said = f"{board.about()['model']}, {metric.title.lower()} ({metric.unit}): {lengths}; each row "
    low = "its lowest value" if metric.name in RANGED else "0"
    said += (
        f"from {low} (dark) to {top_words(board)} (bright)"
        if not metric.signed
        else "by its own scale"
    )
    drawing = base64.b64encode(labelled(board, base64.b64decode(picture))).decode("ascii")
    return (
        f'<figure class="{name}" style="margin:0"><img alt="{escape(said)}" '
        f'style="max-width:100%" src="data:image/svg+xml;base64,{drawing}">'
        f'<figcaption style="font-size:smaller;opacity:.8">{escape(said)}</figcaption></figure>'
    )
