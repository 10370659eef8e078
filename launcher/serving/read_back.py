"""A model's file, opened again once it is written: whether it answers as the model does."""

import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.errors import user_code
from launcher.optimizers.weight_shards import bytes_of
from launcher.step.layers import layers_of

# How far apart answers may be, as a part of the largest: LoRA's matrices are merged into a kernel with rounding.
_TOLERANCE = {"float16": 2e-2, "bfloat16": 5e-2}
_FULL_TOLERANCE = 1e-3
_UNKNOWN_SIZE = 64  # of an axis that may have any
_ROWS = 2
_LARGEST = 2**31  # bytes
_OF_KERAS = ("keras.", "launcher.")  # which write and read what they hold; all else is looked at


def difference(model: keras.Model, path: str) -> str:
    """What a person should know where a `.keras` file, just written, is not the model; "" where it is.

    Only a model that has quantized layers, LoRA, or classes outside of Keras is asked: what Keras writes of its own
    layers is what it reads.
    """
    asked = [layer for layer in layers_of(model) if _may_differ(layer)]
    if not asked:
        return ""
    if bytes_of(model.weights) > _LARGEST:  # a second one may have no room
        rounded = any(getattr(one, "lora_enabled", False) and _quantized(one) for one in asked)
        return "LoRA's matrices are merged into quantized kernels and rounded" if rounded else ""
    own = {type(layer).__name__: type(layer) for layer in asked if _is_own(layer)}
    before = random.getstate()  # of which initializers draw their seeds
    try:
        with tf.device("CPU:0"):
            try:
                restored = keras.saving.load_model(path, own, compile=False, safe_mode=False)
            except Exception as error:  # a class whose get_config() does not tell all
                return f"it cannot be opened: {user_code.summary(error).rstrip('.')}"
            return _of_answers(model, restored)
    finally:
        random.setstate(before)


def _may_differ(layer: keras.layers.Layer) -> bool:
    return _is_own(layer) or _quantized(layer) or bool(getattr(layer, "lora_enabled", False))


def _is_own(layer: keras.layers.Layer) -> bool:
    return not type(layer).__module__.startswith(_OF_KERAS)


def _quantized(layer: keras.layers.Layer) -> bool:
    return bool(getattr(layer, "quantization_mode", None))


def _of_answers(model: keras.Model, restored: keras.Model) -> str:
    batch = _batch(model)
    if batch is None:
        return _of_weights(model, restored)
    try:
        ours, again = _answers(model, batch), _answers(model, batch)
    except Exception:  # it takes no numbers that are made up
        return _of_weights(model, restored)
    try:
        theirs = _answers(restored, batch)
    except Exception as error:
        return f"opened again, it does not answer: {user_code.summary(error).rstrip('.')}"
    if len(ours) != len(theirs):
        return "opened again, it has other outputs"
    for mine, twice, other in zip(ours, again, theirs, strict=True):
        tolerance = _TOLERANCE.get(mine.dtype.name, _FULL_TOLERANCE)
        if mine.shape != other.shape:
            return f"opened again, it answers with the shape {other.shape} for {mine.shape}"
        mine, twice, other = (np.nan_to_num(one.astype(np.float64)) for one in (mine, twice, other))
        largest, apart = np.abs(mine).max(initial=0.0), np.abs(mine - other).max(initial=0.0)
        if apart > tolerance * largest and np.array_equal(mine, twice):
            return (
                f"opened again, it answers one batch otherwise, by up to {apart:.2g} where the largest is {largest:.2g}"
            )
    return ""


def _of_weights(model: keras.Model, restored: keras.Model) -> str:
    """The weights that differ, of a model that takes no batch of numbers; not where LoRA's are merged."""
    if any(getattr(layer, "lora_enabled", False) for layer in layers_of(model)):
        return "it was not asked whether it answers alike, and LoRA's matrices are merged into its kernels"
    pairs = zip(model.weights, restored.weights, strict=False)
    other = [mine.path for mine, theirs in pairs if not np.array_equal(_array(mine), _array(theirs), equal_nan=True)]
    if len(model.weights) != len(restored.weights):
        return f"opened again, it has {len(restored.weights)} weights for {len(model.weights)}"
    return f"opened again, it has other values of {other[0]}" if other else ""


def _array(weight: keras.Variable) -> np.ndarray:
    array = np.asarray(tf.convert_to_tensor(weight.value))
    return array if array.dtype.kind in "biu" else array.astype(np.float64)


def _answers(model: keras.Model, batch: Any) -> list[np.ndarray]:
    with keras.StatelessScope():  # what it counts and draws is as it was, afterwards
        outputs = model(batch, training=False)
    return [np.asarray(one) for one in keras.tree.flatten(outputs)]


def _batch(model: keras.Model) -> Any:
    """A few rows of numbers for a functional or Sequential model; None for any other."""
    if not getattr(model, "inputs", None):
        return None
    structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.tree.map_structure(_numbers, structure)


def _numbers(tensor: Any) -> tf.Tensor:
    shape = [_ROWS, *(_UNKNOWN_SIZE if size is None else int(size) for size in tensor.shape[1:])]
    draw = np.random.default_rng(0)
    if keras.backend.is_float_dtype(tensor.dtype):
        return tf.constant(draw.normal(size=shape), tensor.dtype)
    return tf.constant(draw.integers(0, 2, shape), tensor.dtype)
