"""Bytes, FLOPs and seconds in a few characters."""

from __future__ import annotations

import math

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
