"""FLOPs of the matrix products and convolutions of a traced step, counted in its graph: nothing is compiled for it.

A multiply-add is two. What is not a matrix product is left out, as in the usual definition of MFU (Chowdhery et al.
2022, PaLM, appendix B), which counts what the model needs: products that the backward pass computes again, in place of
keeping their results, are in the hardware's FLOPs alone (HFU).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from launcher.models.transformer.attention_kernel import CAUSAL_SCOPE, SCOPE
from launcher.models.transformer.blockwise_attention import COMPUTED_AGAIN

# TensorFlow numbers scopes of one name. Gradients of what is computed again have its name behind their own scope.
# Leans on TensorFlow: names of operations show what the backward pass computes, and what again. Noticed by
# tests/step/test_flops.py. Then: find the new names; only FLOP/s and MFU are affected.
_AGAIN, _GRADIENT = (re.compile(rf"(^|/)({names})(_\d+)?/") for names in (COMPUTED_AGAIN, "gradient_tape|gradients"))
_KERNEL = re.compile(rf"(^|/)({SCOPE}|{CAUSAL_SCOPE})(_\d+)?/")
_KERNELS = ("XlaCallModule", "XlaCustomCallV2")  # JAX's, and those that XLA knows by name
_LOOPS = ("While", "StatelessWhile")
_PRODUCTS = {"MatMul": "transpose_a", "BatchMatMul": "adj_x", "BatchMatMulV2": "adj_x", "BatchMatMulV3": "adj_x"}
_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative")
_Shape = list[int] | None


class _NotCountable(Exception):
    pass


class Flops(NamedTuple):
    """FLOPs that the model needs, of which MFU is a share, and FLOPs computed, what is computed again among them."""

    model: float
    hardware: float


def count(graph: tf.Graph, loops: int = 0) -> Flops | None:
    """Counts the FLOPs of a traced function's graph; None where a shape is not static or a loop's turns are not known.

    Args:
      loops: how often outermost loops turn that do not tell, as those do that count from 0 to a constant; 0 for what
        is not known.
    """
    definition = graph.as_graph_def(add_shapes=True)
    library = {called.signature.name: called for called in definition.library.function}
    try:
        return _of_nodes(definition.node, {}, library, loops)
    except _NotCountable:
        return None


def _of_nodes(
    nodes: Iterable, arguments: Mapping[str, _Shape], library: Mapping[str, Any], loops: int, again: bool = False
) -> Flops:
    shapes: dict[str, list[_Shape]] = {name: [shape] for name, shape in arguments.items()}
    nodes = list(nodes)
    shapes |= {node.name: [_shape(one) for one in node.attr["_output_shapes"].list.shape] for node in nodes}
    model = hardware = 0.0
    for node in nodes:
        repeated = again or bool(_AGAIN.search(node.name) and not _GRADIENT.search(node.name))
        inputs = [_input(name, shapes) for name in node.input if name[0] != "^"]
        again_inside, own = _of_kernel(node, inputs) if node.op in _KERNELS else (0.0, _of_node(node, inputs))
        called = [value.func.name for value in node.attr.values() if value.HasField("func")]
        called += [one.name for value in node.attr.values() for one in value.list.func]
        of_loop = 0 if node.op in _LOOPS else loops
        inner = [_of_function(library[name], library, of_loop, repeated) for name in called if name in library]
        turns = 1
        if node.op in _LOOPS and any(one.hardware > 0 for one in inner):
            turns = _turns(node, nodes, library) or loops
            if not turns:
                raise _NotCountable
        model += (0.0 if repeated else own - again_inside) + turns * sum(one.model for one in inner)
        hardware += own + turns * sum(one.hardware for one in inner)
    return Flops(model, hardware)


def _of_function(function: Any, library: Mapping[str, Any], loops: int, again: bool) -> Flops:
    arguments: dict[str, _Shape] = {}
    for place, argument in enumerate(function.signature.input_arg):
        told = function.arg_attr[place].attr["_output_shapes"].list.shape if place in function.arg_attr else []
        arguments[argument.name] = _shape(told[0]) if told else None
    return _of_nodes(function.node_def, arguments, library, loops, again)


def _turns(loop: Any, nodes: Sequence[Any], library: Mapping[str, Any]) -> int | None:
    """Number of turns of a loop that counts from 0 in steps of 1; None for any other.

    It counts to a constant, or to what a loop before has counted to, as the gradient of a loop does.
    """
    condition = library[loop.attr["cond"].func.name]
    names = [argument.name for argument in condition.signature.input_arg]

    def limit(output: str) -> int | None:
        if output not in names:
            return _integer(output, condition.node_def)
        outer = loop.input[names.index(output)]
        before = _made_by(outer, nodes)
        if before is None or before.op not in _LOOPS:
            return _integer(outer, nodes)
        place = int(outer.rpartition(":")[2]) if ":" in outer else 0  # in a function: name:output:place
        return _turns(before, nodes, library) if _counts(before, place, nodes, library) else None

    def of(compare: Any) -> int | None:
        if compare is not None and compare.op == "LogicalAnd":
            one, other = (of(_made_by(output, condition.node_def)) for output in compare.input)
            return None if one is None or other is None else min(one, other)
        if compare is None or compare.op != "Less" or compare.input[0] not in names:
            return None
        return limit(compare.input[1]) if _counts(loop, names.index(compare.input[0]), nodes, library) else None

    return of(_made_by(condition.ret[condition.signature.output_arg[0].name], condition.node_def))


def _counts(loop: Any, place: int, nodes: Sequence[Any], library: Mapping[str, Any]) -> bool:
    """Whether what stands at a place of a loop's state begins as 0 and grows by 1 in each turn."""
    body = library[loop.attr["body"].func.name]
    add = _made_by(body.ret[body.signature.output_arg[place].name], body.node_def)
    if add is None or not add.op.startswith("Add") or add.input[0] != body.signature.input_arg[place].name:
        return False
    return (_integer(loop.input[place], nodes), _integer(add.input[1], body.node_def)) == (0, 1)


