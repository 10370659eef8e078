"""What decides a preflight report: read without TensorFlow, so that a report can be found again in a second.

`key` is of all that is known beforehand: the flags, the environment, the versions and the sources of Launcher. What a
recipe then reads, `Reads` records: modules, files and folders. What cannot be recorded is a `doubt`, and a report in
doubt is not kept.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import glob
import hashlib
import importlib
import json
import os
import platform
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import launcher

_ROOT = Path(launcher.__file__).resolve().parents[1]
_OWN = tuple(str(_ROOT / name) + os.sep for name in ("launcher", "models", "gin_configs"))
_STANDARD = tuple({os.path.dirname(os.__file__) + os.sep, "/proc/", "/sys/", "/dev/"})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_MOST_ENTRIES, _MOST_BYTES = 20_000, 2**28

# Of the environment, what says how this shell is shown; all else may be read by a user's module.
_NOISE = {
    "_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "TERM", "COLORTERM", "LS_COLORS", "DISPLAY", "WINDOWID", "TMUX",
    "TMUX_PANE", "STY", "PYTEST_CURRENT_TEST", "XDG_SESSION_ID", "INVOCATION_ID", "JOURNAL_STREAM",
}  # fmt: skip
_NOISY = ("SSH_", "VSCODE_", "TERM_")
# What Launcher and TensorFlow set themselves where it is not set.
_SET_HERE = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2", "TF2_BEHAVIOR": "1"}

# Other packages may read files in ways that Python does not see, and so may these names of TensorFlow, Keras and NumPy.
_SAFE_PACKAGES = {*sys.stdlib_module_names, "absl", "gin", "keras", "launcher", "models", "numpy", "tensorflow"}
_READERS = {
    "Checkpoint", "FixedLengthRecordDataset", "TFRecordDataset", "TextFileInitializer", "TextLineDataset", "ctypes",
    "exists", "fromfile", "gfile", "io", "is_dir", "is_file", "isdir", "isfile", "load_checkpoint", "load_model",
    "load_op_library", "load_variable", "load_weights", "memmap", "saved_model", "stat",
}  # fmt: skip
_UNSEEN = ("socket.connect", "socket.getaddrinfo", "os.system", "os.exec", "os.posix_spawn", "urllib.Request")


def key(flags: Mapping[str, Any], data_dir: str) -> str | None:
    """Of what is known before anything is imported; None when the data sets cannot be told apart.

    Args:
      flags: of the command, as far as they decide the report.
      data_dir: where prepared data sets are, of which recipes read sizes and vocabularies.
    """
    data = _tree(data_dir)
    if data is None:
        return None
    known = [
        flags,
        os.getcwd(),
        sorted(_environment().items()),
        [platform.python_version(), os.cpu_count()],
        sorted(_packages()),
        _own_sources(),
        data,
    ]
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _environment() -> dict[str, str]:
    environ = {**_SET_HERE, **os.environ}
    return {name: value for name, value in environ.items() if name not in _NOISE and not name.startswith(_NOISY)}


def _packages() -> set[str]:
    """Names with versions of what is installed; the sources of what is not are looked at where they are read."""
    folders = [folder for folder in sys.path if (folder + os.sep).endswith(_INSTALLED)]
    return {name for folder in folders for name in _names(folder) if name.endswith((".dist-info", ".egg-info"))}


@functools.cache
def _own_sources() -> str:
    found = hashlib.sha256()
    for folder in _OWN:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in (".py", ".txt", ".gin") and path.is_file():
                found.update(f"{path}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _tree(folder: str) -> str | None:
    """Of the names, sizes and times of all files; None for too many, or a folder that is not on this machine."""
    if "://" in folder:
        return None
    found: list[tuple[str, int, int]] = []
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                state = os.stat(os.path.join(path, name))
                found.append((os.path.join(path, name), state.st_size, state.st_mtime_ns))
        if len(found) > _MOST_ENTRIES:
            return None
    return _digest(sorted(found))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")
    except OSError:
        return []


# ------------------------------------------------------------------------------------------------ what a recipe reads


@dataclasses.dataclass
class Reads:
    """What Python has read since `recorded` began.

    Attributes:
      files, folders: paths; files that it had written itself are not among them.
      unseen: a word on each thing that was asked of others than this machine's files.
    """

    files: set[str] = dataclasses.field(default_factory=set)
    folders: set[str] = dataclasses.field(default_factory=set)
    written: set[str] = dataclasses.field(default_factory=set)
    unseen: set[str] = dataclasses.field(default_factory=set)

    def note(self, event: str, arguments: Sequence[Any]) -> None:
        """Takes one event of `sys.addaudithook`."""
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
                self.written |= {path} - self.files
            elif path not in self.written:
                self.files.add(path)
        elif event in ("os.listdir", "os.scandir") and not _by_import():
            self.folders.add(os.path.abspath(os.fsdecode(arguments[0] or ".")))
        elif event == "subprocess.Popen" and not _by_a_package():
            self.unseen.add(f"it starts {arguments[0]}")
        elif event.startswith(_UNSEEN):
            self.unseen.add(f"it uses {event}")


def _by_import() -> bool:
    return sys._getframe(3).f_code.co_filename.startswith(("<frozen importlib", os.path.dirname(importlib.__file__)))


def _by_a_package() -> bool:
    """Whether an installed package or Launcher itself does it, and not a user's module."""
    frame: types.FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith((*_STANDARD, "<")):
        frame = frame.f_back
    return frame is not None and _is_known(frame.f_code.co_filename)


