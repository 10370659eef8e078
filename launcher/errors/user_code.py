"""Errors raised by a user's own Python: how they are recognised, and the one line that says where and what.

An error is the user's where the innermost frame that belongs to no library stands in a file of the user's, and ours
where it stands in launcher/ or models/. AutoGraph rewrites users' functions and says in `ag_error_metadata` which of
their lines it was; that attribute is not public TensorFlow API (as found in 2.20 and 2.21). Without it, an error
in a rewritten function counts as ours, and keeps its whole traceback.
"""

import functools
import itertools
import linecache
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import launcher
from launcher.errors import TRACEBACK, MissingInputError, UsageError, listed, nearest, notebook

_OURS = tuple(
    f"{os.path.realpath(folder)}{os.sep}" for folder in (launcher.__path__[0], f"{launcher.__path__[-1]}/models")
)
_STANDARD_LIBRARY = tuple(
    {f"{os.path.realpath(sysconfig.get_path(name))}{os.sep}" for name in ("stdlib", "platstdlib")}
)
_INSTALLED = {"site-packages", "dist-packages"}
_GENERATED = "__autograph_generated_file"
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+?)(?:  \*+)?)?$', re.MULTILINE)
# What surrounds the line that matters: Keras's frame around an error in a layer, TensorFlow's around one in a graph.
_AROUND = re.compile(
    r"Exception encountered when calling|Graph execution error|Detected at node|Traceback \(|\d+ root error"
)
_MOST_CHARACTERS = 500

_realpath = functools.cache(os.path.realpath)  # links are followed, folder by folder


@functools.cache
def _targets() -> tuple[str, ...]:
    """Folders for PYTHONPATH that packages were installed to, as by pip's --target: no folder of a user's programs."""
    folders = [Path(os.path.realpath(one)) for one in sys.path if one]
    return tuple(f"{one}{os.sep}" for one in folders if any(one.glob("*.dist-info")))


class Place(NamedTuple):
    """One frame of a traceback: a file, a line in it and the function."""

    file: str
    line: int
    function: str

    @property
    def is_ours(self) -> bool:
        return _realpath(self.file).startswith(_OURS)

    @property
    def is_library(self) -> bool:
        """Whether it belongs to Python, to an installed package, or to no file at all."""
        if self.is_ours:
            return False
        path = _realpath(self.file)
        nowhere = self.is_rewritten or (self.file.startswith("<") and not notebook.is_cell(self.file))
        return nowhere or path.startswith(_STANDARD_LIBRARY + _targets()) or bool(_INSTALLED & set(Path(path).parts))

    @property
    def is_rewritten(self) -> bool:
        """Whether it is what AutoGraph made of a function."""
        return os.path.basename(self.file).startswith(_GENERATED)

    def __str__(self) -> str:
        relative = os.path.relpath(self.file)
        outside = relative.startswith(os.pardir) or notebook.is_cell(self.file)
        shown = notebook.with_cells(self.file) if outside else relative
        inside = f", in {self.function}" if self.function.startswith("<") else f", in {self.function}()"
        inside = "" if self.function == "<module>" else inside
        return f"{shown} line {self.line}{inside}"


def mistake(error: BaseException) -> UsageError | None:
    """The usage error for an error that the user's own Python raised; None for any other error."""
    place = raised_at(error)
    if place is None or place.is_ours:
        return None
    kind = MissingInputError if isinstance(error, FileNotFoundError | PermissionError) else UsageError
    told = kind(f"{place}: {summary(error)}{_keys_there(error)}{_what_to_do(error)} ({TRACEBACK}=1 shows more)")
    told.__cause__ = error
    told.lines = tuple(
        f"{one}\n    {linecache.getline(one.file, one.line).strip()}"
        for one in _places(error)
        if not one.is_ours and not one.is_library
    )
    return told


