"""The table of failures that can be explained.

To add a failure, add an entry to one of the tables below, and a test that makes the real failure
happen. Patterns are loose, because the wording changes between versions; named groups fill the
texts. The first entry that matches is used, so special entries stand before general ones.
"""

from __future__ import annotations

import re

from torchfmri._explain.backward_failures import BACKWARD_FAILURES
from torchfmri._explain.crash import Crash
from torchfmri._explain.failure import Failure
from torchfmri._explain.forward_failures import FORWARD_FAILURES
from torchfmri._explain.layer_failures import LAYER_FAILURES
from torchfmri._explain.setup_failures import SETUP_FAILURES
from torchfmri._explain.target_failures import TARGET_FAILURES

FAILURES: tuple[Failure, ...] = (
    *BACKWARD_FAILURES,
    *SETUP_FAILURES,
    *LAYER_FAILURES,
    *TARGET_FAILURES,
    *FORWARD_FAILURES,
)


def find_failure(crash: Crash) -> tuple[Failure, re.Match[str]] | None:
    """Return the first failure of the table that fits, with its match."""
    for failure in FAILURES:
        match = failure.match(crash)
        if match is not None:
            return failure, match
    return None
