"""`ScanStream`: iterate over the tokens of a scan while the model generates.

`entry_points.stream` makes it. The model runs in a thread of its own and waits when the reader is
`_WAITING` tokens behind. However the loop ends (break, error, Ctrl-C), `close` joins the thread
before control returns, or the user would get a model that still has hooks on it. Between the
threads there are only `SimpleQueue`s: Ctrl-C inside `queue.Queue.get` can leave its lock in a state
that raises an error of its own.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable, Generator, Iterator

from torchfmri._model import kept_whole, whole_restorations
from torchfmri._scan.run.live_token import LiveToken
from torchfmri._scan.scan_record import Scan
from torchfmri.exceptions import InspectionError

_WAITING = 64
"""How many tokens may wait for the reader before the model waits for it."""


class _StreamStopped(BaseException):
    """The reader has gone."""


class _Worker:
    """Scans in a thread of its own, which waits where the reader is too far behind.

    Only queues written in C stand between the two: Ctrl-C in `queue.Queue.get` can leave its lock
    in a state that raises a RuntimeError of its own.
    """

    def __init__(self, run: Callable[[Callable[[LiveToken], None]], Scan]) -> None:
        self.scan: Scan | None = None
        self.error: BaseException | None = None
        self._run = run
        self._tokens: queue.SimpleQueue[LiveToken | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def read(self) -> Generator[LiveToken, None, None]:
        """The tokens; leaving the iterator, by Ctrl-C too, waits until the model is as it was."""
        if self._is_stopped:
            return
        with whole_restorations():
            try:
                self._start()
                while (token := self._tokens.get()) is not None and not self._is_stopped:
                    self._room.put(None)
                    yield token
            finally:
                self.close()
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    @kept_whole
    def _start(self) -> None:
        for _ in range(_WAITING):
            self._room.put(None)
        self._thread.start()

    @kept_whole
    def close(self) -> None:
        """Stop scanning, and wait until the model is as it was."""
        self._is_stopped = True
        self._room.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            self.scan = self._run(self._put)
        except _StreamStopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._tokens.put(None)

    def _put(self, token: LiveToken) -> None:
        self._room.get()
        if self._is_stopped:
            raise _StreamStopped
        self._tokens.put(token)


class ScanStream:
    """Tokens one by one while the model generates; the scan itself at the end.

    The model runs in a thread of its own. Leaving the loop early stops it, and puts it back as it
    was: use `with`, or call `close`. An error or Ctrl-C that ends the loop waits for the same.

    Args:
        run: Scans, and calls what it is given with each token.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> with torchfmri.stream(model, tokenizer, "Once upon", max_new_tokens=3) as stream:
        ...     tokens = list(stream)
        >>> len(tokens) == len(stream.scan[0])
        True
    """

    def __init__(self, run: Callable[[Callable[[LiveToken], None]], Scan]) -> None:
        self._worker = _Worker(run)
        self._tokens = self._worker.read()

    def __iter__(self) -> Iterator[LiveToken]:
        # The generator itself, so that a loop over a stream without a name ends it in any case.
        return self._tokens

    def __next__(self) -> LiveToken:
        return next(self._tokens)

    @property
    def scan(self) -> Scan:
        """The finished scan.

        Raises:
            InspectionError: The tokens have not all been read yet, or the stream was closed.
        """
        if self._worker.scan is None:
            raise InspectionError(
                "The scan is there when all tokens have been read: for token in stream: ..., "
                "then stream.scan."
            )
        return self._worker.scan

    def close(self) -> None:
        """Stop the model, if it still runs, and wait until it is as it was."""
        self._worker.close()
        # If another thread is reading, it has come to the end.
        if inspect.getgeneratorstate(self._tokens) != inspect.GEN_RUNNING:
            self._tokens.close()

    def __enter__(self) -> ScanStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
