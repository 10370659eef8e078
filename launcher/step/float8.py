"""float8: matrix products of 8-bit floats in the layers that Keras has them for, and which of a model's layers may.

Operands are E4M3 and gradients E5M2 (Micikevicius et al. 2022, arXiv 2209.05433), each times a scale that the largest
values of the 1,024 steps before give: Keras's own `quantize("float8")`, whose scales `launcher.step.statistics` puts
together. All else is as under mixed_bfloat16.
"""

import math
import re
from collections.abc import Mapping, Sequence

import keras

from launcher.errors import UsageError
from launcher.models.transformer.layers import Projection
from launcher.reporting.units import first
from launcher.step.layer_policies import BINDING, is_graph, making_outputs, overridden
from launcher.step.layers import Placed, walk
from launcher.step.precision import FLOAT8

_MULTIPLE = 16  # of both sizes of a matrix: what cuBLAS multiplies in 8 bits
_LAYERS = keras.layers.Dense, keras.layers.EinsumDense, Projection  # in others, what call() does would be left out


def apply(model: keras.Model, overrides: Mapping[str, str], *, of_run: bool) -> str:
    """Has layers of a built model, whose policies are set, multiply in 8 bits, and tells which; "" for none.

    Args:
      overrides: `train.precision_overrides`; what they give float8 takes it, or is refused.
      of_run: whether all others take it that may.

    Raises:
      UsageError: a layer that is named cannot, or none of the model can.
    """
    named = {id(item.layer): overrides[pattern] for item, pattern in overridden(model, overrides)}
    asked = {one for one, policy in named.items() if policy == FLOAT8}
    if not (of_run or asked):
        return ""
    found = [item for item in walk(model) if type(item.layer) in _LAYERS]
    outputs = {id(layer) for layer in (*making_outputs(model), *_last(model))}
    taken, left = [], dict[str, list[str]]()
    for item in found:
        layer = item.layer
        why = unfit(layer)
        if id(layer) in asked and (why or layer is getattr(model, "head", None)):
            raise UsageError(f"{BINDING}: {item.path} cannot multiply in float8: {why or 'the loss multiplies by it'}")
        if id(layer) not in asked:
            why = "by its own policy" if not of_run or id(layer) in named else why
            why = why or ("makes the outputs" if id(layer) in outputs else "")
        if why:
            left.setdefault(why, []).append(item.path)
            continue
        taken.append(item)
        if layer.quantization_mode is None:
            if getattr(getattr(model, "optimizer", None), "built", False):
                raise UsageError(
                    f"{model.name} has been trained in 16 bits: call its quantize('float8') and compile it"
                )
            layer.quantize("float8", type_check=False)
    if not taken:
        raise UsageError(
            f"train.precision = {FLOAT8!r}: no layer of {model.name} can multiply in float8"
            + "".join(f"; {first(paths)}: {why}" for why, paths in left.items())
        )
    _keep_policies(taken)
    others = "".join(f"; in 16 bits {first(paths)}: {why}" for why, paths in left.items())
    return f"float8: {len(taken)} of {len(found)} Dense and EinsumDense layers multiply in 8 bits{others}"


def unfit(layer: keras.layers.Layer) -> str:
    """Why a Dense or EinsumDense layer cannot multiply in float8; "" where it can."""
    if layer.quantization_mode not in (None, "float8"):
        return f"is {layer.quantization_mode} already"
    if layer.lora_enabled:
        return "Keras has no LoRA in float8"
    if not layer.trainable:
        return "frozen, so that its scales would never move"
    if layer.compute_dtype != "bfloat16":
        return f"computes in {layer.compute_dtype}"
    sizes = _sizes(layer)
    if any(size % _MULTIPLE for size in sizes):
        return f"{sizes[0]} x {sizes[1]} are no multiples of {_MULTIPLE}"
    return ""


def _sizes(layer: keras.layers.Layer) -> tuple[int, int]:
    """The size that a product sums over, and that of its outputs."""
    shape = layer.kernel.shape
    if isinstance(layer, keras.layers.Dense):
        return shape[0], shape[1]
    _, axes, kept = re.split(",|->", layer.equation)
    sums, outputs = (
        math.prod(size for axis, size in zip(axes, shape, strict=True) if (axis in kept) is is_kept)
        for is_kept in (False, True)
    )
    return sums, outputs


def _last(model: keras.Model) -> list[keras.layers.Layer]:
    """The last layer with weights, behind which there may be an activation."""
    return [item.layer for item in walk(model) if item.is_leaf and item.layer.weights][-1:]


def _keep_policies(taken: Sequence[Placed]) -> None:
    """Has layers that make others, as attention does, say in their config which of those are float8."""
    holders = {id(outer): outer for item in taken for outer in item.around if not is_graph(outer)}
    for number, outer in holders.items():
        inside = [item for item in taken if any(id(one) == number for one in item.around)]
        # The name of a model of a class is another one when it is loaded. Keras 3.8 takes a pattern for a beginning.
        patterns = {f"[^/]+/{re.escape(item.path.partition('/')[2])}$": item.layer.dtype_policy for item in inside}
        outer.dtype_policy = keras.dtype_policies.DTypePolicyMap(outer.dtype_policy.name, patterns)
