#!/usr/bin/env python3
"""Writes docs/reference.md and docs/recipes.md from the code and the recipes.

    python scripts/reference.py

Every flag, binding, exit code and file of a run is described where it is defined: in the flag's help, in the docstring
of the class or function, in `launcher.errors.EXIT_CODES`, in `launcher.model_dir.CONTENTS`, and in the first lines of a
recipe. What has no description there is an error here. tests/test_reference.py compares both pages with this.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin

from launcher import errors, launch, model_dir, modes
from launcher.config import bound_types
from launcher.config.gin_files import RECIPES, find_file, read_file, recipes
from launcher.config.gin_private import internals
from launcher.jobs import backends
from launcher.jobs.drill import plan as drills

ROOT = Path(__file__).resolve().parents[1]

_MADE = "<!-- Written by scripts/reference.py; do not edit. -->\n"
_ENTRY = re.compile(r"((?:\w+, )*\w+): ?(.*)")
_KERAS = (
    (
        "keras.optimizers",
        "RMSprop",
        "every optimizer, with Keras's arguments and defaults; the learning rate may also be a schedule above",
    ),
    ("keras.optimizers.schedules", "CosineDecay", "every schedule, for these optimizers"),
    ("keras.losses", "Huber", "every loss, for a task of your own that takes one"),
)
_COMMAND = re.compile(
    r"python -m launcher\.data\.prepare \S+(?: --\w+=\w+)?|python \w+/\w+\.py(?: --[\w=.]+)*"
    r"|pip install -e '[^']+'|--\w+=\"[^\"]+\"|--\w+=\w+"
)
_LABELS = (
    "Prepare the data once, into a bucket",
    "Prepare the data once",
    "Hardware",
    "Duration",
    "Expected",
    "Needs the extra",
)
_OVERRIDDEN = "Often overridden"


class Undescribed(Exception):
    """Something that the page would have to describe has no description where it is defined."""


# -------------------------------------------------------------------------------------------------------- the reference


def reference() -> str:
    """The text of docs/reference.md."""
    parts = [
        _MADE,
        "# Reference\n",
        "Every flag, binding, exit code and file of a run, as the code describes them.\n",
        "- [Flags of launcher.main](#flags-of-launchermain): one process, one `--mode`\n"
        "- [Flags of launcher.launch](#flags-of-launcherlaunch): a job of several processes\n"
        "- [Exit codes](#exit-codes)\n- [Files of a run](#files-of-a-run)\n"
        "- [Bindings](#bindings): what a recipe may bind\n",
        *_flags_of_main(),
        *_flags_of_launch(),
        "## Exit codes\n",
        table(("code", "`launcher.main`", "`launcher.launch`"), _exit_codes()),
        "## Files of a run\n",
        "What `--model_dir` receives. Most of them are there only when there is something to say.\n",
        table(("name", "what it holds"), ((code(name), sentence(says)) for name, says in model_dir.CONTENTS.items())),
        *_bindings(),
    ]
    return "\n".join(parts)


def _flags_of_main() -> Iterator[str]:
    values = modes.define_flags()
    common = [field.name for field in dataclasses.fields(modes.Request)]
    yield "## Flags of launcher.main\n"
    yield (
        "`python -m launcher.main`, or `launcher` once it is installed. A flag is written `--name=value`, a switch\n"
        "`--name` or `--noname`.\n"
    )
    yield "### In every mode\n"
    yield flag_table(values, [*common, "version", "help"])
    for mode in modes.MODES.values():
        yield f"### --mode={mode.name}\n"
        yield (sentence(mode.purpose) + ("" if mode.needs_recipe else " It needs no recipe.") + "\n")
        if mode.own_flags:
            yield flag_table(values, mode.own_flags)
        for instead, names in _grouped(mode.refuses):
            yield f"Refuses {listed(code(f'--{name}') for name in names)}: this mode {instead}.\n"


def _flags_of_launch() -> Iterator[str]:
    values = launch.define_flags()
    apart = {*backends.FLAGS, *drills.FLAGS}
    yield "## Flags of launcher.launch\n"
    yield (
        "`python -m launcher.launch`, or `launcher-jobs` once it is installed. It takes the flags of `launcher.main`\n"
        "as well, for the workers.\n"
    )
    yield flag_table(values, [name for name in launch.SHOWN_FLAGS if name not in apart])
    yield "### Drills\n"
    yield flag_table(values, drills.FLAGS)
    readers = {
        name: tuple(one for one, kind in backends.KINDS.items() if name in kind.flags) for name in backends.FLAGS
    }
    for kinds in sorted(set(readers.values()), key=lambda kinds: (len(kinds), list(backends.KINDS).index(kinds[0]))):
        yield f"### For --backend={', '.join(kinds)}\n"
        yield flag_table(values, [name for name in backends.FLAGS if readers[name] == kinds])


def flag_table(values: Any, names: Iterable[str]) -> str:
    rows = []
    for name in names:
        usage, text = modes.described(values[name])
        if not text.strip():
            raise Undescribed(f"--{name} has no help")
        if name == "mode":
            usage, text = "--mode=MODE", f"What to do; each mode is described below. Default: {values['mode'].default}."
        rows.append((code(usage), sentence(re.sub(r"^(For --mode|With --backend)=[\w ]+: ", "", text))))
    return table(("flag", "meaning"), rows)


def _exit_codes() -> Iterator[tuple[str, str, str]]:
    for number, says in launch.EXIT_CODES.items():
        yield str(number), errors.EXIT_CODES.get(number, ""), says


# ------------------------------------------------------------------------------------------------------------- bindings


def _bindings() -> Iterator[str]:
    from launcher.run import loading  # imports TensorFlow

    loading.import_builtins()
    found = {
        selector: made.wrapped
        for selector, made in internals().registry.items()
        if _source(made.wrapped).split(".")[0] in ("launcher", "models") and not selector.startswith("keras.")
    }
    yield "## Bindings\n"
    yield (
        "What a recipe binds, as in `train.steps = 300`. [gin.md](gin.md) describes the language.\n"
        "`@name` stands for something else that is listed here, or that a module of your own defines.\n"
    )
    by_room: dict[str, list[str]] = {}
    for selector, target in found.items():
        by_room.setdefault(_room(_source(target)), []).append(selector)
    order = ["run", "tasks", "models", "data", "optimizers", "step", "watch", "reporting"]
    for room in sorted(by_room, key=lambda room: (order.index(room) if room in order else len(order), room)):
        yield f"### {_title(room)}\n"
        for selector in sorted(by_room[room], key=lambda one: (not one.endswith(".train"), one)):
            yield from configurable(selector.rsplit(".", 1)[-1], found[selector])
    yield "### Of Keras\n"
    rows = []
    for module, example, says in _KERAS:
        if not internals().registry.get(f"{module}.{example}"):
            raise Undescribed(f"{module}.{example} is not known to gin")
        rows.append((code(f"@{module}.NAME"), code(f"@{module}.{example}"), sentence(says)))
    yield table(("name", "such as", "what"), rows)


def _source(target: Any) -> str:
    return getattr(inspect.unwrap(target), "__module__", "") or ""


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "launcher" else parts[0]


def _title(room: str) -> str:
    titles = {
        "run": "A run",
        "tasks": "Tasks",
        "models": "Models",
        "data": "Data",
        "optimizers": "Optimizers and learning rates",
        "step": "Loss scale and penalties",
        "watch": "Precision watch",
        "reporting": "Sinks",
        "machine": "GPUs",
        "verify": "Verification",
        "precision_report": "Precision report",
    }
    if room not in titles:
        raise Undescribed(f"launcher/{room} has names that recipes bind: add its title to scripts/reference.py")
    return titles[room]


def configurable(name: str, target: Any) -> Iterator[str]:
    text, described = documented(target)
    parameters, _ = bound_types.parameters(target)
    missing = [one for one in parameters if one not in described]
    if missing or not text:
        raise Undescribed(f"{_source(target)}.{name}: its docstring does not describe {listed(missing) or 'it'}")
    yield f"#### {name}\n"
    yield f"{text}\n"
    rows: dict[tuple[str, ...], list[str]] = {}  # arguments that are described together, and alike, share a row
    for one, parameter in parameters.items():
        about = (_default(target, one, parameter), code(parameter.text), described[one])
        rows.setdefault(about, []).append(code(f"{name}.{one}"))
    yield table(("binding", "default", "type", "meaning"), ((listed(names), *about) for about, names in rows.items()))


def documented(target: Any) -> tuple[str, dict[str, str]]:
    """A docstring's text before its Args or Attributes, and what these say of each name."""
    paragraphs, _, rest = re.sub(r"^(Args|Attributes):\n", "\0", inspect.getdoc(target) or "", flags=re.M).partition(
        "\0"
    )
    described: dict[str, str] = {}
    names: list[str] = []
    section = re.split(r"^(?=\S)", rest, maxsplit=1, flags=re.MULTILINE)[0]
    for line in textwrap.dedent(section).splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry:
            names = entry[1].split(", ")
            described |= dict.fromkeys(names, entry[2])
        else:
            described |= {name: f"{described[name]} {line.strip()}".strip() for name in names}
    sentences = {name: sentence(text) for name, text in described.items() if text}
    return "\n\n".join(map(_paragraph, filter(None, paragraphs.strip("\n").split("\n\n")))), sentences


