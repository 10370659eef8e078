"""Where texts come from: what a source of pairs or documents offers, and refusing what is bound for another one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

from absl import logging

from launcher.errors import UsageError

# Read for one release: names of demonstration data, which recipes import and bind as `source` now.
_DEMONSTRATIONS = {
    "python_docs": ("python_docs", "PythonDocs"),
    "spoken_numbers": ("spoken_numbers", "SpokenNumbers"),
    **dict.fromkeys(("help_en_de", "help_en_fr", "help_en_es"), ("help_pages", "HelpPages")),
}

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


def chosen(binding: str, name: str | None, source: Source[Any] | None) -> tuple[str, Source[Any] | None]:
    """The name, or "" where the recipe's source is to be read; and the source, None where the name says which.

    A bound name goes before a bound source, so that one --gin_param trains a recipe on other texts.

    Raises:
      UsageError: neither is bound.
    """
    if name is None and source is None:
        raise UsageError(f"required and not bound: {binding}.source, or {binding}.name")
    if name is None:
        return "", source
    if name not in _DEMONSTRATIONS:
        return name, None
    module, made = _DEMONSTRATIONS[name]
    logging.warning(
        "%s.name = %r is going to end: import examples.data.%s and bind %s.source = @%s()", binding, name, module,
        binding, made,
    )  # fmt: skip
    make: type = getattr(importlib.import_module(f"examples.data.{module}"), made)
    return name, make(name) if module == "help_pages" else make()
