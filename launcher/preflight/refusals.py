"""Why a step cannot be a TPU program, in words: what TensorFlow's bridge and the TPU compiler say, made short."""

from __future__ import annotations

import re

from launcher.preflight.hlo import Module
from launcher.preflight.user_lines import is_library

_UNSUPPORTED = re.compile(r"(\w+) \(No registered '(\w+)' OpKernel for XLA")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_USER_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_STATUS = re.compile(r"^([A-Z_]+): ")
_LOCATION = re.compile(r'loc\("([^"]+)"(?:\("([^"]+)":(\d+))?')
_INSTRUCTION = re.compile(r"%([\w.\-]+) = ")
_SHOWN = 600

_ADVICE = {
    "vmem": "one operation needs more on-chip memory than there is; make its window or block smaller",
    "UNIMPLEMENTED": "the TPU compiler has no code for it; write it with other operations",
    "INVALID_ARGUMENT": "the TPU compiler takes the program for a wrong one",
    "INTERNAL": "the TPU compiler failed by itself; another version of libtpu may not",
}


def explain(error: str, module: Module | None) -> str:
    """The compiler's refusal: what it names, the place in the user's code if it is known, and what to do.

    Args:
      error: its own words.
      module: the program it gave up on, when it left one.
    """
    status = _STATUS.match(error)
    places = [place for place in (_named(error, module), _location(error)) if place]
    hint = _ADVICE["vmem"] if re.search(r"\bvmem\b", error, re.IGNORECASE) else _ADVICE.get(status[1] if status else "")
    words = " ".join(error.split())
    words = words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…"
    about = f" {places[0]}:" if places else ""
    return f"the TPU compiler refuses the step:{about} {words}{f' ({hint})' if hint else ''}"


def _named(error: str, module: Module | None) -> str:
    """Source of the first instruction that the error names."""
    if module is None:
        return ""
    wanted = set(_INSTRUCTION.findall(error)) | set(re.findall(r"%([\w.\-]+)", error))
    for computation in module.computations.values():
        for name, one in computation.instructions.items():
            if name in wanted and str(one.source):
                return str(one.source)
    return ""


def _location(error: str) -> str:
    found = _LOCATION.search(error)
    if found is None:
        return ""
    return f"{found[1]} at {found[2]}:{found[3]}" if found[2] else found[1]


def explain_lowering(error: BaseException) -> str | None:
    """TensorFlow's refusal to make a program of the step; None when it is not about an operation."""
    text = str(error)
    unsupported = dict.fromkeys(kind for kind, _ in _UNSUPPORTED.findall(text))
    if not unsupported and "XLA" not in text and "compile-time constant" not in text:
        return None
    what = (
        f"XLA, and so a TPU, has no {' and no '.join(unsupported)}" if unsupported else " ".join(text.split())[:_SHOWN]
    )
    nodes = list(dict.fromkeys(_NODE.findall(text)))
    node = f", which is {nodes[-1]}" if nodes else ""
    return (
        f"the step cannot be a TPU program: {what}{node}{_user_line(text)}. Do it in the data pipeline, which runs on "
        "the host, or write it with other operations"
    )


def _user_line(text: str) -> str:
    """The innermost line that is not a library's."""
    lines = [(file, line, function) for file, line, function in _USER_LINE.findall(text) if not is_library(file)]
    if not lines:
        return ""
    file, line, function = lines[-1]
    return f", at {file}:{line} in {function}"
