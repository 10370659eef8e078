"""Why the TPU compiler refuses a program, in words; what TensorFlow refuses before is `cannot_lower`'s."""

from __future__ import annotations

import re

from launcher.preflight.hlo import Module

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
