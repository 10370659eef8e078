"""The fully connected network of TensorFlow's mixed precision guide."""

from __future__ import annotations

import gin
import keras

from .transformer.dimensions import at_least, check_images


@gin.configurable
def mlp(
    *, image_shape: tuple[int, int, int], num_classes: int, units: int = 4096, layers: int = 2, activation: str = "relu"
) -> keras.Model:
    """Builds a multi-layer perceptron for image classification.

    Wide matrices make it the network of the guide https://www.tensorflow.org/guide/mixed_precision: nearly all of its
    time goes into matrix products, which is where 16 bits pay. It has no normalisation and no state.

    Args:
        image_shape: Height and width in pixels, and channels.
        num_classes: Number of logits.
        units: Width of each hidden layer; multiples of 8 (float16) or 128 (TPU) run fastest.
        layers: Number of hidden layers.
        activation: Keras's name of the hidden layers' activation.

    Returns:
        A functional model from images, float32 [batch, height, width, channels], to logits, float32
        [batch, num_classes], under any dtype policy; the hidden layers `dense1`, `dense2`, ... compute in the policy's
        dtype.
    """
    check_images(image_shape, num_classes)
    at_least(units=(units, 1), layers=(layers, 0))
    try:
        keras.activations.get(activation)
    except ValueError:
        raise ValueError(f"activation must be a name that Keras knows, as 'relu', and is {activation!r}.") from None

    images = keras.Input(shape=tuple(image_shape), dtype="float32", name="image")
    features = keras.layers.Flatten(name="flatten")(images)
    for index in range(1, layers + 1):
        features = keras.layers.Dense(units, activation=activation, name=f"dense{index}")(features)
    logits = keras.layers.Dense(num_classes, dtype="float32", name="logits")(features)
    return keras.Model(images, logits, name="mlp")
