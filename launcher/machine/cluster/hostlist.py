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

    Sets stand anywhere in a name, also several: the last one counts fastest, then, as in Slurm 22.05, the first, the
    second and so on. Numbers keep the zeros that the first of their range is written with. A suffix after the last set
    is read too, where Slurm 22.05 refuses it.

    Raises:
      ValueError: not such a list, with the part that is not.
    """
    hosts: list[str] = []
    # The names between the commas outside of brackets; empty ones are nothing, as for Slurm.
    for name in filter(None, map(str.strip, re.split(r",(?![^\[\]]*\])", hostlist))):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a host name with ranges such as n[1-3,7]")
        parts = [_part(match) for match in _PART.finditer(name)]
        if len(hosts) + math.prod(sum(len(numbers) for numbers, _ in part) for part in parts) > MAX_HOSTS:
            raise ValueError(f"{name!r} makes it more than {MAX_HOSTS} hosts")
        choices = [[form.format(number) for numbers, form in part for number in numbers] for part in parts]
        fastest = len(parts) - 1 - (len(parts) > 1 and not name.endswith("]"))
        order = sorted(range(len(parts)), key=lambda place: (place == fastest, -place))
        for choice in itertools.product(*(choices[place] for place in order)):
            hosts.append("".join(text for _, text in sorted(zip(order, choice, strict=True))))
    return tuple(hosts)


def _part(match: re.Match[str]) -> list[tuple[range, str]]:
    """Numbers, and how each of them is written; a literal is one that is not."""
    if match["literal"] is not None:
        return [(range(1), match["literal"])]
    return [_numbers(item) for item in match["ranges"].split(",")]


def _numbers(item: str) -> tuple[range, str]:
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError(f"{item!r} is not a number or a range such as 1-3")
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if last < first:
        raise ValueError(f"range {item!r} runs backwards")
    return range(first, last + 1), f"{{:0{len(match['first'])}d}}"