def _paragraph(text: str) -> str:
    return f"```text\n{textwrap.dedent(text)}\n```" if text.startswith("    ") else plain(text)


def _default(target: Any, name: str, parameter: bound_types.Parameter) -> str:
    value = parameter.default
    if value is inspect.Parameter.empty:
        return "given by the task"
    if value is gin.REQUIRED:
        return "**required**"
    if dataclasses.is_dataclass(target):
        (field,) = (field for field in dataclasses.fields(target) if field.name == name)
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
    return code(repr(value))


# -------------------------------------------------------------------------------------------------------------- recipes


def recipes_page() -> str:
    """The text of docs/recipes.md."""
    from launcher.run import loading  # imports TensorFlow

    loading.import_builtins()
    names = sorted((name for name, _ in recipes()), key=lambda name: (name.startswith("experiment_"), name))
    purposes = dict(recipes())
    parts = [
        _MADE,
        "# Recipes\n",
        "A recipe is a gin file in `gin_configs/`. This lists them, trains one, and trains it with another value:\n",
        "    python -m launcher.main\n"
        "    python -m launcher.main --gin_file=resnet_cpu.gin\n"
        "    python -m launcher.main --gin_file=resnet_cpu.gin --gin_param='train.epochs = 2' --model_dir=runs/short\n",
        "Every other binding of a recipe can be changed in the same way; the [reference](reference.md#bindings) has\n"
        "all of them. A recipe of your own begins with `include` of one of these, see [gin.md](gin.md).\n"
        "For images and texts of your own, [own_data.md](own_data.md) says what to bind; every image classification\n"
        "set of TFDS works as well: `--gin_param=\"image_data.name = 'tfds:cifar10'\"`.\n",
        table(("recipe", "what it trains"), ((f"[{name}](#{anchor(name)})", purposes[name]) for name in names)),
    ]
    for name in names:
        parts += _recipe(name)
    return "\n".join(parts)


