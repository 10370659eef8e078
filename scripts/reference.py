#!/usr/bin/env python3
"""Writes docs/reference.md and its two parts, docs/recipes.md, and the figures that other pages quote.

    python scripts/reference.py

Every flag, binding, exit code and file of a run is described where it is defined: in the flag's help, in the docstring
of the class or function, in `launcher.errors.EXIT_CODES`, in launcher/model_dir/contents.json, and in the first lines
of a recipe. What has no description there is an error here. tests/test_reference.py compares all pages with this.

Figures: see scripts/quotes.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import quotes

from launcher import errors, launch, modes
from launcher.config import bound_types
from launcher.config.gin_files import RECIPES, recipes
from launcher.config.gin_private import internals
from launcher.jobs import backends
from launcher.jobs.drill import rehearsal as drills

ROOT = Path(__file__).resolve().parents[1]

_CONTENTS = json.loads((ROOT / "launcher/model_dir/contents.json").read_text("utf-8"))
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
_ELSEWHERE = ("models", "optimizers", "run")  # rooms whose docstrings say more than a binding needs
_VARIABLES = {
    "LAUNCHER_TRACEBACK": "`1` adds the whole traceback to the message about an error in your own Python.",
    "LAUNCHER_PORT_BASE": "First port of the workers: 20000 under Slurm, 2222 in Kubernetes pods, unless set.",
    "LAUNCHER_SERVICE": "Headless service of the pods, where its name is not the JobSet's.",
    "TF_CONFIG": "Addresses of all workers and the number of this one, as TensorFlow defines it.",
    "TPU_NAME": "What `--tpu` means when the flag is not given.",
    "TFDS_DATA_DIR": "What `--data_dir` means when the flag is not given.",
    "XDG_CACHE_HOME": "Where preflight keeps compiled programs; `~/.cache` unless set.",
}


class Undescribed(Exception):
    """Something that the page would have to describe has no description where it is defined."""


# -------------------------------------------------------------------------------------------------------- the reference


def reference() -> str:
    """The text of docs/reference.md."""
    parts = [
        _MADE,
        "# Reference\n",
        "Flags, exit codes, files of a run, environment variables and bindings, as the code describes them.\n",
        "- [Flags of launcher.main](reference_flags.md#flags-of-launchermain): one process, one `--mode`\n"
        "- [Flags of launcher.launch](reference_flags.md#flags-of-launcherlaunch): a job of several processes\n"
        "- [Bindings](reference_bindings.md): what a recipe may bind\n"
        "- [Exit codes](#exit-codes), [files of a run](#files-of-a-run),\n"
        "  [environment variables](#environment-variables), [other programs](#other-programs)\n",
        "## Exit codes\n",
        table(("code", "`launcher.main`", "`launcher.launch`"), _exit_codes()),
        "## Files of a run\n",
        "What `--model_dir` receives. Most of them are there only when there is something to say.\n",
        items((code(name), sentence(says)) for name, says in _CONTENTS.items()),
        "## Environment variables\n",
        "Beside those of TensorFlow, NCCL, Slurm and Kubernetes:\n",
        items(_variables()),
        "## Other programs\n",
        "Each says with `--help` what it is for; the shell scripts show with `--dry_run` what they would run.\n",
        f"{listed(_programs())}.\n",
    ]
    return "\n".join(parts)


def flags_page() -> str:
    """The text of docs/reference_flags.md."""
    return "\n".join([_MADE, "# Flags\n", *_flags_of_main(), *_flags_of_launch()])


def bindings_page() -> str:
    """The text of docs/reference_bindings.md."""
    return "\n".join([_MADE, *_bindings()])


def _flags_of_main() -> Iterator[str]:
    values = modes.define_flags()
    common = [field.name for field in dataclasses.fields(modes.Request)]
    yield "## Flags of launcher.main\n"
    yield (
        "`python -m launcher.main`, or `launcher` once it is installed. A flag is written `--name=value`, a switch\n"
        "`--name` or `--noname`.\n"
    )
    yield "### In every mode\n"
    yield flag_list(values, [*common, "version", "help"])
    flags_of: dict[tuple[str, ...], str] = {}  # modes with the same flags share a list
    for mode in modes.MODES.values():
        yield f"### --mode={mode.name}\n"
        yield (sentence(mode.says) + ("" if mode.needs_recipe else " It needs no recipe.") + "\n")
        own = tuple(mode.own_flags)
        if own in flags_of:
            yield f"Its flags are those of `--mode={flags_of[own]}`.\n"
        elif own:
            yield flag_list(values, own)
            flags_of[own] = mode.name
        for instead, names in _grouped(mode.refuses):
            yield f"Refuses {listed(code(f'--{name}') for name in names)}: this mode {instead}.\n"


def _flags_of_launch() -> Iterator[str]:
    values = launch.define_flags()
    apart = {*backends.FLAGS, *drills.FLAGS, "dry_run", "version", "help"}
    yield "## Flags of launcher.launch\n"
    yield (
        "`python -m launcher.launch`, or `launcher-jobs` once it is installed. It takes the flags of `launcher.main`\n"
        "as well, for the workers.\n"
    )
    yield flag_list(values, [name for name in launch.SHOWN_FLAGS if name not in apart])
    yield "### Drills\n"
    yield flag_list(values, drills.FLAGS)
    readers = {
        name: tuple(one for one, kind in backends.KINDS.items() if name in kind.flags) for name in backends.FLAGS
    }
    for kinds in sorted(set(readers.values()), key=lambda kinds: (len(kinds), list(backends.KINDS).index(kinds[0]))):
        yield f"### For --backend={', '.join(kinds)}\n"
        yield flag_list(values, [name for name in backends.FLAGS if readers[name] == kinds])


def flag_list(values: Any, names: Iterable[str]) -> str:
    rows = []
    for name in names:
        usage, text = modes.described(values[name])
        if not text.strip():
            raise Undescribed(f"--{name} has no help")
        if name == "mode":
            usage, text = "--mode=MODE", f"What to do; each mode is described below. Default: {values['mode'].default}."
        rows.append((code(usage), sentence(re.sub(r"^(For --mode|With --backend)=[\w ]+: ", "", text))))
    return items(rows)


def _exit_codes() -> Iterator[tuple[str, str, str]]:
    for number, says in launch.EXIT_CODES.items():
        yield str(number), errors.EXIT_CODES.get(number, ""), says
    yield "130", "interrupted by Ctrl-C", ""


def _variables() -> Iterator[tuple[str, str]]:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "launcher").rglob("*.py"))
    for name, says in _VARIABLES.items():
        if f'"{name}"' not in source:
            raise Undescribed(f"{name}: nothing in launcher/ reads it any more; remove it from scripts/reference.py")
        yield code(name), says


def _programs() -> Iterator[str]:
    yield code("python -m launcher.data.prepare NAME")
    yield from (code(f"scripts/{path.name}") for path in sorted((ROOT / "scripts").glob("*.s[hb]*")))


# ------------------------------------------------------------------------------------------------------------- bindings


def _bindings() -> Iterator[str]:
    from launcher.run import loading  # imports TensorFlow

    loading.import_builtins()
    found = {
        selector: made.wrapped
        for selector, made in internals().registry.items()
        if re.match(r"launcher\.(?!gin_configs)", _source(made.wrapped)) and not selector.startswith("keras.")
    }
    yield "# Bindings\n"
    yield (
        "What a recipe binds, as in `train.steps = 300`. [gin.md](gin.md) describes the language.\n"
        "`@name` stands for something else that is listed here, or that a module of your own defines.\n"
    )
    by_room: dict[str, list[str]] = {}
    for selector, target in found.items():
        by_room.setdefault(_room(_source(target)), []).append(selector)
    order = ["run", "tasks", "models", "data", "optimizers", "step", "watch", "reporting"]
    for room in sorted(by_room, key=lambda room: (order.index(room) if room in order else len(order), room)):
        yield f"## {_title(room)}\n"
        selectors = sorted(by_room[room], key=lambda one: (not one.endswith(".train"), one))
        bindings = {
            selector: arguments(internals().registry.minimal_selector(selector), found[selector])
            for selector in selectors
        }
        shared = _shared(bindings.values())
        if shared:
            yield "### In several of them\n"
            yield items(shared.items(), swapped=True)
        for selector in selectors:
            yield from configurable(internals().registry.minimal_selector(selector), found[selector], shared=shared)
    yield "## Of Keras\n"
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
    return parts[1] if len(parts) > 1 else parts[0]


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


def configurable(name: str, target: Any, shared: Mapping[str, Sequence[str]] = {}) -> Iterator[str]:
    """A heading, the docstring's text, and what is bound; of some rooms the first paragraph alone."""
    text, _ = documented(target)
    own = {about: names for about, names in arguments(name, target).items() if names[0] not in shared.get(about, ())}
    if not text:
        raise Undescribed(f"{_source(target)}.{name} has no docstring")
    yield f"### {name}\n"
    yield f"{text.split(chr(10) * 2)[0] if _room(_source(target)) in _ELSEWHERE else text}\n"
    if own:
        yield items(own.items(), swapped=True)


