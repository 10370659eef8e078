"""Evaluation counts every example once: the same result on any topology and batch size, and NumPy's."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from launcher.data.pipeline import ArrayExamples, RandomAccessData
from launcher.machine import strategy as strategy_lib
from launcher.machine.cluster import resolve
from launcher.run import session
from launcher.run.loading import Machine
from launcher.run.recipe import Recipe
from launcher.runtime.tensorflow import TfRuntime

FEATURES = np.random.default_rng(0).normal(size=(101, 6)).astype("float32")
LABELS = np.random.default_rng(1).integers(0, 3, 101).astype("int32")


class Blobs:
    def data(self):
        return RandomAccessData(
            train=ArrayExamples({"x": FEATURES, "y": LABELS}), evaluation=ArrayExamples({"x": FEATURES, "y": LABELS})
        )

    def model(self):
        return keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)])

    def loss(self, model, batch, training):
        logits, weight = model(batch["x"], training=training), batch["weight"]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits)
        right = tf.cast(tf.equal(tf.argmax(logits, -1, tf.int32), batch["y"]), tf.float32)
        return tf.reduce_sum(losses * weight), tf.reduce_sum(weight), {"accuracy": tf.reduce_sum(right * weight)}


def evaluator(replicas, batch_size):
    recipe = Recipe(
        task=Blobs(),
        optimizer=lambda: keras.optimizers.SGD(0.1),
        global_batch_size=4,
        steps=1,
        eval_batch_size=batch_size,
    )
    resolved = Machine(environ={}, replicas=replicas).plan_of(recipe)
    return session.build_on(TfRuntime(strategy_lib.build(resolved.strategy, resolve({}))), resolved)


@pytest.mark.parametrize(("replicas", "batch_size"), [(1, 101), (1, 7), (2, 100), (4, 32), (4, 4), (2, 300)])
def test_every_example_counts_once_whatever_the_topology_and_batch(replicas, batch_size):
    made = evaluator(replicas, batch_size)
    kernel, bias = (variable.numpy().astype("float64") for variable in made.model.trainable_variables)
    logits = FEATURES @ kernel + bias
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = made.evaluator.evaluate()
    assert found["examples"] == 101
    np.testing.assert_allclose(found["loss"], -log_probabilities[np.arange(101), LABELS].mean(), rtol=1e-5)
    assert found["accuracy"] == pytest.approx(np.mean(logits.argmax(axis=1) == LABELS), abs=1e-7)
    assert made.evaluator.evaluate() == found
