"""What CPython says of itself: the docstrings of its standard library and the topics of its help().

    import launcher.gin_configs.data.python_docs
    text_corpus.source = @PythonDocs()

A document is one module: its name, then every docstring under the name of what it documents, as they stand in the
source. Modules are held out whole, and what the training modules say word for word is taken out of the held-out ones.
The text is that of the Python that runs, about 2 MB: it differs between versions.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import gin

from launcher.data.text import storage
from launcher.errors import UsageError

_FORMAT = 1

# One package in so many is held out.
_SHARE = 14

# Not documentation, or not there everywhere.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data", "idlelib"}
_TOPICS = "pydoc_data"

Entry = tuple[str, str]
"""What is documented, and its docstring."""


@gin.configurable
class PythonDocs:
    """The documents; see `launcher.data.text.source.Source`."""

    name = "python_docs"

    def check(self) -> None:
        """Raises UsageError where this Python comes without the sources of its library."""
        if not _files() or not _topics_file().is_file():
            raise UsageError(
                "text_corpus.source = @PythonDocs() reads the standard library's own sources, and this Python has none "
                f"in {_library()}; use a complete installation, or bind another data set"
            )

    def digest(self) -> str:
        content = hashlib.sha256()
        for path in (*_files(), _topics_file()):
            content.update(f"{path.relative_to(_library())}\0".encode() + path.read_bytes())
        return storage.digest(_FORMAT, _SHARE, platform.python_version(), content.hexdigest())

    def train(self) -> Iterator[str]:
        """The documents to train on, sorted by module, then the topics."""
        return (_document(name, entries) for name, entries in self._modules[0].items())

    def held_out(self) -> Iterator[str]:
        """The held-out documents, sorted by module."""
        return (_document(name, entries) for name, entries in self._modules[1].items())

    @functools.cached_property
    def _modules(self) -> tuple[dict[str, list[Entry]], dict[str, list[Entry]]]:
        """By module, entries to train on and held-out ones."""
        self.check()
        train: dict[str, list[Entry]] = {}
        held_out: dict[str, list[Entry]] = {}
        for path in _files():
            name = _module(path)
            if entries := list(_docstrings(name, path)):
                (held_out if is_held_out(name) else train)[name] = entries
        train |= _topics()
        said = {text for entries in train.values() for _, text in entries}
        held_out = {name: [entry for entry in entries if entry[1] not in said] for name, entries in held_out.items()}
        return train, {name: entries for name, entries in held_out.items() if entries}


def is_held_out(module: str) -> bool:
    """Whether a module is evaluated on: the same for all of one package."""
    package = module.split(".")[0].lstrip("_")
    return hashlib.sha256(package.encode()).digest()[0] % _SHARE == 0


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _files() -> list[Path]:
    found = []
    for folder, inner, names in os.walk(_library()):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _topics_file() -> Path:
    return _library() / _TOPICS / "topics.py"


def _module(path: Path) -> str:
    parts = path.relative_to(_library()).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _docstrings(name: str, path: Path) -> Iterator[Entry]:
    """A module's docstrings in the order of its source."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and files that are broken on purpose
        return
    yield from _of(tree, name)


def _of(node: ast.AST, name: str) -> Iterator[Entry]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text and text.strip():
            yield name, inspect.cleandoc(text).strip()
    for child in ast.iter_child_nodes(node):
        inner = getattr(child, "name", None) if isinstance(child, ast.stmt) else None
        yield from _of(child, f"{name}.{inner}" if inner else name)


def _topics() -> dict[str, list[Entry]]:
    """help()'s topics, each a document; those of two names once. Read, not imported: some systems lack the package."""
    (assigned,) = (node for node in ast.parse(_topics_file().read_bytes()).body if isinstance(node, ast.Assign))
    topics: dict[str, str] = ast.literal_eval(assigned.value)
    once = {text.strip(): name for name, text in sorted(topics.items())}
    return {f"help('{name}')": [("", text)] for text, name in sorted(once.items(), key=lambda item: item[1])}


def _document(name: str, entries: list[Entry]) -> str:
    parts = [f"{entry}\n{text}\n" if entry else f"{name}\n{text}\n" for entry, text in entries]
    return "\n".join(parts)
