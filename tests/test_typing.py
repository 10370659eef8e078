"""Types of `launcher.fit`: what the recipe takes, and what type checkers say of a program beside an installed wheel."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import built
import pytest
from places import ROOT

from launcher.modes import fit_settings
from launcher.modes.fit import fit
from launcher.run.programs import GROUPS
from launcher.run.recipe import Recipe

PROGRAM = ROOT / "tests" / "typed" / "program.py"
MISTAKES = [number for number, line in enumerate(PROGRAM.read_text().splitlines(), 1) if "# type: ignore" in line]


def test_settings_are_those_of_the_recipe_with_its_types():
    settings = typing.get_type_hints(fit_settings.FitSettings)
    recipe = typing.get_type_hints(Recipe)
    assert settings.keys() == recipe.keys() - inspect.signature(fit).parameters.keys() - {"task"}
    for name, hint in settings.items():
        if name not in GROUPS:
            assert hint == recipe[name], name
            continue
        group, of_dict = typing.get_args(hint)
        assert group is GROUPS[name] is recipe[name]
        assert typing.get_type_hints(of_dict) == typing.get_type_hints(group), name
        assert of_dict.__annotations__.keys() == {field.name for field in dataclasses.fields(group)}


def written(folder: Path, *, examples: bool) -> list[str]:
    """Names of users' programs in a folder: tests/typed/program.py without its `type: ignore`, and perhaps examples."""
    (folder / PROGRAM.name).write_text(re.sub(r"  # type: ignore.*", "", PROGRAM.read_text()))
    more = sorted((ROOT / "examples").glob("*.py")) if examples else []
    return [PROGRAM.name, *(Path(shutil.copy(path, folder)).name for path in more)]


@pytest.mark.slow
@pytest.mark.parametrize("examples", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_pyright_knows_the_installed_wheel(wheel, tmp_path, examples):
    pytest.importorskip("pyright")
    python, programs = built.environment(tmp_path / "env", wheel), written(tmp_path, examples=examples)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python), *programs]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    at = {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in found if one["severity"] == "error"}
    assert {line for name, line in at if name == PROGRAM.name} == {*MISTAKES}, done.stdout
    # Of the examples it has to say what TensorFlow's and Keras's own annotations are short of.
    lines = {name: (tmp_path / name).read_text().splitlines() for name in programs[1:]}
    calls = {(name, at) for name in lines for at, line in enumerate(lines[name], 1) if "launcher." in line}
    assert bool(calls) == examples and not calls & at, done.stdout


@pytest.mark.nightly  # pyproject.toml has the same programs checked beside the checkout
def test_mypy_knows_the_installed_wheel(wheel, tmp_path):
    python, programs = built.environment(tmp_path / "env", wheel), written(tmp_path, examples=True)
    options = ["--config-file=", "--ignore-missing-imports", "--check-untyped-defs", "--cache-dir", str(tmp_path / "c")]
    command = [sys.executable, "-m", "mypy", *options, "--python-executable", str(python), *programs]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = re.findall(r"^(\S+):(\d+): error", done.stdout, re.MULTILINE)
    assert lines == [(PROGRAM.name, str(line)) for line in MISTAKES], done.stdout + done.stderr
