"""Names of the last release that have become others: read for one more release, with a note."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from launcher.config.gin_files import Binding, Import, Name

RENAMED: Mapping[str, str] = {
    "train.clip_global_norm": "Clipping.global_norm",
    "train.clip_value": "Clipping.value",
    "train.clip_layer_norm": "Clipping.layer_norm",
    "train.clip_adaptive": "Clipping.adaptive",
    "train.start_from": "StartFrom.path",
    "train.start_which": "StartFrom.which",
    "train.start_averaged": "StartFrom.averaged",
    "train.start_optimizer": "StartFrom.optimizer",
    "train.start_allow": "StartFrom.allow_missing",
    "StartFrom.allow": "StartFrom.allow_missing",
    "train.checkpoint_every_minutes": "Checkpoints.every_minutes",
    "train.keep_checkpoints": "Checkpoints.keep",
    "train.keep_checkpoint_every_hours": "Checkpoints.keep_every_hours",
    "train.asynchronous_checkpoints": "Checkpoints.asynchronous",
    "train.on_checkpoint_error": "Checkpoints.on_error",
    "train.on_changed_data": "Checkpoints.on_changed_data",
    "train.save_model": "Checkpoints.save_model",
    "train.wire_dtype": "train.reduce_dtype",
    "train.loss_pieces": "train.loss_chunks",
    "train.shard_optimizer": "train.shard",
    "train.leave_out": "train.skip_batches",
    "train.max_skips_at_floor": "train.max_consecutive_overflows",
    "Spikes.leave_out": "Spikes.skip_batches",
    "Spikes.most": "Spikes.max_rewinds",
    "DynamicLossScale.floor": "DynamicLossScale.min_scale",
    "DynamicLossScale.ceiling": "DynamicLossScale.max_scale",
    "lars.eeta": "lars.trust_coefficient",
    "language_modelling.continuation_length": "language_modelling.max_new_tokens",
    "language_model.tie_head": "language_model.tie_embeddings",
    "lstm_language_model.tie_head": "lstm_language_model.tie_embeddings",
}

_NEW_VALUES: Mapping[str, Mapping[Any, Any]] = {"train.shard_optimizer": {False: "none", True: "optimizer"}}

RENAMED_MODULES: Mapping[str, str] = {
    f"examples.data.{name}": f"gin_configs.data.{name}" for name in ("help_pages", "python_docs", "spoken_numbers")
}

_SPLITS = ("train_split", "eval_split")
_HELD_OUT = ("eval_files", "eval_share")
_OF_RECORDS = ("num_classes", "features", "first_label", "channels", *_HELD_OUT)

OF_SOURCES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "image_data": {
        "tfds": ("tfds_images", *_SPLITS),
        "fashion_mnist": ("tfds_images", *_SPLITS),
        "folder": ("folder_images", "eval_share", "channels", *_SPLITS),
        "tfrecord": ("record_images", *_OF_RECORDS),
        "array_record": ("record_images", *_OF_RECORDS),
        "synthetic": ("synthetic_images", "num_classes", "train_examples", "eval_examples"),
    },
    "text_pairs": {
        "tfds": ("tfds_pairs", "source_language", "target_language", *_SPLITS),
        "tsv": ("tsv_pairs", "columns", *_HELD_OUT),
        "jsonl": ("jsonl_pairs", "source_language", "target_language", *_HELD_OUT),
        "files": ("file_pairs", "source_file", "target_file", "eval_source_file", "eval_target_file"),
    },
    "text_corpus": {
        "tfds": ("tfds_corpus", "text_feature", *_SPLITS),
        "lines": ("lines_corpus", *_HELD_OUT),
        "jsonl": ("jsonl_corpus", "text_feature", *_HELD_OUT),
        "files": ("file_corpus", "train_file", "eval_file", "documents"),
    },
}
"""By data and the kind that its bound name begins with: the source, and the arguments that the data had for it."""


def renamed(statements: Sequence[Binding | Import]) -> list[Binding | Import]:
    """The statements with each binding and each module of Launcher's under the name that it has now."""
    values = {one.name: one.value for one in statements if isinstance(one, Binding)}

    def new_name(binding: Binding) -> str | None:
        data = binding.selector.rpartition(".")[2]
        name, bound = values.get(f"{data}.name"), values.get(f"{data}.source")
        name = values.get(name.scoped) if isinstance(name, Name) else name
        for kind, (source, *arguments) in OF_SOURCES.get(data, {}).items():
            is_chosen = isinstance(bound, Name) and bound.selector == source
            if name is not None:
                is_chosen = str(name).partition(":")[0] == kind
            if is_chosen and binding.arg in arguments:
                return f"{source}.{binding.arg}"
        return RENAMED.get(f"{data}.{binding.arg}")

    found: list[Binding | Import] = []
    for one in statements:
        if isinstance(one, Import) and one.module in RENAMED_MODULES:
            new_statement = one.statement._replace(module=RENAMED_MODULES[one.module])
            logging.warning("%s: %s is going to end; write %s", one.where, one.text, new_statement.format())
            one = dataclasses.replace(
                one, module=new_statement.module, text=new_statement.format(), statement=new_statement
            )
        if isinstance(one, Binding) and (new := new_name(one)) is not None:
            selector, _, arg = new.partition(".")
            value = _new_value(f"{one.selector.rpartition('.')[2]}.{one.arg}", one.value)
            one = dataclasses.replace(one, selector=selector, arg=arg, value=value, old_name=one.name)
        found.append(one)
    return found


def _new_value(old_name: str, value: Any) -> Any:
    """By the old name, as some values have become others with it."""
    values = _NEW_VALUES.get(old_name, {})
    return values[value] if isinstance(value, bool) and value in values else value


def grouped(settings: Mapping[str, Any], groups: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Keyword arguments for `train` by their names of now, in groups; these say what makes each."""
    kept = {name: value for name, value in settings.items() if f"train.{name}" not in RENAMED}
    group_of = {make.__name__: name for name, make in groups.items()}
    for name in settings.keys() - kept.keys():
        selector, _, arg = RENAMED[f"train.{name}"].partition(".")
        if selector == "train":
            kept[arg] = _new_value(f"train.{name}", settings[name])
        else:
            group = group_of[selector]
            kept[group] = {**kept.get(group, {}), arg: settings[name]}
    return kept
