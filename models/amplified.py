"""A network built to underflow: 2^k times the activations, hence 2^-k times their gradients, and the same function."""

from __future__ import annotations

from collections.abc import Sequence

import gin
import keras

from .transformer.dimensions import check_images


@gin.configurable
def amplified_mlp(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    units: Sequence[int] = (64, 4, 4096),
    log2_amplification: int = 13,
) -> keras.Model:
    """Builds a multi-layer perceptron whose activation gradients lie below float16's range.

    The images are multiplied by 2^k before the first layer, and the last hidden layer's output by 2^-k, in float32,
    before the logits. The layers between have leaky ReLUs and no biases, so that a factor passes through them as it is:
    logits, loss and gradients of the weights are those of k = 0, in float32 to the last bit. Only the gradients of the
    activations between are 2^k times smaller, as they are wherever features come in a small unit (raw pixels, counts).

    At the start such a gradient is about 2^-9 / batch * 2^-k, 2^-30 with the defaults and a batch of 256, of which
    float16 makes a zero, and so of everything further back, unless the loss is scaled.

    Args:
        image_shape: Height and width in pixels, and channels.
        num_classes: Number of logits.
        units: Width of each hidden layer.
        log2_amplification: The k above. float16 ends at 2^16, and trained activations reach some 2^2 times 2^k.

    Returns:
        A functional model from images, float32 [batch, height, width, channels], to logits, float32
        [batch, num_classes], whose hidden layers `dense1`, `dense2`, ... compute in the policy's dtype.
    """
    check_images(image_shape, num_classes)
    if not units or min(units) < 1:
        raise ValueError(f"units must be at least one width of at least 1, and is {units}.")

    images = keras.Input(shape=tuple(image_shape), dtype="float32", name="image")
    features = keras.layers.Flatten(name="flatten")(images)
    features = keras.layers.Rescaling(2.0**log2_amplification, name="amplify")(features)
    for index, width in enumerate(units, start=1):
        # Half of He's standard deviation: activations that grow in training have room below 2^16.
        initializer = keras.initializers.VarianceScaling(scale=0.5, mode="fan_in")
        features = keras.layers.Dense(
            width, activation="leaky_relu", use_bias=False, kernel_initializer=initializer, name=f"dense{index}"
        )(features)
    features = keras.layers.Rescaling(2.0**-log2_amplification, dtype="float32", name="attenuate")(features)
    initializer = keras.initializers.RandomNormal(stddev=2.0**-9)
    logits = keras.layers.Dense(num_classes, kernel_initializer=initializer, dtype="float32", name="logits")(features)
    return keras.Model(images, logits, name="amplified_mlp")
