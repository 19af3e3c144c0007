"""Packages that an extra installs: what to do if one is missing.

`with from_extra(...)` stands around the import of an optional package, inside the function that
needs it: the core needs torch and numpy only. An ImportError in the block becomes the command that
installs the extra. The words may change freely, but the command must be one that works as it is
printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchfmri.exceptions import InspectionError


@contextmanager
def from_extra(need: str, extra: str, otherwise: str = "") -> Iterator[None]:
    """Say how to install what an import in the block does not find.

    Args:
        need: What needs which package, such as "Parquet needs pyarrow".
        extra: The extra that installs it.
        otherwise: A sentence about what can be done without it.

    Raises:
        InspectionError: The package is not installed.
    """
    try:
        yield
    except ImportError as error:
        text = f"{need}: pip install 'torchfmri[{extra}]'. {otherwise}".rstrip()
        raise InspectionError(text) from error
