"""How often loops turn, where constants alone say it: of no other loop does XLA keep what a gradient needs."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from launcher.machine.no_autograph import no_autograph

_MOST_TURNS = 2**12  # that are counted


# Leans on TensorFlow: a While operation holds the graphs of its condition and its body, and the second of its inputs is
# the most turns that its gradient reckons with. Noticed by tests/step_program/test_lowering.py. Then: such loops are
# refused, as before; look for where those graphs are.
@no_autograph
def count_turns(graph: tf.Graph) -> None:
    """Tells the loops of a graph, before their gradients are made, how often they turn, where it says nothing of it."""
    for one in graph.get_operations():
        if (body := getattr(one, "_body_graph", None)) is None:
            continue
        count_turns(body)
        if tf.get_static_value(one.inputs[1]) == -1 and (turns := _turns(one, body)) is not None:
            number = tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(turns, tf.int32))
            one.inputs[1].op._set_attr("value", number)


def _turns(loop: Any, body: Any) -> int | None:
    """The number, found by those of the loop's values that the condition depends on."""
    condition = loop._cond_graph
    goes_on, after = _made(condition.outputs[0]), [*map(_made, body.outputs)]
    wanted, more = set[Any](), {*_given(condition, goes_on)}
    while more - wanted:
        wanted |= more
        more = {place for one in wanted - {None} for place in _given(body, after[one])}
    if None in wanted or any([*_given(loop.graph, loop.inputs[one])] for one in wanted):
        return None
    with tf.compat.v1.Session(graph=loop.graph) as before:
        values = before.run({one: loop.inputs[one].name for one in wanted})
    with tf.compat.v1.Session(graph=condition) as asks, tf.compat.v1.Session(graph=body) as turns:
        for count in range(_MOST_TURNS):
            if not asks.run(goes_on, {condition.inputs[one].name: value for one, value in values.items()}):
                return count
            given = {body.inputs[one].name: value for one, value in values.items()}
            values = turns.run({one: after[one] for one in values}, given)
    return None


def _made(output: tf.Tensor) -> tf.Tensor:
    """What an output is; itself, it waits for all that the graph does beside it."""
    return _made(output.op.inputs[0]) if output.op.type == "Identity" else output


def _given(graph: Any, tensor: tf.Tensor) -> Iterator[int | None]:
    """Which of a graph's inputs a tensor is made of; None for what is neither that nor a constant."""
    places = {tensor.op: place for place, tensor in enumerate(graph.inputs)}
    found, left = set[Any](), [tensor.op]
    while left:
        if (one := left.pop()) in found:
            continue
        found.add(one)
        left += [before.op for before in one.inputs]
        if one in places or one.op_def.is_stateful or one.control_inputs or not (one.inputs or one.type == "Const"):
            yield places.get(one)
