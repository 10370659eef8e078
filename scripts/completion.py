#!/usr/bin/env python3
"""Writes completions/, by which bash and zsh complete flags and their values, from the flags as they are defined.

    python scripts/completion.py

A wheel installs them into share/, where both shells look. tests/scripts/test_completion.py compares them with this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import absl.flags

from launcher import launch, modes
from launcher.config.gin_files import recipes

ROOT = Path(__file__).resolve().parents[1] / "completions"
_MADE = "# Written by scripts/completion.py; do not edit."
_FOLDERS = ("model_dir", "data_dir", "export_dir", "compile_cache", "preflight_cache", "run", "drill_reference")
_FILES = ("input", "output", "hostfile", "overlay")

_BASH = """\
{made}
_{name}() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" word value prefix=""
  word="${{line##*[[:space:]]}}"
  value="${{word#*=}}"
  [[ "$COMP_WORDBREAKS" == *=* ]] || prefix="${{word%%=*}}="
  COMPREPLY=()
  case "$word" in
{cases}
    --*=*) compopt -o filenames 2>/dev/null && mapfile -t COMPREPLY < <(compgen -f -P "$prefix" -- "$value") ;;
    -*)
      mapfile -t COMPREPLY < <(compgen -W "{flags}" -- "$word")
      [[ ${{#COMPREPLY[@]}} == 1 && "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace 2>/dev/null
      ;;
  esac
  return 0
}}
complete -F _{name} {command}
"""
_CHOICES = '    --{flag}=*) mapfile -t COMPREPLY < <(compgen -P "$prefix" -W "{choices}" -- "$value") ;;'
_PATHS = """\
    --{flag}=*)
      compopt -o filenames 2>/dev/null
      mapfile -t COMPREPLY < <(compgen -P "$prefix" {how} -- "$value" | sort -u)
      ;;"""

_ZSH = """\
#compdef launcher launcher-jobs
{made}
_launcher_recipes() {{
  _alternative 'recipes:recipe:({recipes})' 'files:file:_files'
}}
case $service in
  launcher)
    _arguments -S \\
{launcher}
    ;;
  launcher-jobs)
    _arguments -S \\
{jobs}
    ;;
esac
"""


def programs() -> dict[str, dict[str, Any]]:
    """The flags of each command, by name."""
    workers, job = modes.define_flags(), launch.define_flags()
    own = {name: workers[name] for name in workers if name != workers[name].short_name}
    return {"launcher": own, "launcher-jobs": {**{name: job[name] for name in launch.SHOWN_FLAGS}, **own}}


def _choices(flag: Any) -> list[str]:
    table = getattr(flag.parser, "table", None)
    return [*(table.names() if table else getattr(flag.parser, "enum_values", None) or ())]


def _names() -> str:
    return " ".join(name for name, _ in recipes())


def bash(command: str) -> str:
    """The text of completions/bash/COMMAND."""
    flags, cases = programs()[command], []
    for name, flag in flags.items():
        if choices := _choices(flag):
            cases.append(_CHOICES.format(flag=name, choices=" ".join(choices)))
        elif name == "gin_file":
            cases.append(_PATHS.format(flag=name, how=f'-W "{_names()}" -f'))
        elif name in _FOLDERS:
            cases.append(_PATHS.format(flag=name, how="-d"))
    written = " ".join(f"--{name}{'' if flag.boolean else '='}" for name, flag in flags.items())
    name = command.replace("-", "_")
    return _BASH.format(made=_MADE, name=name, command=command, cases="\n".join(cases), flags=written)


def zsh() -> str:
    """The text of completions/zsh/_launcher."""
    written = {command: " \\\n".join(_specs(flags)) for command, flags in programs().items()}
    return _ZSH.format(made=_MADE, recipes=_names(), launcher=written["launcher"], jobs=written["launcher-jobs"])


def _specs(flags: dict[str, Any]) -> Iterator[str]:
    for name, flag in flags.items():
        text = re.sub(r"^(For --mode|With --backend)=[\w ]+: ", "", modes.described(flag)[1])
        says = re.split(r"[;:.,]( |$)", text)[0]  # the shell shows it beside the flag
        says = re.sub(r"([\[\]:\\])", r"\\\1", says).replace("'", "'\\''")
        if flag.boolean:
            yield f"      '--{name}[{says}]'"
            continue
        if choices := _choices(flag):
            action = f"({' '.join(choices)})"
        elif name == "gin_file":
            action = "_launcher_recipes"
        else:
            action = "_files -/" if name in _FOLDERS else "_files" if name in _FILES else " "
        repeats = "*" if isinstance(flag, absl.flags.MultiFlag) else ""
        yield f"      '{repeats}--{name}=[{says}]:{name}:{action}'"


def files() -> dict[Path, str]:
    """The text of each file."""
    return {
        ROOT / "bash" / "launcher": bash("launcher"),
        ROOT / "bash" / "launcher-jobs": bash("launcher-jobs"),
        ROOT / "zsh" / "_launcher": zsh(),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
