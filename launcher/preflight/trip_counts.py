"""Trip counts: how often a loop of optimised HLO turns, where it counts from one constant to another.

The TPU compiler does not write down the trip counts that it knows, so they are read off the loop again.
"""

from __future__ import annotations

import re

from launcher.preflight.hlo import Computation, Instruction, Module

_VIEWS = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"}

# A number that is known, or the place in the loop's state where it stands.
_Value = int | tuple[str, int] | None


def turns(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Turns of `while` instruction `loop`, which stands in `computation`; None where they are not plain to see."""
    if loop.trip_count is not None:
        return loop.trip_count
    condition = module.computations[loop.called["condition"][0]]
    body = module.computations[loop.called["body"][0]]
    compare = condition.root
    if compare.opcode != "compare" or compare.attribute("direction") not in ("LT", "LE"):
        return None
    counter, end = (_value(condition, name) for name in compare.operands)
    if not isinstance(counter, tuple):
        return None
    place = counter[1]
    first, step = _initial(module, computation, loop, place), _step(module, computation, loop, body, place)
    last = _known(module, computation, loop, body, end)
    if first is None or last is None or not step or step < 0:
        return None
    last += compare.attribute("direction") == "LE"
    return max(0, -((first - last) // step))


def _value(computation: Computation, name: str) -> _Value:
    one = computation.instructions.get(name)
    while one is not None and one.opcode in _VIEWS:
        one = computation.instructions.get(one.operands[0])
    if one is None:
        return None
    if one.opcode == "constant":
        return int(one.operands[0]) if one.operands and re.fullmatch(r"-?\d+", one.operands[0]) else None
    if one.opcode == "get-tuple-element":
        source = computation.instructions.get(one.operands[0])
        if source is not None and source.opcode == "parameter":
            return ("state", int(one.attribute("index")))
    return None


def _initial(module: Module, computation: Computation, loop: Instruction, place: int) -> int | None:
    state = computation.instructions.get(loop.operands[0])
    if state is None or state.opcode != "tuple":
        return None
    value = _value(computation, state.operands[place])
    return value if isinstance(value, int) else _left_by_a_loop(module, computation, state.operands[place])


def _left_by_a_loop(module: Module, computation: Computation, name: str) -> int | None:
    """What a loop before has counted to, as the gradient of a loop does not turn more often."""
    one = computation.instructions.get(name)
    while one is not None and one.opcode in _VIEWS:
        one = computation.instructions.get(one.operands[0])
    loop = (
        computation.instructions.get(one.operands[0]) if one is not None and one.opcode == "get-tuple-element" else None
    )
    if one is None or loop is None or loop.opcode != "while":
        return None
    place, body = int(one.attribute("index")), module.computations[loop.called["body"][0]]
    first, step = _initial(module, computation, loop, place), _step(module, computation, loop, body, place)
    times = turns(module, computation, loop)
    return None if first is None or step is None or times is None else first + step * times


def _known(module: Module, computation: Computation, loop: Instruction, body: Computation, value: _Value) -> int | None:
    """A number, or what the state has from beginning to end."""
    if not isinstance(value, tuple):
        return value
    place = value[1]
    root = body.root
    if root.opcode != "tuple" or _value(body, root.operands[place]) != value:
        return None
    return _initial(module, computation, loop, place)


def _step(module: Module, computation: Computation, loop: Instruction, body: Computation, place: int) -> int | None:
    root = body.root
    added = body.instructions.get(root.operands[place]) if root.opcode == "tuple" else None
    while added is not None and added.opcode in _VIEWS:
        added = body.instructions.get(added.operands[0])
    if added is None or added.opcode != "add":
        return None
    parts = [_value(body, name) for name in added.operands]
    if ("state", place) not in parts:
        return None
    parts.remove(("state", place))
    return _known(module, computation, loop, body, parts[0])
