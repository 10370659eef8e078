"""A batch of lines is divided among the replicas, and its answers are put together in the order of the lines."""

from __future__ import annotations

import numpy as np
import pytest
import small_run
import tensorflow as tf
from cases import repeated_but

from launcher.serving import predict

PROMPTS = np.arange(24, dtype=np.int32).reshape(8, 3)


class Doubling(small_run.GivenTask):
    """Writes each prompt's tokens, times a weight of the model that is 2."""

    def __init__(self):
        super().__init__(
            small_run.linear_batches(np.ones((1, 8, 1))), lambda: small_run.linear_model(1), small_run.negative_sum
        )
        self.shapes = []

    def generate(self, model, batch):
        self.shapes.append(batch["prompt"].shape)
        return batch["prompt"] * tf.cast(model(tf.ones([1, 1]))[0, 0], tf.int32)


@pytest.mark.parametrize(
    ("replicas", "jit_compile"),
    repeated_but([(1, False), (2, True), (4, False)], [(count, jit) for count in (1, 2, 4) for jit in (False, True)]),
)
def test_every_replica_writes_its_part_of_a_batch(replicas, jit_compile):
    task = Doubling()
    made = small_run.build(task, replicas, jit_compile=jit_compile)
    made.model.weights[0].assign([[2.0]])
    write = predict.writer(made, task.generate)
    np.testing.assert_array_equal(write({"prompt": PROMPTS}), 2 * PROMPTS)
    np.testing.assert_array_equal(write({"prompt": PROMPTS[:, :2]}), 2 * PROMPTS[:, :2])
    assert set(task.shapes) == {(8 // replicas, 3), (8 // replicas, 2)}, "of static shapes only"
