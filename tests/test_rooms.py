"""The rooms of `launcher`: a map that names each of them, and imports that point down it."""

from __future__ import annotations

import ast
import contextlib
import re

import pytest
from places import ROOT

import launcher

# The map: a name and what it is for. From the door inwards, so whoever imports stands above what it imports.
ROOMS = re.findall(r"^    (\w+) {2,}\S", launcher.__doc__, re.MULTILINE)


def room(path):
    return path.relative_to(ROOT / "launcher").parts[0].removesuffix(".py")


def imported(path):
    """Names of the rooms that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "launcher" and len(parts) > 1 and parts[1] in (*ROOMS, "models", "gin_configs"):
                yield parts[1]


FILES = sorted((ROOT / "launcher").rglob("*.py"))


def test_the_map_names_every_room_and_nothing_else():
    assert sorted(ROOMS) == sorted({room(path) for path in FILES} - {"__init__"})


@pytest.mark.parametrize("name", ROOMS)
def test_imports_point_down_the_map(name):
    below = ROOMS[ROOMS.index(name) :]
    wrong = [
        f"{path.relative_to(ROOT)} imports launcher.{other}"
        for path in FILES
        if room(path) == name
        for other in imported(path)
        if other not in (*below, "models")
    ]
    assert wrong == []


def test_the_recipes_code_stands_above_the_data_as_a_users_does():
    files = sorted((ROOT / "gin_configs").rglob("*.py"))
    below = {*ROOMS[ROOMS.index("data") :], "gin_configs"}
    assert files and {room for path in files for room in imported(path)} - below == set()


def module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_checkers(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_no_files_import_each_other_in_a_circle():
    names = {module(path) for path in FILES}
    graph = {}
    for path in FILES:
        found = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if module(path) == "launcher":  # what checkers alone read there, Python imports when it is first used
            tree.body = [node for node in tree.body if not is_for_checkers(node)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                both = {f"{node.module}.{alias.name}" for alias in node.names}, {node.module}
                found |= next((hits for some in both if (hits := some & names)), set())
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & names
        graph[module(path)] = found - {module(path)}
    with contextlib.suppress(StopIteration):
        while graph:  # takes out what imports nothing that is left
            leaf = next(name for name, found in graph.items() if not found & graph.keys())
            del graph[leaf]
    assert not graph, f"circles among {sorted(graph)}"


def test_models_import_nothing_of_launcher():
    files = sorted((ROOT / "models").rglob("*.py"))
    assert files and [path for path in files if any(imported(path))] == []


@pytest.mark.parametrize("name", ["jobs", "worker", "launch"])
def test_what_supervises_never_imports_tensorflow(name):
    text = "".join(path.read_text(encoding="utf-8") for path in FILES if room(path) == name)
    assert not re.search(r"^\s*(import|from) (tensorflow|keras)\b", text, re.MULTILINE)
