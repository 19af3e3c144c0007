"""Errors of our own while watching: noted, so that they neither end a run nor stay hidden."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType


class Notes:
    """Sentences about a run that are not findings; each is kept once."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def add(self, sentence: str) -> None:
        """Note something."""
        self._said.setdefault(sentence)

    def guard(self, part: str) -> Guard:
        """Return a context that turns an error into a note: `part` was not fully looked at."""
        return Guard(self, part)

    @property
    def all(self) -> tuple[str, ...]:
        """All notes, oldest first."""
        return tuple(self._said)


class Guard:
    """A context around our own code, which must never end somebody's training."""

    __slots__ = ("_notes", "_part")

    def __init__(self, notes: Notes, part: str) -> None:
        self._notes, self._part = notes, part

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = ""
        if trace is not None:
            where = f", {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        said = str(error).strip().partition("\n")[0]
        self._notes.add(
            f"{self._part} could not be looked at ({type(error).__name__}: {said}{where}): what is "
            "wrong there may be missing from this report. This is a fault of torchfmri."
        )
        return True