def arguments(name: str, target: Any) -> dict[str, list[str]]:
    """What is said of the arguments of a name, default included, with the bindings that it is said of.

    Arguments that are described together, and alike, share an entry. What several names of a module share may stand in
    the module's docstring.
    """
    described = documented(sys.modules.get(_source(target)))[1]
    for one in reversed(inspect.getmro(target) if inspect.isclass(target) else (target,)):
        described |= documented(one)[1]  # a subclass need not say again what its base says
    parameters, _ = bound_types.parameters(target)
    missing = [one for one in parameters if one not in described]
    if missing:
        raise Undescribed(f"{_source(target)}.{name}: its docstring does not describe {listed(missing)}")
    entries: dict[str, list[str]] = {}
    for one, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and _room(_source(target)) != "data":
            continue  # given by the task: nobody binds it
        default, kind = _default(target, one, parameter), _kind(target, one, parameter)
        entries.setdefault(f"{default}{f' ({code(kind)})' if kind else ''}: {described[one]}", []).append(
            f"{name}.{one}"
        )
    return entries


def _shared(bindings: Iterable[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    """Of the names of a room, the entries that several of them have with one argument name and the same words."""
    together: dict[tuple[str, str], list[list[str]]] = {}
    for entries in bindings:
        for about, names in entries.items():
            arguments_of = listed(name.rpartition(".")[2] for name in names)
            together.setdefault((about, arguments_of), []).append(names)
    shared: dict[str, list[str]] = {}
    for (about, _), groups in together.items():
        if len(groups) > 1:
            shared.setdefault(about, []).extend(name for names in groups for name in names)
    return shared


def items(pairs: Iterable[tuple[Any, Any]], swapped: bool = False) -> str:
    """A list, an item a line: a name and what it is, or swapped, what several names are."""
    if not swapped:
        return "".join(f"- {name}: {says}\n" for name, says in pairs)
    return "".join(f"- {listed(map(code, names))}{about}\n" for about, names in pairs)


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
    value = _value(target, name, parameter)
    if value is inspect.Parameter.empty:
        return ", or behind the colon of a name"
    return ", **required**" if value is gin.REQUIRED else f" = {code(repr(value))}"


def _kind(target: Any, name: str, parameter: bound_types.Parameter) -> str:
    """The annotation of an argument, where its default does not show it."""
    value, text = _value(target, name, parameter), re.sub(r" \| None$", "", parameter.text)
    shown = type(value).__name__ == text or value not in (None, gin.REQUIRED, inspect.Parameter.empty, "auto")
    return "" if shown or re.search(r"Any|Callable|^[A-Z]\w+$", text) else text


def _value(target: Any, name: str, parameter: bound_types.Parameter) -> Any:
    if parameter.default is not inspect.Parameter.empty and dataclasses.is_dataclass(target):
        (field,) = (field for field in dataclasses.fields(target) if field.name == name)
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
    return parameter.default


# -------------------------------------------------------------------------------------------------------------- recipes


def recipes_page() -> str:
    """The text of docs/recipes.md."""
    purposes = dict(recipes())
    experiments = [name for name in sorted(purposes) if name.startswith("experiment_")]
    parts = [
        _MADE,
        "# Recipes\n",
        "A recipe is a gin file in `gin_configs/`. This lists them, trains one, and trains it with another value:\n",
        "    python -m launcher.main\n"
        "    python -m launcher.main --gin_file=resnet_cpu.gin\n"
        "    python -m launcher.main --gin_file=resnet_cpu.gin --gin_param='train.epochs = 2' --model_dir=runs/short\n",
        "Each begins with how its data is prepared, its hardware, what it reaches where that is known, and what is\n"
        "often overridden. One of your own begins with `include` of one of these ([gin](gin.md)); for your own\n"
        "images and texts see [data](own_data.md).\n",
        items((_recipe(name), purposes[name]) for name in sorted(purposes) if name not in experiments),
        "Made for [laboratory notes on mixed precision](../benchmarks/notes/mixed_precision.md):\n",
        items((_recipe(name), purposes[name]) for name in experiments),
    ]
    return "\n".join(parts)


def _recipe(name: str) -> str:
    return f"[{name}](../{os.path.relpath(RECIPES / name, ROOT)})"


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


PAGES = {
    "docs/reference.md": reference,
    "docs/reference_flags.md": flags_page,
    "docs/reference_bindings.md": bindings_page,
    "docs/recipes.md": recipes_page,
}

if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for page, make in PAGES.items():
        (ROOT / page).write_text(make(), encoding="utf-8")
    for path in quotes.QUOTING:
        path.write_text(quotes.quoted(path.read_text("utf-8")), encoding="utf-8")
