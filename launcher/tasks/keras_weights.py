"""Weights for a compiled Keras model's loss and metrics: of examples, of classes, of masks, and 0 for padding."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine.replaced import put


def weights_of(outputs: Any, sample_weight: Any, real: tf.Tensor) -> Any:
    """A weight for each output, 0 for padding, in a shape that can be multiplied by its mask."""

    def of_output(output: tf.Tensor, given: Any) -> tf.Tensor:
        weight = _of_rows(real, output)
        return weight if given is None else weight * _of_rows(given, output)

    return _for_outputs(of_output, outputs, sample_weight)


def padding_masked(outputs: Any, sample_weight: Any, real: tf.Tensor) -> tuple[Any, Any]:
    """Outputs whose masks leave out padding, too, and their weights, or None: of these, Keras takes the mean.

    Keras divides by the elements that a mask leaves.
    """

    def masked(output: tf.Tensor) -> tf.Tensor:
        # Leans on Keras: a tensor's mask is its `_keras_mask`. Noticed by tests/tasks/test_keras_metrics.py,
        # tests/modes/test_fit.py. Then: find where the new version keeps it; masked losses are wrong until then.
        copy = each_tensor(output, tf.identity)
        copy._keras_mask = _of_rows(real, output) > 0
        return copy

    def given(output: tf.Tensor, weight: Any) -> tf.Tensor | None:
        return None if weight is None else _of_rows(weight, output)

    return keras.tree.map_structure(masked, outputs), _for_outputs(given, outputs, sample_weight)


def _for_outputs(function: Callable[[tf.Tensor, Any], Any], outputs: Any, sample_weight: Any) -> Any:
    if keras.tree.is_nested(sample_weight):
        return keras.tree.map_structure(function, outputs, sample_weight)
    return keras.tree.map_structure(lambda output: function(output, sample_weight), outputs)


def _of_rows(weight: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """Weights of rows, or of what is in them, in the shape of an output's mask, or with an axis for each of its own."""
    mask = getattr(output, "_keras_mask", None)
    rank = max(1, output.shape.rank - 1) if mask is None else mask.shape.rank
    weight = tf.cast(weight, tf.float32)
    weight = tf.reshape(weight, [*weight.shape, *[1] * (rank - weight.shape.rank)])
    return weight if mask is None else weight * tf.cast(mask, tf.float32)


def class_weights(y: Any, class_weight: Mapping[int, float], sample_weight: Any, outputs: Any = None) -> tf.Tensor:
    """The weight of each label's class, 1 for one that is not named, times its example's own weight; float32.

    Args:
      y: labels as Keras's fit reads them: numbers [batch] or [batch, ..., 1], which are rounded, or one-hot
        [batch, ..., classes].
      sample_weight: [batch], or one for each label; or None.
      outputs: the model's, if the labels are to be checked against them.

    Returns:
      Weights [batch], or [batch, ...].

    Raises:
      UsageError: there are no labels, several outputs, or labels without the axis that Keras takes classes from.
    """
    if y is None or keras.tree.is_nested(y) or keras.tree.is_nested(sample_weight):
        raise UsageError("class_weight is for labels of a model with one output; give sample weights instead")
    if outputs is not None and 1 < y.shape.rank < outputs.shape.rank and y.shape[-1] != 1:
        raise UsageError(
            "class_weight takes the last axis of labels for one-hot classes, as Keras does, and they have shape "
            f"{[None, *y.shape[1:]]}; give y[..., None]"
        )
    if y.shape.rank > 1 and y.shape[-1] != 1:
        label = tf.argmax(y, axis=-1)
    else:
        label = tf.cast(tf.round(tf.cast(y[..., 0] if y.shape.rank > 1 else y, tf.float32)), tf.int64)
    low, high = min(class_weight) - 1, max(class_weight) + 1  # of classes that are not named
    table = tf.constant([class_weight.get(number, 1.0) for number in range(low, high + 1)], tf.float32)
    weights = tf.gather(table, tf.clip_by_value(label, low, high) - low)
    if sample_weight is None:
        return weights
    # Transposed, as what one has more of than the other are last axes.
    return tf.transpose(tf.transpose(weights) * tf.transpose(tf.cast(sample_weight, tf.float32)))


def each_tensor(part: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of every tensor of a nest, and of the masks and logits that Keras keeps with them; None of None."""

    def of_one(tensor: Any) -> Any:
        if tensor is None:  # an optional input
            return None
        made = function(tensor)
        # Of probabilities without their logits, a loss would be bounded.
        for name in ("_keras_mask", "_keras_logits"):
            if (beside := getattr(tensor, name, None)) is not None:
                setattr(made, name, function(beside))
        return made

    return None if part is None else keras.tree.map_structure(of_one, part)


@contextlib.contextmanager
def padding_left_out(model: keras.Model, real: tf.Tensor) -> Iterator[None]:
    """Has the compiled metrics that take no sample weights take those of padding, while a batch is traced.

    Args:
      model: a compiled one; metrics that it has otherwise are left as they are.
      real: float32 [batch], 0 for what fills the batch up.
    """

    def weighted(update: Callable[..., Any], whole: bool, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and whole:
            rest = [1] * (y_true.shape.rank - 1)
            sample_weight = tf.reshape(real, [-1, *rest]) * tf.ones(y_true.shape)
        elif sample_weight is None:
            sample_weight = real if getattr(y_pred, "_keras_mask", None) is None else _of_rows(real, y_pred)
        return update(y_true, y_pred, sample_weight=sample_weight)

    with contextlib.ExitStack() as undo:
        for group in model.metrics:
            for metric in getattr(group, "metrics", []) if group.name == "compile_metrics" else ():
                # Those on confusion matrices of many labels an example take as many weights.
                whole = isinstance(metric, keras.metrics.IoU)
                put(undo, metric, "update_state", functools.partial(weighted, metric.update_state, whole))
        yield
