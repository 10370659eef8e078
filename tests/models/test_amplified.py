"""The network built to underflow: the same function for every amplification, and gradients where it says they are."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from launcher.models.amplified import amplified_mlp

SHAPE = {"image_shape": (4, 4, 1), "num_classes": 3, "units": (8, 2, 16)}
BATCH = 32


def gradients(amplification: int, **arguments):
    """Gradients of the mean loss over a batch by the weights and by the activations of the last hidden layer."""
    keras.utils.set_random_seed(1)
    model = amplified_mlp(**SHAPE | arguments, log2_amplification=amplification)
    random = np.random.default_rng(0)
    images = random.normal(size=(BATCH, *model.input_shape[1:])).astype(np.float32)
    labels = random.integers(0, model.output_shape[-1], BATCH)
    body = keras.Model(model.inputs, model.layers[-3].output)
    with tf.GradientTape() as tape:
        features = body([images])
        tape.watch(features)
        logits = model.get_layer("logits")(model.get_layer("attenuate")(features))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_mean(losses)
    *weights, activations = tape.gradient(loss, [*model.trainable_weights, features])
    return logits.numpy(), [gradient.numpy() for gradient in weights], activations.numpy()


def test_logits_and_gradients_of_weights_are_bitwise_those_without_amplification():
    logits, weights, activations = gradients(0)
    amplified_logits, amplified_weights, amplified_activations = gradients(13)
    np.testing.assert_array_equal(amplified_logits, logits)
    for amplified, plain in zip(amplified_weights, weights, strict=True):
        np.testing.assert_array_equal(amplified, plain)
    np.testing.assert_array_equal(amplified_activations * 2.0**13, activations)
    assert np.any(activations)


def test_at_the_start_no_gradient_of_an_activation_of_the_last_layer_fits_float16():
    *_, activations = gradients(13, image_shape=(8, 8, 1), num_classes=10, units=(64, 4, 4096))
    at_batch_256 = np.abs(activations[activations != 0]) * BATCH / 256
    assert 2.0**-32 < np.median(at_batch_256) < 2.0**-28
    assert np.max(at_batch_256) < 2.0**-25


def test_hidden_layers_follow_the_policy_and_what_undoes_the_amplification_is_float32():
    keras.config.set_dtype_policy("mixed_float16")
    model = amplified_mlp(**SHAPE)
    assert {name: model.get_layer(name).compute_dtype for name in ("amplify", "dense3", "attenuate", "logits")} == {
        "amplify": "float16",
        "dense3": "float16",
        "attenuate": "float32",
        "logits": "float32",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_shape": (8, 8)}, r"image_shape must be .* \(8, 8\)"),
        ({"num_classes": 0}, "num_classes must be at least 1, and is 0"),
        ({"units": ()}, r"units must be .* and is \(\)"),
        ({"units": (8, 0)}, r"units must be .* and is \(8, 0\)"),
    ],
)
def test_impossible_networks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        amplified_mlp(**SHAPE | arguments)
