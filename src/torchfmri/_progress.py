"""A progress bar on standard error, where somebody is looking."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType

from torchfmri._labels import display_width, layer_label, shorten

_BAR = 20


class Progress:
    """How far a long piece of work has come; nothing where standard error is no terminal.

    Args:
        title: What is being done.
        total: How many steps there are.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._visible = bool(getattr(sys.stderr, "isatty", lambda: False)())
        self._start = time.monotonic()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._show("")

    def step(self, name: str) -> None:
        """Begin the next step, called `name`."""
        filled = _BAR * self._done // max(self._total, 1)
        elapsed = time.monotonic() - self._start
        left = elapsed / self._done * (self._total - self._done) if self._done else None
        text = f"{self._title} [{'#' * filled}{'.' * (_BAR - filled)}] {self._done}/{self._total}"
        text += f", {left:.0f} s left" if left is not None else ""
        room = shutil.get_terminal_size().columns - display_width(text) - 4
        self._show(f"{text}, {shorten(layer_label(name), room, '~')}" if room > 8 else text)
        self._done += 1

    def _show(self, text: str) -> None:
        if self._visible:
            padding = " " * max(self._width - display_width(text), 0)
            end = "" if text else "\r"
            print(f"\r{text}{padding}{end}", end="", file=sys.stderr, flush=True)
            self._width = display_width(text)
