"""Where texts come from: what a source of pairs or documents offers, and refusing what is bound for another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

from launcher.errors import UsageError

Item_co = TypeVar("Item_co", covariant=True)


class Source(Protocol[Item_co]):
    """Texts: documents (`Source[str]`) or pairs (`Source[Pair]`). Making one reads nothing."""

    name: str

    def check(self) -> None:
        """Raises UsageError where the texts are not to be had."""

    def digest(self) -> str:
        """Changes when the texts change; quick."""

    def train(self) -> Iterator[Item_co]:
        """What to train on, in an order that is always the same."""

    def held_out(self) -> Iterator[Item_co]:
        """What to evaluate on; may be nothing."""


def refuse(binding: str, name: str, arguments: Mapping[str, object], those: str) -> None:
    """Raises UsageError for arguments that are given and mean nothing to the data set `name`, but to `those`."""
    given = [argument for argument, value in arguments.items() if value is not None]
    if given:
        raise UsageError(f"{binding}.{given[0]} is for {binding}.name = {those}, and the name is {name!r}")
