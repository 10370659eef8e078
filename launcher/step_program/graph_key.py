"""The key of what is made from a traced graph: the same in every process that traces the same, and else another one."""

import hashlib
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import tensorflow as tf

# Flags of XLA and of its bridge from TensorFlow.
_ENVIRONMENT = ("XLA_FLAGS", "TF_XLA_FLAGS")
# Told to `tf.custom_gradient` and nobody else, with a number that counts up in a process.
_OF_TRACING = "_gradient_op_type"


def key_of(graph: tf.Graph, *made_from: object) -> str:
    """The key of what this code and the installed versions make of a graph.

    Args:
      made_from: whatever else it is made from, of which `repr` tells all.
    """
    definition = graph.as_graph_def()
    functions = {one.signature.name: one for one in definition.library.function}
    digests: dict[str, str] = {}

    def named(name: str) -> str:
        """A function's digest, as its name has a number that counts up in a process."""
        if name not in digests and name in functions:
            digests[name] = ""  # while it is made: of one that calls itself
            without_names(functions[name].node_def)
            functions[name].signature.name = ""
            digests[name] = hashlib.sha256(functions[name].SerializeToString(deterministic=True)).hexdigest()
        return digests.get(name, name)

    def without_names(nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
        for node in nodes:
            node.op = named(node.op)
            node.attr.pop(_OF_TRACING, None)
            for value in node.attr.values():
                for called in (*value.list.func, *([value.func] if value.HasField("func") else ())):
                    called.name = named(called.name)

    without_names(definition.node)
    definition.library.Clear()
    settings = [
        *(metadata.version(name) for name in ("jax", "jaxlib")),
        tf.version.GIT_VERSION,
        tf.version.VERSION,
        tf.config.experimental.tensor_float_32_execution_enabled(),
        *map(os.environ.get, _ENVIRONMENT),
    ]
    digest = hashlib.sha256(repr((settings, made_from)).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(definition.SerializeToString(deterministic=True))
    return digest.hexdigest()
