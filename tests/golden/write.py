#!/usr/bin/env python3
"""Writes the text files beside this program, which test_golden.py compares with the code as it is.

    python tests/golden/write.py                     # all of them
    python tests/golden/write.py surface recipes     # some: surface, recipes, losses

recipes/NAME.txt has what a recipe binds, and the defaults of all that it refers to. losses/NAME.txt has the losses of
its first twenty steps, on data and sizes that a test can afford. surface.txt has the flags and the bindings of a run.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "support")]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import gin
import text_run
from building import build_session

from launcher import launch, modes
from launcher.config import bound_types, gin_bindings, gin_files
from launcher.config.gin_files import names_in
from launcher.config.gin_private import internals
from launcher.run import loading

STEPS = 20

# ------------------------------------------------------------------------------------------------------------- recipes


def resolved(recipe: str) -> str:
    """What a recipe binds and, of all that this refers to, the defaults: a line each, in the order of names."""
    loading.import_builtins()
    gin_bindings.load([f"{recipe}.gin"])
    lines, referred = {}, {"train"}
    for (scope, selector, argument), binding in gin_bindings.loaded.bound.items():
        name = f"{gin_bindings.short_name(selector)}.{argument}"
        is_macro = selector == gin_bindings.MACRO
        lines[scope if is_macro else "/".join(filter(None, [scope, name]))] = repr(binding.value)
        referred |= {name.selector for name in names_in(binding.value, "@")}
    for selector in referred:
        configurable = internals().registry.get_match(selector)
        for name, default in _defaults(configurable.wrapped):
            lines.setdefault(f"{gin_bindings.short_name(configurable.selector)}.{name}", f"{default}  # default")
    return "".join(f"{name} = {value}\n" for name, value in sorted(lines.items()))


def _defaults(target: Any) -> Iterator[tuple[str, str]]:
    if not re.match(r"launcher\.(?!gin_configs)", inspect.unwrap(target).__module__):
        return  # Keras's own may change with its version
    factories = {}
    if dataclasses.is_dataclass(target):
        fields = dataclasses.fields(target)
        factories = {one.name: one.default_factory for one in fields if callable(one.default_factory)}
    for name, parameter in bound_types.parameters(target)[0].items():
        default = factories[name]() if name in factories else parameter.default
        if default is not inspect.Parameter.empty and default is not gin.REQUIRED:
            yield name, f"{default.__module__}.{default.__qualname__}" if inspect.isroutine(default) else repr(default)


# -------------------------------------------------------------------------------------------------------------- losses


def _corpus(folder: Path) -> list[str]:
    text_run.write_corpus(folder)
    return _of_data(text_run.corpus_bindings(folder))


def _pairs(folder: Path) -> list[str]:
    text_run.write_pairs(folder)
    return _of_data(text_run.pair_bindings(folder))


def _of_data(bindings: Iterable[str]) -> list[str]:
    """The network and the run stay the recipe's own."""
    others = ("train.", "transformer.", "language_model.")
    return [binding for binding in bindings if not binding.startswith(others)]


LOSSES: Mapping[str, Callable[[Path], list[str]]] = {
    "experiment_underflow": lambda folder: [],
    "lm_cpu": _corpus,
    "lstm_cpu": _corpus,
    "mlp_fashion": lambda folder: ["image_data.name = 'digits'", "mlp.units = 256"],
    "resnet_cpu": lambda folder: ["train.global_batch_size = 32"],
    "transformer_cpu": _pairs,
}
"""What is bound in place of data that is large, to be downloaded, or another on another machine."""


def losses(recipe: str, folder: Path) -> list[float]:
    """The losses of the first steps of a recipe, on one replica; its data is in `folder`."""
    before = os.environ.get("TFDS_DATA_DIR")
    os.environ["TFDS_DATA_DIR"] = str(folder / "data")
    try:
        made = build_session(f"{recipe}.gin", LOSSES[recipe](folder))
        made.plan.data.check()
        records = made.trainer.train(made.trainer.batches(made.plan.data), STEPS)
    finally:
        if before is None:
            del os.environ["TFDS_DATA_DIR"]
        else:
            os.environ["TFDS_DATA_DIR"] = before
    return [float(loss) for loss in records.loss / records.weight]


# ------------------------------------------------------------------------------------------------------------- surface


def surface() -> str:
    """Flags of both programs, `train.` bindings and those of the groups that they take: a line each."""
    loading.import_builtins()
    shared = [field.name for field in dataclasses.fields(modes.Request)]
    own = [name for mode in modes.MODES.values() for name in mode.own_flags]
    lines = {f"launcher.main --{name}" for name in (*shared, *own)}
    lines |= {f"launcher.launch --{name}" for name in launch.SHOWN_FLAGS}
    for name, parameter in bound_types.parameters(internals().registry.get_match("train").wrapped)[0].items():
        lines.add(f"train.{name}")
        for group in (parameter.hint, *typing.get_args(parameter.hint)):
            if dataclasses.is_dataclass(group):
                lines |= {f"train.{name}: {group.__name__}.{field.name}" for field in dataclasses.fields(group)}
    return "".join(f"{line}\n" for line in sorted(lines))


# ---------------------------------------------------------------------------------------------------------------- files


def recipes() -> list[str]:
    return [name.removesuffix(".gin") for name, _ in gin_files.recipes()]


def write_surface() -> None:
    (HERE / "surface.txt").write_text(surface(), "utf-8")


def write_recipes() -> None:
    _replace(HERE / "recipes", {name: resolved(name) for name in recipes()})


def write_losses() -> None:
    texts = {}
    for name in LOSSES:
        with tempfile.TemporaryDirectory() as folder:
            texts[name] = "".join(f"{loss:.8g}\n" for loss in losses(name, Path(folder)))
    _replace(HERE / "losses", texts)


def _replace(folder: Path, texts: Mapping[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.txt"):
        path.unlink()
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, "utf-8")


WRITERS = {"surface": write_surface, "recipes": write_recipes, "losses": write_losses}

if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - set(WRITERS)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: not one of {', '.join(WRITERS)}")
    for part in sys.argv[1:] or WRITERS:
        WRITERS[part]()
