"""RandomCrop gives a part of its own size where it draws, and what Keras's gives."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from launcher.tasks.keras_private import crop_to_known_size


def test_a_crop_is_keras_own_and_of_a_size_that_is_known():
    images = np.arange(2 * 7 * 9 * 3, dtype="float32").reshape(2, 7, 9, 3)
    layer = keras.layers.RandomCrop(4, 5)
    place = tf.constant(2), tf.constant(3)
    expected = layer.transform_images(tf.constant(images), place)
    crop_to_known_size(layer)
    made = tf.function(lambda one, *place: layer.transform_images(one, place))
    spec = tf.TensorSpec([None, 7, 9, 3], tf.uint8)
    assert made.get_concrete_function(spec, *place).structured_outputs.shape.as_list() == [None, 4, 5, 3]
    np.testing.assert_array_equal(made(tf.constant(images), *place), expected)
    np.testing.assert_array_equal(expected, images[:, 2:6, 3:8])
