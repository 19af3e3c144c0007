"""Python's garbage collector, which rests while a pass runs: `RestingCollector`.

A scanned pass keeps thousands of objects alive until it is over: outputs, hooks, what a gradient
comes back to. The collector counts objects that come and do not go, so it looks through all of them
again and again, and every few scans through everything in the process, where it finds nothing: a
quarter of a pass with gradients, on the host that a GPU waits for. What is garbage is found right
after the pass, so rests must be short: one pass, never a whole generation.
"""

from __future__ import annotations

import gc


class RestingCollector:
    """Keeps the collector off between `rest` and `go_on`, or in a `with` block.

    It is on afterwards only if it was on before.
    """

    def __init__(self) -> None:
        self._was_on = False

    def rest(self) -> None:
        """Switch the collector off, until `go_on`."""
        self._was_on = self._was_on or gc.isenabled()
        gc.disable()

    def go_on(self) -> None:
        """Switch it on again, if it was on; safe to call twice."""
        if self._was_on:
            self._was_on = False
            gc.enable()

    def __enter__(self) -> None:
        self.rest()

    def __exit__(self, *_: object) -> None:
        self.go_on()
