"""Weights of classes for labels as Keras's `fit` reads them, by NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from launcher.errors import UsageError
from launcher.tasks.keras_weights import class_weights

CLASSES = {-1: 0.0, 0: 2.0, 2: 5.0}
NUMBERS = np.random.default_rng(0).integers(-2, 5, (6, 2, 3))  # also of classes that are not named, at both ends
WANTED = np.vectorize(lambda one: CLASSES.get(one, 1.0))(NUMBERS)
ONE_HOT = np.eye(4)[NUMBERS % 4]


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        (NUMBERS[:, 0, 0], WANTED[:, 0, 0]),
        (NUMBERS[:, 0, :1].astype(np.int16), WANTED[:, 0, 0]),
        (NUMBERS[:, 0, :1] + np.float32(0.4), WANTED[:, 0, 0]),
        (NUMBERS[..., None] - np.float64(0.4), WANTED),
        (ONE_HOT, np.vectorize(lambda one: CLASSES.get(one, 1.0))(NUMBERS % 4)),
        (NUMBERS[:, 0, :1] > 0, np.where(NUMBERS[:, 0, 0] > 0, 1.0, 2.0)),
    ],
)
def test_a_label_weighs_what_its_class_does_and_1_if_that_is_not_named(labels, wanted):
    np.testing.assert_array_equal(class_weights(tf.constant(labels), CLASSES, None), wanted)
    own = np.arange(6.0)
    found = class_weights(tf.constant(labels), CLASSES, tf.constant(own))
    np.testing.assert_array_equal(found, (wanted.T * own).T)


@pytest.mark.parametrize(
    ("labels", "outputs", "says"),
    [
        (None, np.zeros((6, 4)), "labels of a model with one output"),
        ({"a": tf.zeros([6]), "b": tf.zeros([6])}, None, "labels of a model with one output"),
        (tf.constant(NUMBERS), np.zeros((6, 2, 3, 4)), r"they have shape \[None, 2, 3\]; give y\[..., None\]"),
        (tf.constant(NUMBERS[0]), np.zeros((2, 3, 4)), r"they have shape \[None, 3\]; give y\[..., None\]"),
    ],
)
def test_labels_without_classes_to_weigh_are_refused(labels, outputs, says):
    with pytest.raises(UsageError, match=says):
        class_weights(labels, CLASSES, None, None if outputs is None else tf.constant(outputs))
