"""Trip counts: how often a loop of optimised HLO turns, where it counts from one constant to another.

The TPU compiler does not write down the trip counts that it knows, so they are read off the loop again.
"""

from launcher.preflight.compiled.hlo import Instruction

_VIEWS = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"}


def turns(loop: Instruction) -> int | None:
    """Turns of a `while` instruction; None where they are not plain to see."""
    if loop.trip_count is not None:
        return loop.trip_count
    compare = loop.called[1].root
    direction = compare.proto.comparison_direction
    place = _place(compare.operands[0]) if compare.opcode == "compare" and direction in ("LT", "LE") else None
    if place is None:
        return None
    first, step, last = _initial(loop, place), _step(loop, place), _lasting(loop, compare.operands[1])
    if first is None or last is None or not step or step < 0:
        return None
    return max(0, -((first - last - (direction == "LE")) // step))


def _origin(value: Instruction) -> Instruction:
    """The instruction that a value is from, before copies and other views of it."""
    while value.opcode in _VIEWS:
        value = value.operands[0]
    return value


def _constant(value: Instruction) -> int | None:
    literal = _origin(value).proto.literal
    numbers = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
    return int(numbers[0]) if len(numbers) == 1 else None


def _place(value: Instruction) -> int | None:
    """The place in a loop's state that a value inside the loop is taken from; None where it is from elsewhere."""
    value = _origin(value)
    is_of_state = value.opcode == "get-tuple-element" and value.operands[0].opcode == "parameter"
    return value.proto.tuple_index if is_of_state else None


def _initial(loop: Instruction, place: int) -> int | None:
    state = loop.operands[0]
    if state.opcode != "tuple":
        return None
    value = state.operands[place]
    number = _constant(value)
    return _left_by_a_loop(_origin(value)) if number is None else number


def _left_by_a_loop(value: Instruction) -> int | None:
    """The number to which a loop before has counted, as the gradient of a loop does not turn more often."""
    if value.opcode != "get-tuple-element" or value.operands[0].opcode != "while":
        return None
    before, place = value.operands[0], value.proto.tuple_index
    first, step, times = _initial(before, place), _step(before, place), turns(before)
    return None if first is None or step is None or times is None else first + step * times


def _lasting(loop: Instruction, value: Instruction) -> int | None:
    """A number, or what the state has from beginning to end."""
    place, root = _place(value), loop.called[0].root
    if place is None:
        return _constant(value)
    return _initial(loop, place) if root.opcode == "tuple" and _place(root.operands[place]) == place else None


def _step(loop: Instruction, place: int) -> int | None:
    """The number that a turn adds at a place of the state."""
    root = loop.called[0].root
    added = _origin(root.operands[place]) if root.opcode == "tuple" else None
    if added is None or added.opcode != "add":
        return None
    others = [each for each in added.operands if _place(each) != place]
    return _lasting(loop, others[0]) if len(others) == 1 else None
