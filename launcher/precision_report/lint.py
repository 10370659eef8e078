"""The lint: what in a model or a recipe does not go together with 16 bits, each with the layer and the remedy."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from launcher.run import layer_lint
from launcher.run.layer_lint import LintFinding
from launcher.run.session import Session
from launcher.step.layers import walk
from launcher.step.precision import DynamicLossScale, of_keras
from launcher.watch import gradient_taps

_SUMS = ("Sum", "Mean")
_DRAWS = ("StatelessRandomUniformV2", "StatelessRandomNormalV2", "RandomUniform", "RandomStandardNormal")
# What is wrong with an operation in 16 bits: the rule, what was seen, and what to do.
_SUM = (
    "loss in 16 bits",
    "a sum to one number, as of a loss, is computed in {dtype}",
    "cast to float32 before the sum",
)
_LOSS = ("loss in 16 bits", "the loss is computed in {dtype}", "cast the logits to float32 before the loss")
_SOFTMAX = ("softmax in 16 bits", "a softmax is computed in {dtype}", "compute it in float32, or give dtype='float32'")
_DRAWN = (
    "draws in 16 bits",
    "random numbers are drawn as {dtype}, which has few (bfloat16 128), and others than float32's are, so that the "
    "errors of the 16-bit pass in this report are those of other masks, too",
    "draw float32 numbers, use keras.layers.Dropout, or report with dropout at 0",
)
_OPERATIONS = {
    **dict.fromkeys(_SUMS, _SUM),
    "SoftmaxCrossEntropyWithLogits": _LOSS,
    "SparseSoftmaxCrossEntropyWithLogits": _LOSS,
    "Softmax": _SOFTMAX,
    "LogSoftmax": _SOFTMAX,
    "SquaredDifference": (
        "statistics in 16 bits",
        "squared differences, as in a variance, are computed in {dtype}",
        "cast to float32 before the mean and the variance, and back after",
    ),
    "Cumsum": (
        "running sum in 16 bits",
        "a running sum is computed in {dtype}: in bfloat16, one of ones stops at 256",
        "cast to float32 before it, and back after",
    ),
    **dict.fromkeys(_DRAWS, _DRAWN),
}
_NARROW = (tf.float16, tf.bfloat16)


def lint(built: Session, graph: tf.compat.v1.GraphDef, seen: Iterable[str]) -> list[LintFinding]:
    """Looks for everything in a session under the policy that is examined, the worst first.

    Args:
      graph: of a training pass.
      seen: paths of the leaf layers whose gradients by their outputs were seen in it.
    """
    policy = built.plan.policy
    found = [
        *layer_lint.of_run(built.model, built.plan.recipe.task, measured=True),
        *narrow_operations(graph),
        *outside_scope(built.runtime.host.strategy, built.model),
        *needless_scale(built.plan.loss_scale, policy),
        *overrides(built.model, policy),
        *unseen(built.model, seen),
    ]
    return sorted(found, key=lambda finding: finding.level != "warn")


def narrow_operations(graph: tf.compat.v1.GraphDef) -> Iterator[LintFinding]:
    """Softmax, losses and variances that are computed in 16 bits, wherever in the forward pass."""
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    seen: set[tuple[str, str]] = set()
    for node in nodes:
        kind = node.attr["dtype" if node.op in _DRAWS else "T"].type
        dtype = tf.dtypes.as_dtype(kind) if kind else None
        if dtype not in _NARROW or "gradient_tape/" in node.name or (node.op in _SUMS and not _is_scalar(node)):
            continue
        if node.op in _OPERATIONS:
            (rule, text, fix), path = _OPERATIONS[node.op], _place(node.name)
            if (rule, path) not in seen:
                seen.add((rule, path))
                level = "info" if node.op in _DRAWS else "warn"
                yield LintFinding(rule=rule, level=level, path=path, text=text.format(dtype=dtype.name), fix=fix)


def unseen(model: keras.Model, seen: Iterable[str]) -> Iterator[LintFinding]:
    """Leaf layers with weights whose gradients no tap saw; `seen` are the paths of the others."""
    known = set(seen)
    for path, layer in gradient_taps.named_leaves(model).items():
        if layer.trainable_variables and path not in known:
            yield LintFinding(
                rule="not seen",
                level="info",
                path=path,
                text="the gradient by its outputs did not come to light: the layer is computed again in the backward "
                "pass, or the loss does not depend on it, or its methods are called instead of the layer itself",
                fix="turn rematerialisation off for the report (train.rematerialize = False); the gradients of the "
                "layer's weights are there all the same",
            )


def outside_scope(strategy: tf.distribute.Strategy, model: keras.Model) -> Iterator[LintFinding]:
    """Variables that the strategy does not know."""
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            yield LintFinding(
                rule="outside the scope",
                path=variable.path,
                text="the variable was made outside of the strategy's scope: replicas do not get copies of their own",
                fix="make every layer inside the task's model(), not in its constructor or at import",
            )


def needless_scale(loss_scale: Any, policy: str) -> Iterator[LintFinding]:
    """A loss scale where there is nothing to save."""
    initial = float(loss_scale.initial().scale)
    if policy == "mixed_float16" or (initial == 1 and not isinstance(loss_scale, DynamicLossScale)):
        return
    yield LintFinding(
        rule="needless loss scale",
        text=f"the loss is scaled by {initial:g} under {policy}, whose exponents are those of float32",
        fix="train.loss_scale = 'none' (or 'auto')",
    )


def overrides(model: keras.Model, policy: str) -> Iterator[LintFinding]:
    """Layers that compute in another dtype than the policy's."""
    expected = keras.dtype_policies.get(of_keras(policy)).compute_dtype
    for found in walk(model):
        layer = found.layer
        computes = found.is_leaf and not isinstance(layer, (keras.layers.InputLayer, keras.Model))
        if computes and layer.compute_dtype != expected:
            yield LintFinding(
                rule="dtype override",
                level="info",
                path=found.path,
                text=f"computes in {layer.compute_dtype}, the policy in {expected}",
                fix="right for outputs, softmax and sums over many; elsewhere, leave dtype to the policy",
            )


def _is_scalar(node: Any) -> bool:
    """Whether an operation of a graph with shapes gives one number."""
    shapes = node.attr["_output_shapes"].list.shape
    return bool(shapes) and not shapes[0].unknown_rank and not shapes[0].dim


def _place(name: str) -> str:
    """The layer's scope in an operation's name, the same for every replica."""
    parts = [part for part in name.split("/")[:-1] if not part.startswith("replica_")]
    return "/".join(parts) or name