def _recipe(name: str) -> Iterator[str]:
    path = find_file(name, [str(RECIPES)])
    lines = Path(path).read_text("utf-8").split("\n\n")[0].splitlines()
    purpose, *rest = (line.removeprefix("#").strip() for line in lines)
    facts, _, overridden = " ".join(rest).strip().partition(f"{_OVERRIDDEN}: ")
    if not overridden:
        raise Undescribed(f"{name}: its header does not say what is often overridden ('{_OVERRIDDEN}: a, b.')")
    yield f"## {name}\n"
    yield f"{purpose}\n"
    labels = "|".join(_LABELS)
    items = re.split(rf"(?:^|(?<=\s))(?=(?:{labels})\b)", _COMMAND.sub(lambda found: code(found[0]), facts))
    yield "".join(f"- {item.strip()}\n" for item in items if item.strip())
    bound = {statement.name: statement.value for statement in read_file(path, opened=[]) if hasattr(statement, "value")}
    rows = []
    for one in re.split(r", | and ", overridden.rstrip(".")):
        rows.append((code(one), code(repr(bound[one])) if one in bound else _unbound(name, one)))
    yield table(("often overridden", "here"), rows)


def _unbound(recipe: str, binding: str) -> str:
    """The default of what a recipe does not bind."""
    selector, _, name = binding.rpartition(".")
    known = internals().registry.matching_selectors(selector) if selector else []
    parameter = bound_types.parameters(internals().registry[known[0]].wrapped)[0].get(name) if known else None
    if parameter is None:
        raise Undescribed(f"{recipe}: its header names {binding!r}, which nothing takes")
    return f"{code(repr(parameter.default))}, the default"


# ------------------------------------------------------------------------------------------------------------- Markdown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown, with a line below it."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def sentence(text: str) -> str:
    """A text that begins like a sentence, unless it begins with a name, and ends like one."""
    text = text if re.match(r"\w*[._:]\w|\W", text) else text[0].upper() + text[1:]
    return plain(text if text.endswith((".", "!")) else f"{text}.")


def plain(text: str) -> str:
    """A text with no emphasis of Markdown in it."""
    return re.sub(r"(`[^`]*`)|\*", lambda found: found[1] or r"\*", text)


def code(text: str) -> str:
    return f"`{text}`"


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _grouped(refused: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    for instead in dict.fromkeys(refused.values()):
        yield instead, [name for name, says in refused.items() if says == instead]


PAGES = {"docs/reference.md": reference, "docs/recipes.md": recipes_page}

if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for page, make in PAGES.items():
        (ROOT / page).write_text(make(), encoding="utf-8")
