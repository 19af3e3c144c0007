"""The line of source code that is being run, told by the frames of the interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from torchfmri._explain import SourceLine, TracebackStep

_ENGINE = str(Path("torch", "autograd", "graph.py"))


class Lines(NamedTuple):
    """Where the program is.

    Attributes:
        line: The innermost line outside of PyTorch and torchfmri.
        caller: The innermost line of the user's own, where `line` is one of a library.
    """

    line: SourceLine | None = None
    caller: SourceLine | None = None


def running_lines(entry: CodeType, in_backward: bool = False) -> Lines:
    """Return the lines that lead to here from the function `entry`.

    Args:
        entry: The code of the function of ours that called the user's; frames beyond do not count.
        in_backward: Count frames inside of the backward pass only: a backward written in Python, a
            forward pass that a checkpoint runs again.
    """
    line: SourceLine | None = None
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not entry:
        step = TracebackStep(frame, frame.f_lineno, -1)
        if in_backward and step.file.endswith(_ENGINE):
            break
        if not step.of_torch:
            if step.of_user:
                return Lines(step.line) if line is None else Lines(line, step.line)
            line = step.line if line is None and not _is_generated(step.file) else line
        above = frame.f_back
        if above is None:
            break
        frame = above
    return Lines(line)


def _is_generated(file: str) -> bool:
    return file.startswith("<")
