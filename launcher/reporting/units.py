"""Quantities as people read them."""

from __future__ import annotations

GIB = 2**30


def bytes_text(count: float) -> str:
    """ "2.53 GiB", "38.5 MiB"."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if count / size < 1000 else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def milliseconds(seconds: float) -> str:
    """ "12.3 ms", "1.2 s"."""
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def amount(number: float) -> str:
    """ "1.44 T", "25.6 M": with the prefix that leaves one to three digits before the point."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.4g} {prefix}"
    return f"{number:.4g} "
