"""The viewer in a notebook: the same page, its questions answered through the kernel."""

from __future__ import annotations

import base64
from typing import Any

from torchfmri._viewer.board import Board
from torchfmri._viewer.desk import Desk, DeskQuestion, to_json
from torchfmri._viewer.page import bundle
from torchfmri._viewer.still import still
from torchfmri.exceptions import InspectionError


def widget_of(board: Board, height: int = 640) -> Any:
    """An anywidget that shows a board; its `state` is what the page shows, and can be set.

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
        # What a notebook shows whose kernel is gone.
        still = traitlets.Unicode("").tag(sync=True)

        def _repr_mimebundle_(self, **options: Any) -> Any:
            """The widget, and for whoever cannot show one (nbconvert) a still picture of it."""
            bundles = super()._repr_mimebundle_(**options)
            data = bundles[0] if isinstance(bundles, tuple) else bundles
            if data is not None:
                data["text/plain"] = f"torchfmri viewer: {board.about()['model']}"
                if picture:
                    data["image/png"] = picture
            return bundles

    desk = Desk(board)
    shown = bool(board.entries()) and board.length(0) > 0 and bool(board.metrics(0))
    picture = base64.b64encode(still(board)).decode("ascii") if shown else ""
    widget = Viewer(height=height, still=picture)

    def answer(_: Any, question: Any, __: Any) -> None:
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

    widget.on_msg(answer)
    return widget
