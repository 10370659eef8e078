"""The random generator that a TPU uses, put into a step that TensorFlow lowered for a CPU.

`tf.random.stateless_*`, and so Keras's dropout, leave the algorithm to the device unless the caller names one. For CPUs
and GPUs that is Philox, which XLA writes out as arithmetic; any other device, as a TPU, gets XLA's RNG_DEFAULT, which a
TPU has in hardware, with a state of the key and one word of counter instead of two (`DefaultRngAlgForDeviceType` and
`GetCounterSize` in tensorflow/compiler/tf2xla/kernels).
"""

import re
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from launcher.step import op_source
from launcher.step_program.jax_parts import JaxParts

# Leans on TensorFlow: stateless random operations have their algorithm as input 3. Noticed by
# tests/step_program/test_lowering.py. Then: read the operation's new definition; only preflight's time of dropout is
# affected.
_RANDOM, _ALGORITHM = "StatelessRandom", 3  # operations with an algorithm, and the place of that input
_PHILOX = 1  # tf.random.Algorithm's
_STATE = 2


def names_of_philox(graph: tf.Graph) -> frozenset[str]:
    """Names of the operations whose caller asked for Philox, which a TPU then computes, too."""
    definition, found = graph.as_graph_def(), set()
    for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
        constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
        for node in nodes:
            if node.op.startswith(_RANDOM) and len(node.input) > _ALGORITHM:
                given = constants.get(node.input[_ALGORITHM].partition(":")[0])
                if given is not None and int(tf.make_ndarray(given)) == _PHILOX:
                    found.add(node.name)
    return frozenset(found)


def use_default_generator(jax: JaxParts, generators: Iterable[Any], kept: frozenset[str]) -> None:
    """Replaces Philox by RNG_DEFAULT in "stablehlo.rng_bit_generator" operations, but for those named by `kept`."""
    default = jax.stablehlo.RngAlgorithmAttr.get("DEFAULT")
    for one in generators:
        names = {op_source.inner_name(name) for name in re.findall(r'"([^"]+)"', str(one.location))}
        if "PHILOX" not in str(one.attributes["rng_algorithm"]) or names & kept:
            continue
        with jax.ir.InsertionPoint(one), one.location:
            state = jax.stablehlo.slice(one.operands[0], [0], [_STATE], [1])
            new = jax.stablehlo.RngBitGeneratorOp(state.type, one.results[1].type, default, state)
            old_state = one.results[0]
            if any(True for _ in old_state.uses):
                rest = jax.stablehlo.slice(one.operands[0], [_STATE], [old_state.type.shape[0]], [1])
                old_state.replace_all_uses_with(jax.stablehlo.concatenate([new.results[0], rest], 0))
        one.results[1].replace_all_uses_with(new.results[1])
        one.erase()
