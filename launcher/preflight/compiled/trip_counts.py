"""Trip counts: how often a loop of optimised HLO turns, where it counts from one constant to another.

The TPU compiler does not write down the trip counts that it knows, so they are read off the loop again.
"""

from __future__ import annotations

import dataclasses

from launcher.preflight.compiled.hlo import Computation, Instruction, Module

_VIEWS = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"}

# A number that is known, or the place in the loop's state where it stands.
_Value = int | tuple[str, int] | None


def turns(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Turns of `while` instruction `loop`, which stands in `computation`; None where they are not plain to see."""
    return loop.trip_count if loop.trip_count is not None else _Loop(module, computation, loop).turns()


def _origin(computation: Computation, name: str) -> Instruction | None:
    """The instruction that a value is from, before copies and other views of it."""
    one = computation.instructions.get(name)
    while one is not None and one.opcode in _VIEWS:
        one = computation.instructions.get(one.operands[0])
    return one


def _value(computation: Computation, name: str) -> _Value:
    one = _origin(computation, name)
    if one is not None and one.opcode == "constant":
        literal = one.proto.literal
        numbers = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
        return int(numbers[0]) if len(numbers) == 1 else None
    if one is not None and one.opcode == "get-tuple-element":
        source = computation.instructions.get(one.operands[0])
        if source is not None and source.opcode == "parameter":
            return ("state", one.proto.tuple_index)
    return None


@dataclasses.dataclass(frozen=True)
class _Loop:
    module: Module
    computation: Computation
    instruction: Instruction

    @property
    def body(self) -> Computation:
        return self.module.computations[self.instruction.called[0]]

    def turns(self) -> int | None:
        condition = self.module.computations[self.instruction.called[1]]
        compare = condition.root
        if compare.opcode != "compare" or compare.proto.comparison_direction not in ("LT", "LE"):
            return None
        counter, end = (_value(condition, name) for name in compare.operands)
        if not isinstance(counter, tuple):
            return None
        first, step, last = self.initial(counter[1]), self.step(counter[1]), self.constant(end)
        if first is None or last is None or not step or step < 0:
            return None
        last += compare.proto.comparison_direction == "LE"
        return max(0, -((first - last) // step))

    def initial(self, place: int) -> int | None:
        state = self.computation.instructions.get(self.instruction.operands[0])
        if state is None or state.opcode != "tuple":
            return None
        value = _value(self.computation, state.operands[place])
        return value if isinstance(value, int) else self._left_by_a_loop(state.operands[place])

    def _left_by_a_loop(self, name: str) -> int | None:
        """What a loop before has counted to, as the gradient of a loop does not turn more often."""
        one = _origin(self.computation, name)
        if one is None or one.opcode != "get-tuple-element":
            return None
        source = self.computation.instructions.get(one.operands[0])
        if source is None or source.opcode != "while":
            return None
        before, place = _Loop(self.module, self.computation, source), one.proto.tuple_index
        first, step = before.initial(place), before.step(place)
        times = turns(self.module, self.computation, source)
        return None if first is None or step is None or times is None else first + step * times

    def constant(self, value: _Value) -> int | None:
        """A number, or what the state has from beginning to end."""
        if not isinstance(value, tuple):
            return value
        root = self.body.root
        stays = root.opcode == "tuple" and _value(self.body, root.operands[value[1]]) == value
        return self.initial(value[1]) if stays else None

    def step(self, place: int) -> int | None:
        root = self.body.root
        added = _origin(self.body, root.operands[place]) if root.opcode == "tuple" else None
        if added is None or added.opcode != "add":
            return None
        parts = [_value(self.body, name) for name in added.operands]
        if ("state", place) not in parts:
            return None
        parts.remove(("state", place))
        return self.constant(parts[0])
