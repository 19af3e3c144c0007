"""The viewer in a notebook: the same page, its questions answered through the kernel."""

from __future__ import annotations

from typing import Any

from torchfmri._viewer.board import Board
from torchfmri._viewer.desk import Desk, Question, to_json
from torchfmri._viewer.page import bundle
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

        def _repr_mimebundle_(self, **options: Any) -> Any:
            """The widget, and for whoever cannot show one (nbconvert) what it is about."""
            bundles = super()._repr_mimebundle_(**options)
            data = bundles[0] if isinstance(bundles, tuple) else bundles
            if data is not None:
                data["text/plain"] = f"torchfmri viewer: {board.about()['model']}"
            return bundles

    desk = Desk(board)
    widget = Viewer(height=height)

    def answer(_: Any, question: Any, __: Any) -> None:
        number = question.get("number") if isinstance(question, dict) else None
        try:
            found = desk.answer(str(question["name"]), dict(question["given"]))
        except (Question, InspectionError, KeyError, TypeError) as error:
            widget.send({"number": number, "error": str(error)})
            return
        if isinstance(found, bytes):
            widget.send({"number": number}, [found])
        else:
            widget.send({"number": number, "json": to_json(found)})

    widget.on_msg(answer)
    return widget