def raised_at(error: BaseException) -> Place | None:
    """The innermost frame that belongs to no library: the user's or ours; None if there is none."""
    return next((place for place in reversed(_places(error)) if not place.is_library), None)


def summary(error: BaseException) -> str:
    """Type and first paragraph of an error, without what AutoGraph, Keras and TensorFlow put around it."""
    # Leans on TensorFlow: AutoGraph keeps a user's line in `ag_error_metadata` of an error. Noticed by
    # tests/test_user_mistakes.py. Then: find where the new version keeps it; until then such errors have their whole
    # traceback.
    text = getattr(getattr(error, "ag_error_metadata", None), "cause_message", None)
    if not isinstance(text, str):
        text = f"{type(error).__name__}: {error}"
    kind, _, rest = text.partition(": ")
    rest = re.sub(r"\x1b\[\d*m", "", rest)
    if isinstance(error, SyntaxError):
        rest = error.msg
    lines = [line.strip() for line in rest.splitlines()]
    telling = [line for line in lines if not _AROUND.match(line) and not _FRAME.match(line)]
    begun = itertools.dropwhile(lambda line: not line, telling)
    paragraph = itertools.takewhile(lambda line: line and not line.startswith("[["), begun)  # [[{{node ...}}]]
    first = re.sub(r"^\(\d+\) [A-Z_]+:\s+", "", " ".join(paragraph))
    if len(first) > _MOST_CHARACTERS:
        first = f"{first[:_MOST_CHARACTERS]} ..."
    return f"{kind}: {first}" if first else kind


def defined_at(function: object) -> str:
    """The place that a function or method of the user's has, as in "wine.py line 29"; else its name."""
    if place := getattr(function, "place", None):
        return str(place)
    code = getattr(function, "__code__", None)
    if code is None:
        return getattr(function, "__qualname__", repr(function))
    return str(Place(code.co_filename, code.co_firstlineno, "<module>"))


def _places(error: BaseException) -> list[Place]:
    """The frames that led to an error, the innermost last, in the lines of the source."""
    frames = [Place(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    rewritten = getattr(getattr(error, "ag_error_metadata", None), "translated_stack", None)
    if rewritten:
        frames += [Place(f.filename, f.lineno or 0, f.function_name or "<lambda>") for f in reversed(rewritten)]
    elif type(error).__module__.startswith("tensorflow."):  # while the graph ran: the text says where it was made
        found = _FRAME.finditer(str(error))
        frames += [Place(frame["file"], int(frame["line"]), frame["function"]) for frame in found]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(Place(error.filename, error.lineno or 0, "<module>"))
    return frames


def _keys_there(error: BaseException) -> str:
    """For an unknown key of a dict that the user's function was given, such as a batch: the keys there are."""
    key = re.match(r"KeyError: '(.*)'", summary(error))
    if key is None:
        return ""
    for frame, line in _frames(error):
        place = Place(frame.f_code.co_filename, line, frame.f_code.co_name)
        if place.is_ours or (place.is_library and not place.is_rewritten):
            continue
        for name, value in frame.f_locals.items():
            is_dict = isinstance(value, dict) and value and not name.startswith("_")
            if is_dict and all(isinstance(each, str) for each in value) and key[1] not in value:
                close = nearest(key[1], value)
                return f"; {name} has {listed(value)}" + (f"; did you mean {close!r}?" if close else "")
    return ""


def _frames(error: BaseException | None) -> Iterator[tuple[types.FrameType, int]]:
    """The frames of an error and of those that AutoGraph raised it in place of, the innermost first."""
    while error is not None:
        yield from reversed(list(traceback.walk_tb(error.__traceback__)))
        error = error.__cause__ or error.__context__


def _what_to_do(error: BaseException) -> str:
    if "SymbolicTensor' object has no attribute 'numpy'" in str(error):
        return "; this function is made into a graph and sees no values: use TensorFlow's operations, not .numpy()"
    return ""
