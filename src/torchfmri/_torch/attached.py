"""What is attached for the time of a block: put on together, taken off together."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeVar

Own = TypeVar("Own", bound="Attached")


class Attached:
    """A context manager whose `_attach` puts things on, each with what takes it off again.

    What is on already is taken off where a later thing fails, and at the end of the block in
    reverse order, however the block ends.
    """

    _stack: ExitStack | None = None

    def _attach(self, stack: ExitStack) -> None:
        raise NotImplementedError

    def __enter__(self: Own) -> Own:
        with ExitStack() as stack:
            self._attach(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None
