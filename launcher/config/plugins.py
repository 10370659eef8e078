"""Plugins: rows that an installed package adds to a table here, by an entry point in the table's group.

    [project.entry-points."launcher.modes"]
    count = "mine.counting:COUNT"

The groups are launcher.modes, launcher.backends, launcher.engines and launcher.sinks; docs/own_plugins.md shows what
stands behind each. Packages are asked for a name that is not in the table, and for all names where help or an error
lists them: a look at all that are installed takes a third of a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from launcher.errors import UsageError, nearest, user_code

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SINKS = "launcher.sinks"
_Row = TypeVar("_Row")


class Table(dict[str, _Row], Generic[_Row]):
    """Rows by their names: those given, and of packages those that have been asked for, by `table[name]`.

    Args:
      flag: whose values the names are; the group is "launcher.", this and "s".
      kind: what a row is; its `says` tells people of it.
      between: a name and what is said of it.
    """

    def __init__(self, flag: str, kind: type[_Row], rows: Mapping[str, _Row], between: str = ", "):
        super().__init__(rows)
        self._flag, self._kind, self._between, self._group = flag, kind, between, f"launcher.{flag}s"

    def __missing__(self, name: str) -> _Row:
        return self.asked(name, f"--{self._flag}={name}")

    def asked(self, name: str, what: str) -> _Row:
        """The row of that name, also of a package; UsageError about `what` where there is none, or it is broken."""
        if name in self:
            return self[name]
        if (entry := entries(self._group).get(name)) is None:
            known, close = ", ".join(self.names()), nearest(name, self.names())
            meant = f"; did you mean {close!r}?" if close else ""
            raise UsageError(f"{what}: there is no such {self._flag} among {known}{meant}")
        row = load(entry, what)
        if not isinstance(row, self._kind):
            made = f"{self._kind.__module__}.{self._kind.__name__}"
            raise UsageError(f"{what}: {entry.value} is no {made}, but {type(row).__name__}")
        return self.setdefault(name, row)

    def names(self) -> list[str]:
        """All of them."""
        return list(dict.fromkeys([*self, *entries(self._group)]))

    def told(self) -> str:
        """All names, each with what is said of it; of a broken row, what is wrong."""
        return "; ".join(f"{name}{self._between}{self._says(name)}" for name in self.names())

    def _says(self, name: str) -> str:
        try:
            return str(getattr(self[name], "says", ""))
        except UsageError as error:
            return f"cannot be used ({error})"


def entries(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group, by name."""
    from importlib import metadata  # late: slow to import, and seldom needed

    return {entry.name: entry for entry in metadata.entry_points(group=group)}


def load(entry: EntryPoint, what: str) -> object:
    """What an entry point leads to; UsageError about `what` where it leads nowhere."""
    try:
        return entry.load()
    except Exception as error:  # of whatever the package does
        package = entry.dist.name if entry.dist else "a package"
        raise UsageError(
            f"{what}: {package} has it as {entry.value}, which cannot be imported ({user_code.summary(error)}): mend "
            "or uninstall that package"
        ) from error
