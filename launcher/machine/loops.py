"""How often loops turn, where constants alone say it: of no other loop does XLA keep what a gradient needs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    places = [*wanted]
    values = _run_here([loop.inputs[one] for one in places])({})
    asks, turn = _run_here([goes_on]), _run_here([after[one] for one in places])
    for count in range(_MOST_TURNS):
        if not asks({condition.inputs[one].op.name: value for one, value in zip(places, values, strict=True)})[0]:
            return count
        values = turn({body.inputs[one].op.name: value for one, value in zip(places, values, strict=True)})
    return None


def _run_here(outputs: Sequence[tf.Tensor]) -> Callable[[Mapping[str, Any]], list[Any]]:
    """What computes outputs of a graph by the values of its inputs' names on this CPU, whatever device they are for."""
    definition = tf.compat.v1.GraphDef()
    definition.versions.producer = tf.version.GRAPH_DEF_VERSION
    found, left = dict[str, Any](), [one.op for one in outputs]
    while left:
        if (one := left.pop()).name not in found:
            found[one.name] = node = definition.node.add()
            node.CopyFrom(one.node_def)
            node.device = ""
            node.attr.pop("_class", None)  # beside what it is placed
            left += [before.op for before in one.inputs]
    copy = tf.Graph()
    with copy.as_default():
        tf.import_graph_def(definition, name="")
    session = tf.compat.v1.Session(graph=copy, config=tf.compat.v1.ConfigProto(device_count={"GPU": 0}))
    names = [one.name for one in outputs]
    return lambda given: session.run(names, {f"{name}:0": given[name] for name in found.keys() & given.keys()})


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
        calls = any(attr.WhichOneof("value") == "func" for attr in one.node_def.attr.values())
        is_other = calls or one.op_def.is_stateful or one.control_inputs or not (one.inputs or one.type == "Const")
        if one in places or is_other:
            yield places.get(one)
