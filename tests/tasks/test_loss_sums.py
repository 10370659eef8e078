"""What a task's loss() may return: sums as float32 scalars, of tensors or of Python's numbers; all else is named."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from small_run import GivenTask, build, linear_batches, linear_model, train

from launcher.errors import UsageError


def float_losses(batch):
    return batch["x"][:, 0] * batch["weight"]


MISTAKES = {
    "one mean": (lambda b: tf.reduce_mean(float_losses(b)), "must return"),
    "no metrics": (lambda b: (tf.reduce_sum(float_losses(b)), tf.reduce_sum(b["weight"])), "must return"),
    "a list of metrics": (lambda b: (tf.reduce_sum(float_losses(b)), tf.reduce_sum(b["weight"]), [1.0]), "must return"),
    "nothing": (lambda b: None, "must return"),
    "losses of examples": (lambda b: (float_losses(b), tf.reduce_sum(b["weight"]), {}), r"the loss .* shape \(4,\)"),
    "weights of examples": (lambda b: (tf.reduce_sum(float_losses(b)), b["weight"], {}), r"the weight .* shape \(4,\)"),
    "a loss of one element": (
        lambda b: (tf.reshape(tf.reduce_sum(float_losses(b)), [1]), tf.reduce_sum(b["weight"]), {}),
        r"the loss .* shape \(1,\)",
    ),
    "float16": (
        lambda b: (tf.reduce_sum(tf.cast(float_losses(b), tf.float16)), tf.reduce_sum(b["weight"]), {}),
        "the loss .* got float16",
    ),
    "a count for the weight": (
        lambda b: (tf.reduce_sum(float_losses(b)), tf.shape(b["weight"])[0], {}),
        "the weight .* got int32",
    ),
    "a metric of integers": (
        lambda b: (tf.reduce_sum(float_losses(b)), tf.reduce_sum(b["weight"]), {"seen": tf.shape(b["weight"])[0]}),
        "metric 'seen' .* got int32",
    ),
}


@pytest.mark.parametrize(
    ("mistake", "replicas"),
    repeated_but(
        [("one mean", 2), *((mistake, 1) for mistake in MISTAKES)],
        [(mistake, replicas) for mistake in MISTAKES for replicas in (1, 2)],
    ),
)
def test_a_loss_that_is_no_sum_in_float32_is_refused_with_what_it_is(mistake, replicas):
    function, said = MISTAKES[mistake]
    task = GivenTask(
        linear_batches(np.ones((2, 4 * replicas, 2))), lambda: linear_model(2), lambda model, batch, _: function(batch)
    )
    made = build(task, replicas)
    with pytest.raises(UsageError, match=said):
        made.trainer.trace(made.trainer.batches(task.data()))


@pytest.mark.parametrize(
    ("replicas", "microbatches", "kind"),
    repeated_but(
        [(1, 1, float), (2, 2, np.float32)],
        [(*topology, kind) for topology in [(1, 1), (2, 1), (2, 2)] for kind in (float, np.float32)],
    ),
)
def test_a_weight_or_a_metric_may_be_a_number_of_python(replicas, microbatches, kind):
    """A task whose batches are never padded may well write the size of its batch."""

    def loss(model, batch, training):
        outputs = model(batch["x"], training=training)
        return -tf.reduce_sum(outputs), kind(batch["x"].shape[0]), {"half": kind(0.5)}

    task = GivenTask(linear_batches(np.ones((2, 8, 2))), lambda: linear_model(2), loss)
    made = build(task, replicas, microbatches)
    records = train(made)
    np.testing.assert_array_equal(records.weight, [8.0, 8.0])
    np.testing.assert_array_equal(records.metrics["half"], np.full(2, 0.5 * replicas * microbatches))
    np.testing.assert_array_equal(made.model.weights[0].numpy(), [[2.0], [2.0]])
