"""Quantities as people read them."""

from collections.abc import Sequence

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


def step_text(least: float, estimate: float | None) -> str:
    """ "at least 12.3 ms", "about 15 ms (at least 12.3 ms)"."""
    bound = f"at least {milliseconds(least)}"
    return bound if estimate is None else f"about {milliseconds(estimate)} ({bound})"


def amount(number: float) -> str:
    """ "1.44 T", "25.6 M": with the prefix that leaves one to three digits before the point."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.4g} {prefix}"
    return f"{number:.4g} "


def clock(seconds: float) -> str:
    """ "0:07", "41:40", "1:00:00"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def first(names: Sequence[str], most: int = 3) -> str:
    """ "a, b, c and 2 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def plural(count: int, noun: str) -> str:
    """ "1 batch", "3 batches", "2 replicas"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith(('s', 'x', 'ch')) else 's'}"
