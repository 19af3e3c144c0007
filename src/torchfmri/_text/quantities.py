"""Bytes, FLOPs and seconds in a few characters."""

from __future__ import annotations

import math

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def bytes_text(value: float) -> str:
    """Bytes in binary units.

    >>> bytes_text(0), bytes_text(900), bytes_text(1536), bytes_text(3 * 2**30)
    ('0', '900 B', '1.5 KiB', '3 GiB')
    """
    if not math.isfinite(value):
        return "-"
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value /= 1024
        power += 1
    unit = f"{_PREFIXES[power].upper()}iB" if power else "B"
    return f"{_short(value)} {unit}" if value else "0"


def flops_text(value: float) -> str:
    """FLOPs (a count, not a rate) in decimal units.

    >>> flops_text(0), flops_text(512), flops_text(9_437_184), flops_text(2.5e12)
    ('0', '512', '9.44 M', '2.5 T')
    """
    return _decimal(value)


def seconds_text(value: float) -> str:
    """Seconds, milliseconds or microseconds.

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
    """How a value compares with a reference, in percent.

    >>> change_text(75, 100), change_text(100, 100), change_text(130, 100)
    ('-25 %', '0 %', '+30 %')
    """
    if not reference or not math.isfinite(value):
        return "-"
    percent = round(100 * (value / reference - 1))
    return f"{percent:+d} %" if percent else "0 %"


def _decimal(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value /= 1000
        power += 1
    return f"{_short(value)} {_PREFIXES[power]}".strip() if value else "0"


def _short(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
