"""What XLA's own reader finds in a module's text, to compare launcher's with."""

from __future__ import annotations

import re

from jaxlib import _hlo

from launcher.preflight.compiled import hlo

# Computations that the text does not have: XLA writes "slice-start(x)" for an asynchronous call of one with a slice.
_IMPLIED = "async_wrapped"


def names(text: str) -> dict[str, set[str]]:
    """Instructions of each computation that stands in `text`, as XLA reads it, or else by its lines."""
    try:
        module = _hlo.hlo_module_from_text(text)
    except Exception:  # programs of a newer libtpu than jaxlib
        return _by_lines(text)
    found = {one.name: {instruction.name for instruction in one.instructions()} for one in module.computations()}
    return {name: inside for name, inside in found.items() if f"%{name} (" in text or not name.startswith(_IMPLIED)}


def _by_lines(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if head:
            current = found.setdefault(head[1], set())
        elif re.match(r"  (ROOT )?%\S+ = ", line):
            current.add(line.split("%", 1)[1].split(" = ")[0])
    return found


def check_read(text: str) -> None:
    """Asserts that launcher's reader finds every instruction of a program and understands all of it."""
    module = hlo.parse(text)
    assert module.unread == ()
    assert {name: set(one.instructions) for name, one in module.computations.items()} == names(text)
