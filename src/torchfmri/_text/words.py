"""How findings say numbers and names."""

from __future__ import annotations

from collections.abc import Sequence


def percent(share: float) -> str:
    """Return a share as a percentage: "0.12 %", "45 %"."""
    value = 100 * share
    return f"{value:,.0f} %" if value >= 10 else f"{value:.2g} %"


def apart(one: float, other: float, digits: int = 4) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to tell them apart, and at least `digits`.

    Examples:
        >>> apart(1.0, 1.00003)
        ('1', '1.00003')
    """
    for count in range(digits, 18):
        texts = f"{one:.{count}g}", f"{other:.{count}g}"
        if texts[0] != texts[1]:
            break
    return texts


def listed(layers: Sequence[str], most: int = 3) -> str:
    """Return names in quotes, of many only the first."""
    shown = ", ".join(repr(each or "the model") for each in layers[:most])
    return shown + (f" and {len(layers) - most} more" if len(layers) > most else "")


def how_many(some: int, of: int, noun: str) -> str:
    """Return "All 64 units" or "12 of 64 units"."""
    return f"All {of} {noun}" if some == of else f"{some} of {of} {noun}"
