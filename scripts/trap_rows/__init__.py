"""Rows of docs/traps.md that can be asked of the installed versions; `traps.py` runs them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      needs: modules that have to be there; the first says in which process it runs.
      check: returns what was seen, and whether the trap is there; raises CannotTell.
    """

    name: str
    needs: tuple[str, ...]
    check: Callable[[], tuple[str, bool]]


class CannotTell(Exception):
    """Raised by a check that these versions give no answer to."""


ROWS: dict[str, Row] = {}


def row(*needs: str) -> Callable[[Callable[[], tuple[str, bool]]], Callable[[], tuple[str, bool]]]:
    """Makes a row of a function of its name."""

    def made(check: Callable[[], tuple[str, bool]]) -> Callable[[], tuple[str, bool]]:
        name = check.__name__.replace("_", "-")
        ROWS[name] = Row(name, needs, check)
        return check

    return made


@contextlib.contextmanager
def saved(model: Any) -> Iterator[str]:
    """The path of a .keras file of a model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/of.keras")
        yield f"{folder}/of.keras"
