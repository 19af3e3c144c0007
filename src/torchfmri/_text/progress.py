"""A progress bar on standard error, if somebody is looking.

Scans, lesions, verification and long experiments show one. It writes to standard error, because
standard output belongs to results (`--json`). It is not tqdm's because the core depends on torch
and numpy alone, and `verify` runs there too. In a notebook the bar is shown as well; a log file
gets a line now and then instead. How it looks may change freely.
"""

from __future__ import annotations

import shutil
import sys
import time

from torchfmri._text.labels import display_width, layer_label, shorten

_BAR = 20


class Progress:
    """A progress bar on standard error, if that is a terminal.

    Args:
        title: What is being done.
        total: How many steps there are.
        log_seconds: The seconds between two lines where there is no terminal; None writes none.
    """

    def __init__(self, title: str, total: int, log_seconds: float | None = None) -> None:
        self._title, self._total, self._done = title, total, 0
        self._log_seconds, self._logged = log_seconds, time.monotonic()
        terminal = bool(getattr(sys.stderr, "isatty", lambda: False)())
        self._visible = terminal or in_notebook()  # a cell's output understands "\r" as well
        self._start = time.monotonic()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._show("")

    def at(self, done: int, total: int, name: str) -> None:
        """Begin the step called `name`, when `done` of `total` steps are done."""
        self._done, self._total = done, total
        self.step(name)

    def step(self, name: str) -> None:
        """Begin the next step, called `name`."""
        filled = _BAR * self._done // max(self._total, 1)
        elapsed = time.monotonic() - self._start
        left = elapsed / self._done * (self._total - self._done) if self._done else None
        rest = f", {_duration(left)} left" if left is not None else ""
        self._log(f"{self._title}: {self._done}/{self._total}{rest}")
        text = f"{self._title} [{'#' * filled}{'.' * (_BAR - filled)}] {self._done}/{self._total}"
        text += rest
        room = shutil.get_terminal_size().columns - display_width(text) - 4
        self._show(f"{text}, {shorten(layer_label(name), room, '~')}" if room > 8 else text)
        self._done += 1

    def _log(self, text: str) -> None:
        now = time.monotonic()
        if self._log_seconds is None or self._visible or now - self._logged < self._log_seconds:
            return
        self._logged = now
        print(text, file=sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        if self._visible:
            padding = " " * max(self._width - display_width(text), 0)
            end = "" if text else "\r"
            print(f"\r{text}{padding}{end}", end="", file=sys.stderr, flush=True)
            self._width = display_width(text)


def in_notebook() -> bool:
    """Return whether the program runs in a notebook, which shows standard error and pictures."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def _duration(seconds: float) -> str:
    """Return a time in words: `48 s`, `12 min`, `3 h 20 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
