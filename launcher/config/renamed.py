"""Names of the last release that have become others: read for one more release, with a note."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.config.gin_files import Binding, Import

RENAMED: Mapping[str, str] = {"train.shard_optimizer": "train.shard"}
"""Old names and new ones."""

_NEW_VALUES: Mapping[str, Mapping[Any, Any]] = {"train.shard_optimizer": {False: "none", True: "optimizer"}}


def renamed(statements: Sequence[Binding | Import]) -> list[Binding | Import]:
    """The statements with each binding under the name that it has now."""
    return [_renamed(one) if isinstance(one, Binding) else one for one in statements]


def _renamed(binding: Binding) -> Binding:
    old = f"{binding.selector.rpartition('.')[2]}.{binding.arg}"
    if old not in RENAMED:
        return binding
    selector, _, arg = RENAMED[old].partition(".")
    return dataclasses.replace(
        binding, selector=selector, arg=arg, value=_new_value(old, binding.value), old_name=binding.name
    )


def _new_value(old: str, value: Any) -> Any:
    """By the old name, as some values have become others with it."""
    return _NEW_VALUES.get(old, {}).get(value, value) if isinstance(value, bool) else value


def arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `train` by their names and with their values of now."""
    found = {}
    for name, value in settings.items():
        old = f"train.{name}"
        found[RENAMED.get(old, old).partition(".")[2]] = _new_value(old, value)
    return found
