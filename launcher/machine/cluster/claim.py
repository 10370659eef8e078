"""A claim: what one source says about this process's place, and the reading of its variables."""

import dataclasses
import re
from collections.abc import Callable, Mapping

from launcher.errors import UsageError

HOST = re.compile(r"[A-Za-z0-9._-]+")
LAST_PORT = 65535
_WHOLE_NUMBER = re.compile(r"[0-9]{1,10}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A place among peers, before anybody asks for their addresses.

    Attributes:
      source, index, to_train_alone: as of `Cluster`.
      evidence: variables and values that say so, for messages.
      marker: the variable without which the source would not be there.
      addresses: gives "host:port" of every worker in rank order, or () for a process without peers; raises UsageError.
    """

    source: str
    num_workers: int
    index: int
    evidence: str
    marker: str
    addresses: Callable[[], tuple[str, ...]]
    to_train_alone: str = ""


def text(environ: Mapping[str, str], name: str, *, advice: str) -> str:
    """The variable's value; raises UsageError where it is missing or empty."""
    value = environ.get(name, "").strip()
    if not value:
        raise UsageError(f"{name} is missing or empty: {advice}")
    return value


def whole_number(
    environ: Mapping[str, str], name: str, *, advice: str, least: int = 0, most: int | None = None, default: str = ""
) -> int:
    """The variable's value as a number from `least` to `most`, or UsageError; `default` stands in for an empty one."""
    value = environ.get(name, "").strip() or default or text(environ, name, advice=advice)
    number = int(value) if _WHOLE_NUMBER.fullmatch(value) else -1
    if number < least or (most is not None and number > most):
        wanted = f"from {least} to {most}" if most is not None else f"of {least} or more"
        raise UsageError(f"{name}={value!r} is not a whole number {wanted}: {advice}")
    return number
