"""AutoGraph is kept away from Launcher's own functions, and serves those that users bring."""

import numpy as np
import pytest
import tensorflow as tf
from small_run import GivenTask, build, linear_batches, linear_model, train

from launcher.machine.as_written import as_written


def positive(value):
    if value > 0:
        return tf.constant(1.0)
    return tf.constant(-1.0)


def test_a_function_runs_as_it_is_written():
    tensor = tf.constant(2.0)
    assert tf.function(positive)(tensor) == 1.0
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(as_written(positive))(tensor)
    assert as_written(positive)(2.0) == 1.0
    assert as_written(positive).__name__ == "positive"


@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 1), (2, 2)])
def test_a_loss_that_users_bring_may_branch_on_tensors(replicas, microbatches):
    def branching(model, batch, training):
        outputs = model(batch["x"], training=training)
        if tf.reduce_sum(batch["x"]) > 0.0:
            loss = tf.reduce_sum(outputs)
        else:
            loss = -3.0 * tf.reduce_sum(outputs)
        return loss, tf.reduce_sum(batch["weight"]), {}

    def selecting(model, batch, training):
        total = tf.reduce_sum(model(batch["x"], training=training))
        loss = tf.where(tf.reduce_sum(batch["x"]) > 0.0, total, -3.0 * total)
        return loss, tf.reduce_sum(batch["weight"]), {}

    batches = linear_batches(np.ones((3, 4, 2)) * np.array([1.0, -1.0, -1.0])[:, None, None])
    weights = []
    for loss in (branching, selecting):
        made = build(GivenTask(batches, lambda: linear_model(2), loss), replicas, microbatches)
        train(made)
        weights.append([weight.numpy() for weight in made.model.weights])
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.any(ours != 0)
