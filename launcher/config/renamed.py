"""Names of the last release that have become others: read for one more release, with a note."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from launcher.config.gin_files import Binding

RENAMED: Mapping[str, str] = {
    "train.clip_global_norm": "Clipping.global_norm",
    "train.clip_value": "Clipping.value",
    "train.clip_layer_norm": "Clipping.layer_norm",
    "train.clip_adaptive": "Clipping.adaptive",
    "train.start_from": "StartFrom.path",
    "train.start_which": "StartFrom.which",
    "train.start_averaged": "StartFrom.averaged",
    "train.start_optimizer": "StartFrom.optimizer",
    "train.start_allow": "StartFrom.allow",
    "train.checkpoint_every_minutes": "Checkpoints.every_minutes",
    "train.keep_checkpoints": "Checkpoints.keep",
    "train.keep_checkpoint_every_hours": "Checkpoints.keep_every_hours",
    "train.asynchronous_checkpoints": "Checkpoints.asynchronous",
    "train.on_checkpoint_error": "Checkpoints.on_error",
    "train.on_changed_data": "Checkpoints.on_changed_data",
    "train.save_model": "Checkpoints.save_model",
}


def renamed(binding: Binding) -> Binding:
    """The binding under the name that it has now."""
    new = RENAMED.get(f"{binding.selector.rpartition('.')[2]}.{binding.arg}")
    if new is None:
        return binding
    selector, _, arg = new.partition(".")
    return dataclasses.replace(binding, selector=selector, arg=arg, old_name=binding.name)


def grouped(settings: Mapping[str, Any], groups: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Keyword arguments for `train` in which those with old names are in the groups; these say what makes each."""
    kept = {name: value for name, value in settings.items() if f"train.{name}" not in RENAMED}
    group_of = {make.__name__: name for name, make in groups.items()}
    for name in settings.keys() - kept.keys():
        selector, _, arg = RENAMED[f"train.{name}"].partition(".")
        group = group_of[selector]
        kept[group] = {**kept.get(group, {}), arg: settings[name]}
    return kept
