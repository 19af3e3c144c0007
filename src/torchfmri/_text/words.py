"""Numbers, shares, bytes, times and lists of names in words.

Reports, findings and tables of all rooms use these, so that a number looks the same everywhere. The
doctests are the specification. Rounding must not change a verdict: `apart` shows as many digits as
it takes to tell two numbers apart. A further unit or form may be added freely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchfmri._arguments import few


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
    """Return the first names in quotes, and how many more there are."""
    return few((repr(each or "the model") for each in layers), most)


def how_many(some: int, of: int, noun: str) -> str:
    """Return "All 64 units" or "12 of 64 units"."""
    return f"All {of} {noun}" if some == of else f"{some} of {of} {noun}"


_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def bytes_text(value: float) -> str:
    """Return a number of bytes in binary units.

    >>> bytes_text(0), bytes_text(900), bytes_text(1536), bytes_text(3 * 2**30)
    ('0', '900 B', '1.5 KiB', '3 GiB')
    """
    number, prefix = _scaled(value, 1024)
    unit = f"{prefix.upper()}iB" if prefix else "B"
    return f"{number} {unit}" if value and math.isfinite(value) else number


def flops_text(value: float) -> str:
    """Return a number of FLOPs (a count, not a rate) in decimal units.

    >>> flops_text(0), flops_text(512), flops_text(9_437_184), flops_text(2.5e12)
    ('0', '512', '9.44 M', '2.5 T')
    """
    return " ".join(_scaled(value, 1000)).strip()


def seconds_text(value: float) -> str:
    """Return a time in seconds, milliseconds or microseconds.

    >>> seconds_text(2.5), seconds_text(0.0123), seconds_text(4.2e-5), seconds_text(float("nan"))
    ('2.5 s', '12.3 ms', '42 µs', '-')
    """
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= 0.9995 * size:
            return f"{_short(value / size)} {unit}"
    return f"{_short(value * 1e6)} µs"


def change_text(value: float, reference: float) -> str:
    """Return how a value compares with a reference, in percent.

    >>> change_text(75, 100), change_text(100, 100), change_text(130, 100)
    ('-25 %', '0 %', '+30 %')
    """
    if not reference or not math.isfinite(value):
        return "-"
    percent = round(100 * (value / reference - 1))
    return f"{percent:+d} %" if percent else "0 %"


def _scaled(value: float, base: int) -> tuple[str, str]:
    """Return a number of three digits, and the prefix of its unit."""
    if not math.isfinite(value):
        return "-", ""
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value /= base
        power += 1
    return _short(value), _PREFIXES[power]


def _short(value: float) -> str:
    """Return three significant digits, without an exponent."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
