"""Names of the last release that have become others: read for one more release, with a note."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.config.gin_files import Binding, Import

RENAMED: Mapping[str, str] = {}
"""Old names and new ones, such as "train.clip_value": "Clipping.value"."""


def renamed(statements: Sequence[Binding | Import]) -> list[Binding | Import]:
    """The statements with each binding under the name that it has now."""
    return [_renamed(one) if isinstance(one, Binding) else one for one in statements]


def _renamed(binding: Binding) -> Binding:
    new = RENAMED.get(f"{binding.selector.rpartition('.')[2]}.{binding.arg}")
    if new is None:
        return binding
    selector, _, arg = new.partition(".")
    return dataclasses.replace(binding, selector=selector, arg=arg, old_name=binding.name)


def arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `train` by their names of now."""
    return {RENAMED.get(f"train.{name}", f"train.{name}").partition(".")[2]: one for name, one in settings.items()}