_recording: Reads | None = None


@functools.cache
def _listen() -> None:
    def hook(event: str, arguments: Sequence[Any]) -> None:
        if _recording is not None:
            with contextlib.suppress(Exception):  # else whatever is read would fail
                _recording.note(event, arguments)

    sys.addaudithook(hook)  # for good: Python has no way to take one away


@contextlib.contextmanager
def recorded() -> Iterator[Reads]:
    """While it is open, what Python reads goes into the object that it gives."""
    global _recording
    _listen()
    _recording = reads = Reads()
    try:
        yield reads
    finally:
        _recording = None


def manifest(reads: Reads, own_folder: str) -> dict[str, str]:
    """Digests of all that a recipe read, by what it is: "file PATH", "folder PATH" or "modules in PATH".

    Args:
      own_folder: with what Launcher keeps, which decides nothing.
    """
    own = os.path.abspath(own_folder) + os.sep
    files = {
        path
        for path in (reads.files | set(_module_files())) - reads.written
        if not _is_known(path) and not path.startswith(own)
    }
    folders = {path for path in reads.folders if not _is_known(path + os.sep) and not (path + os.sep).startswith(own)}
    searched = {os.path.abspath(path) for path in sys.path if not _is_known(os.path.abspath(path) + os.sep)}
    entries = [
        *(f"file {path}" for path in files),
        *(f"folder {path}" for path in folders),
        *(f"modules in {path}" for path in searched),
    ]
    return {entry: state(entry) for entry in sorted(entries)}


def state(entry: str) -> str:
    """The digest of one entry of a manifest as it is now; "" for what is not there."""
    kind, _, path = entry.partition(" ")
    if kind == "file":
        with contextlib.suppress(OSError):
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return ""
    names = sorted(_names(path.removeprefix("in ")))
    if kind == "modules":
        folder = path.removeprefix("in ")
        names = [name for name in names if name.endswith((".py", ".so")) or _is_package(os.path.join(folder, name))]
    return _digest(names)


def _is_package(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "__init__.py"))


def _is_known(path: str) -> bool:
    """Whether the versions of packages or `_own_sources` tell it already."""
    return path.startswith((*_OWN, *_STANDARD)) or any(part in path for part in _INSTALLED) or "__pycache__" in path


def _module_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            yield os.path.abspath(path)


def doubt(reads: Reads, entries: Iterable[str], texts: Iterable[str]) -> str | None:
    """Why a later look might see other things than are in the manifest; None where nothing speaks for it.

    Args:
      reads: of this look.
      entries: of its manifest.
      texts: texts in the recipe's bindings, of which a path may be one.
    """
    for text in texts:
        part = text.partition(":")[2] if ":" in text else text
        if os.path.exists(part) or glob.has_magic(part) or part.startswith(("/", "~", ".")) or "://" in text:
            return f"the recipe names the files {text!r}"
    checks: tuple[Callable[[str], str | None], ...] = (_size_doubt, _source_doubt)
    paths = [entry.removeprefix("file ") for entry in entries if entry.startswith("file ")]
    found = [why for path in paths for check in checks if (why := check(path))]
    return next(iter([*sorted(reads.unseen), *found]), None)


def _size_doubt(path: str) -> str | None:
    try:
        return f"{path} is large" if os.path.getsize(path) > _MOST_BYTES else None
    except OSError:
        return None


def _source_doubt(path: str) -> str | None:
    """Why a user's module may read what Python does not tell of."""
    if not path.endswith(".py"):
        return f"{path} is no Python source" if path.endswith((".so", ".pyc")) else None
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return f"{path} cannot be read"
    beside = {
        name.removesuffix(".py") for folder in (os.path.dirname(path), *sys.path) for name in _own_modules(folder)
    }
    for node in ast.walk(tree):
        packages: list[str] = []
        if isinstance(node, ast.Import):
            packages = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            packages = [(node.module or "").partition(".")[0]]
        for package in packages:
            if package not in _SAFE_PACKAGES and package not in beside:
                return f"{os.path.basename(path)} imports {package}"
        name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        if isinstance(name, str) and name in _READERS:
            return f"{os.path.basename(path)} has {name!r}, which may read files"
    return None


@functools.cache
def _own_modules(folder: str) -> tuple[str, ...]:
    if any(part in os.path.abspath(folder) + os.sep for part in (*_INSTALLED, *_STANDARD)):
        return ()
    return tuple(name for name in _names(folder) if name.endswith(".py") or _is_package(os.path.join(folder, name)))
