"""Bindings by the names that they had before 1.0: read as what they are now, as recipes and every config.gin have them.

The table has their names, values that are told otherwise now, and what is gone: the value that said nothing, as in a
config.gin, and what says the rest now.
"""

import json
from pathlib import Path
from typing import Any

from launcher.errors import UsageError, deprecation

_TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def is_gone(name: str, value: Any) -> bool:
    """Whether a binding says of what there is no more what was so without it."""
    return name in _TABLE["gone"] and _TABLE["gone"][name][0] == repr(value)


def instead(name: str) -> str:
    """What stands in the place of a binding that is gone, as the end of a message; "" of any other."""
    _, now = _TABLE["gone"].get(name, ("", ""))
    return f"; it is gone since 1.0, and what says it now is {now}" if now else ""


def as_now(name: str, value: Any) -> tuple[str, Any]:
    """The name and the value that a binding has now."""
    value = _TABLE["values"].get(name, {}).get(repr(value), value)
    return _TABLE["names"].get(name, name), value


def of_fit(settings: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any]:
    """Settings of `launcher.fit`, of which `groups` are dicts, by the names they have now; a note tells of others."""
    made: dict[str, Any] = {}
    names = {group.__name__: name for name, group in groups.items()}
    for old, value in settings.items():
        now, value = as_now(f"train.{old}", value)
        group, _, name = now.partition(".")
        if now != f"train.{old}":
            deprecation.tell(old, f"{name!r} in {names[group]}" if group in names else name)
        key, given = (names[group], {name: value}) if group in names else (name, value)
        if key not in made:
            made[key] = given
        elif isinstance(given, dict) and isinstance(made[key], dict) and not made[key].keys() & given.keys():
            made[key] = {**made[key], **given}
        else:
            raise UsageError(
                f"fit: {old} and {key} are given, and say the same: leave out the one of them that is not to hold"
            )
    return made