def _made_by(output: str, nodes: Iterable[Any]) -> Any:
    """The node that an output is of, past those that only hand it on; None for an argument of the function."""
    by_name = {node.name: node for node in nodes}
    node = by_name.get(output.partition(":")[0])
    while node is not None and node.op == "Identity":
        node = by_name.get(node.input[0].partition(":")[0])
    return node


def _integer(output: str, nodes: Iterable[Any]) -> int | None:
    node = _made_by(output, nodes)
    if node is None or node.op != "Const":
        return None
    value = tf.make_ndarray(node.attr["value"].tensor)
    return int(value) if value.shape == () else None


def _of_node(node: Any, inputs: list[_Shape]) -> float:
    if node.op in _PRODUCTS:
        one, out = _static(inputs[0]), _static(_output(node))
        contracted = one[-2] if node.attr[_PRODUCTS[node.op]].b else one[-1]
        return 2.0 * math.prod(out) * contracted
    if node.op == "Einsum":
        return _of_einsum(node.attr["equation"].s.decode(), inputs)
    kind = next((kind for kind in _CONVOLUTIONS if node.op.startswith(kind)), None)
    if kind is None:
        return 0.0
    # Whatever is computed, each element of the forward result meets each tap of the kernel and each of its inputs.
    backprop = "Backprop" in node.op
    result = _static(inputs[2] if backprop else _output(node))
    kernel = _static(_output(node) if "BackpropFilter" in node.op else inputs[1])
    taps = kernel[:-2] if kind.startswith("Depthwise") else kernel[:-1]
    return 2.0 * math.prod(result) * math.prod(taps)


def _of_kernel(node: Any, inputs: list[_Shape]) -> tuple[float, float]:
    """FLOPs of a kernel of attention that are computed again in it, and all; of a causal mask, those that are needed.

    The gradient's kernel gives three arrays, of queries, keys and values, and computes the scores again.
    """
    scope, is_of_jax = _KERNEL.search(node.name), node.op == _KERNELS[0]
    if scope is None:
        if is_of_jax:
            raise _NotCountable
        return 0.0, 0.0  # what replicas exchange
    is_gradient = _GRADIENT.search(node.name)
    if is_gradient and is_of_jax:
        inputs = [_shape(one) for one in node.attr["_output_shapes"].list.shape]
    query, key = map(_static, inputs[:2])
    product = 2.0 * math.prod(query) * key[1] * (0.5 if scope[2] == CAUSAL_SCOPE else 1.0)
    return (product, 5 * product) if is_gradient else (0.0, 2 * product)


def _of_einsum(equation: str, inputs: Sequence[_Shape]) -> float:
    sizes: dict[str, int] = {}
    for labels, shape in zip(equation.partition("->")[0].split(","), inputs, strict=True):
        if "." in labels:
            raise _NotCountable
        sizes |= dict(zip(labels, _static(shape), strict=True))
    return 2.0 * math.prod(sizes.values()) if len(inputs) > 1 else 0.0


def _input(name: str, shapes: Mapping[str, list[_Shape]]) -> _Shape:
    producer, *rest = name.split(":")
    found = shapes.get(producer, [])
    # Inside functions an output is named as well: TensorListPopBack gives the list and then its last "tensor".
    place = len(found) - 1 if rest[:1] == ["tensor"] else int(rest[-1]) if rest else 0
    return found[place] if place < len(found) else None


def _output(node: Any) -> _Shape:
    told = node.attr["_output_shapes"].list.shape
    return _shape(told[0]) if told else None


def _shape(proto: Any) -> _Shape:
    return None if proto.unknown_rank else [dimension.size for dimension in proto.dim]


def _static(shape: _Shape) -> list[int]:
    if shape is None or any(size < 0 for size in shape):
        raise _NotCountable
    return shape
