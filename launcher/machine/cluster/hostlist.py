"""Slurm's notation for many hosts: `n[9-10,12],gpu-[01-03]-ib`."""

import itertools
import math
import re

# Slurm itself refuses longer ranges.
MAX_HOSTS = 65536
# A name with bracketed sets of ranges in it, up to the next comma outside of brackets.
_NAME = re.compile(r"(?:[A-Za-z0-9._-]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[(?P<ranges>[^\[\]]*)\]|(?P<literal>[^\[\]]+)")
_RANGE = re.compile(r"(?P<first>[0-9]{1,18})(?:-(?P<last>[0-9]{1,18}))?")


def expand(hostlist: str) -> tuple[str, ...]:
    """The hosts in the order of `scontrol show hostnames`.

    Sets stand anywhere in a name, also several, of which the last one counts fastest. Numbers keep the zeros that the
    first of their range is written with. A suffix after the last set is read too, where Slurm 22.05 refuses it.

    Raises:
      ValueError: not such a list, with the part that is not.
    """
    hosts: list[str] = []
    # The names between the commas outside of brackets; empty ones are nothing, as for Slurm.
    for name in filter(None, map(str.strip, re.split(r",(?![^\[\]]*\])", hostlist))):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a host name with ranges such as n[1-3,7]")
        parts = [_choices(match) for match in _PART.finditer(name)]
        if len(hosts) + math.prod(map(len, parts)) > MAX_HOSTS:
            raise ValueError(f"{name!r} makes it more than {MAX_HOSTS} hosts")
        hosts += map("".join, itertools.product(*parts))
    return tuple(hosts)


def _choices(match: re.Match[str]) -> list[str]:
    """The numbers of a set, or the one literal."""
    if match["literal"] is not None:
        return [match["literal"]]
    return [number for item in match["ranges"].split(",") for number in _numbers(item)]


def _numbers(item: str) -> list[str]:
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError(f"{item!r} is not a number or a range such as 1-3")
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if last < first:
        raise ValueError(f"range {item!r} runs backwards")
    if last - first >= MAX_HOSTS:
        raise ValueError(f"range {item!r} is of more than {MAX_HOSTS} hosts")
    return [str(number).zfill(len(match["first"])) for number in range(first, last + 1)]
