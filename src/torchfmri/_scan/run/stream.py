"""A scan as an iterator: each token as soon as the model has been run on it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from torchfmri._scan.run.live_token import LiveToken
from torchfmri._scan.scan_record import Scan
from torchfmri.exceptions import InspectionError

_WAITING = 64
"""How many tokens may wait for the reader before the model waits for it."""


class _Stopped(BaseException):
    """The reader has gone."""


class ScanStream:
    """Tokens one by one while the model generates; the scan itself at the end.

    The model runs in a thread of its own. Leaving the loop early stops it, and puts it back as it
    was: use `with`, or call `close`.

    Args:
        run: Scans, and calls what it is given with each token.

    Example:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> with torchfmri.stream(model, tokenizer, "Once upon", max_new_tokens=3) as stream:
        ...     tokens = list(stream)
        >>> len(tokens) == len(stream.scan[0])
        True
    """

    def __init__(self, run: Callable[[Callable[[LiveToken], None]], Scan]) -> None:
        self._queue: queue.Queue[LiveToken | None] = queue.Queue(_WAITING)
        self._stop = threading.Event()
        self._scan: Scan | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True)
        self._started = False
        self._tokens = self._read()

    def _work(self, run: Callable[[Callable[[LiveToken], None]], Scan]) -> None:
        try:
            self._scan = run(self._put)
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._put_last()

    def _put(self, token: LiveToken) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(token, timeout=0.1)
            except queue.Full:
                continue
            return
        raise _Stopped

    def _put_last(self) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(None, timeout=0.1)
            except queue.Full:
                continue
            return

    def __iter__(self) -> ScanStream:
        return self

    def __next__(self) -> LiveToken:
        return next(self._tokens)

    def _read(self) -> Iterator[LiveToken]:
        if not self._started:
            self._started = True
            self._thread.start()
        while not self._stop.is_set():
            token = self._queue.get()
            if token is None:
                self._thread.join()
                self._stop.set()
                break
            yield token
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def scan(self) -> Scan:
        """The finished scan.

        Raises:
            InspectionError: The tokens have not all been read yet, or the stream was closed.
        """
        if self._scan is None:
            raise InspectionError(
                "The scan is there when all tokens have been read: for token in stream: ..., "
                "then stream.scan."
            )
        return self._scan

    def close(self) -> None:
        """Stop the model, if it still runs, and wait until it is as it was."""
        self._stop.set()
        if self._started:
            self._thread.join()

    def __enter__(self) -> ScanStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
