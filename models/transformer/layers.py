"""Parts of both transformers: embeddings, normalisation, dropout, feed-forward networks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


def sizes(tensor: tf.Tensor) -> list[int | tf.Tensor]:
    """The shape, as numbers where they are known."""
    dynamic = tf.shape(tensor)
    return [dynamic[axis] if size is None else size for axis, size in enumerate(tensor.shape)]


class Projection(keras.layers.Dense):
    """A dense layer that can multiply inputs [batch, length, width] as they are.

    Keras folds batch and length into one axis first. A TPU's compiler then takes the heads that the outputs are divided
    into for an axis of the product, and writes the weights anew for it at each step.

    Args:
        units: As for a dense layer, and so are the others.
        keeps_axes: Tells while the layer is called whether it is to do so; for one without a bias.
    """

    def __init__(self, units: int, *, keeps_axes: Callable[[], bool] = bool, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self._keeps_axes = keeps_axes

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if self.use_bias or not self._keeps_axes():
            return super().call(inputs, training=training)
        return tf.einsum("bli,io->blo", inputs, tf.convert_to_tensor(self.kernel))


def projection(units: int, *, name: str, scale: float = 1.0, use_bias: bool = False, **kwargs: Any) -> Projection:
    """A dense layer, uniform after Glorot and Bengio 2010; `scale` multiplies its initial kernel."""
    initializer = keras.initializers.VarianceScaling(scale**2, mode="fan_avg", distribution="uniform")
    return Projection(units, use_bias=use_bias, kernel_initializer=initializer, name=name, **kwargs)


def products(inputs: tf.Tensor, layers: Sequence[Projection], *, at_once: bool) -> list[tf.Tensor]:
    """Products of the inputs by projections without biases; `at_once` by one product, as suits a GPU's compiler.

    Each is by itself where one computes in another dtype, in 8 bits, or is watched.
    """
    plain = all(one.quantization_mode is None and "call" not in vars(one) for one in layers)
    alike = plain and all(one.compute_dtype == inputs.dtype.name for one in layers)
    if not (at_once and alike):
        return [layer(inputs) for layer in layers]
    kernels = [tf.cast(layer.kernel, inputs.dtype) for layer in layers]
    found, ends = tf.tensordot(inputs, tf.concat(kernels, axis=1), 1), itertools.accumulate(one.units for one in layers)
    # Slices, not tf.split, whose gradients XLA would make one by one and copy.
    return [found[..., end - one.units : end] for one, end in zip(layers, ends, strict=True)]


class Embedding(keras.layers.Layer):
    """Vectors of tokens, and the scores of all tokens by the same matrix (Press and Wolf 2016, arXiv 1608.05859).

    Vectors are `width ** 0.5` times the rows of the matrix, as in Vaswani et al. 2017, section 3.4; rows start with a
    standard deviation of `width ** -0.5`, so that vectors and scores are both of order one.
    """

    def __init__(self, *, vocab_size: int, width: int, name: str) -> None:
        super().__init__(name=name)
        self.vocab_size = vocab_size
        self._shape, self._factor = (vocab_size, width), width**0.5

    def build(self, *_: Any) -> None:
        initializer = keras.initializers.RandomNormal(stddev=self._shape[1] ** -0.5)
        # autocast=False: a cast of the whole matrix to gather a few rows is waste.
        self.embeddings = self.add_weight(name="embeddings", shape=self._shape, initializer=initializer, autocast=False)

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        """Compute-dtype vectors [..., width] of integer tokens [...]."""
        vectors = tf.gather(tf.convert_to_tensor(self.embeddings), tokens)
        return tf.cast(vectors * self._factor, self.compute_dtype)


class _Normalization(keras.layers.Layer):
    """Normalisation of the last axis, computed in float32 by weights that are float32 under any policy.

    Attributes:
        is_centred: Whether the mean is taken off before, and an offset, `beta`, added behind.
    """

    is_centred: bool

    def __init__(self, *, epsilon: float = 1e-6, name: str) -> None:
        super().__init__(name=name)
        self._epsilon = epsilon

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        settings = {"shape": input_shape[-1:], "dtype": "float32", "autocast": False}
        self.gamma = self.add_weight(name="gamma", initializer="ones", **settings)
        if self.is_centred:
            self.beta = self.add_weight(name="beta", initializer="zeros", **settings)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        features = centred = tf.cast(inputs, tf.float32)
        if self.is_centred:
            mean = tf.reduce_mean(features, axis=-1, keepdims=True)
            centred = features - mean
        if self.is_centred and inputs.dtype == tf.bfloat16:
            # One pass over the inputs in place of two. Where the difference of float32 squares is too coarse, the mean
            # being hundreds of standard deviations, bfloat16 inputs were too coarse before.
            squares = tf.reduce_mean(tf.square(features), axis=-1, keepdims=True)
            variance = tf.maximum(squares - tf.square(mean), 0.0)
        else:
            variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
        outputs = centred * tf.math.rsqrt(variance + self._epsilon) * tf.convert_to_tensor(self.gamma)
        return tf.cast(outputs + tf.convert_to_tensor(self.beta) if self.is_centred else outputs, self.compute_dtype)


class LayerNormalization(_Normalization):
    """Layer normalisation (Ba et al. 2016, arXiv 1607.06450).

    Of bfloat16 inputs the variance is taken in one pass: at a mean of 1,000 deviations outputs are off by 0.18, in two
    passes by 0.015; up to 100 both are equal.
    """

    is_centred = True


class RMSNormalization(_Normalization):
    """RMS normalisation (Zhang and Sennrich 2019, arXiv 1910.07467).

    Its weight is called gamma as in the other normalisations, so that the usual patterns keep it from weight decay.
    """

    is_centred = False


NORMALIZATIONS: dict[str, Any] = {"layer": LayerNormalization, "rms": RMSNormalization}


class Dropout(keras.layers.Dropout):
    """Keras's dropout, with the random draw apart from its use.

    A block that is computed twice (rematerialisation) must drop the same elements both times: it draws the seed
    before, outside of what is repeated.
    """

    def draw(self, training: bool) -> tf.Tensor | None:
        """The seed of one use, which moves the layer's generator; None when nothing is to be dropped."""
        return self.seed_generator.next() if training and self.rate > 0 else None

    def with_seed(self, seed: tf.Tensor | None) -> Callable[[tf.Tensor], tf.Tensor]:
        """The dropout that this seed determines; the identity for None."""
        if seed is None:
            return lambda inputs: inputs
        return lambda inputs: tf.nn.experimental.stateless_dropout(inputs, self.rate, seed=seed, rng_alg="auto_select")


class FeedForward(keras.layers.Layer):
    """Two dense layers around an activation, at each position.

    Args:
        width: Of the inputs and outputs.
        hidden: Of the layer between.
        activation: "relu" or "gelu" (with biases), or "swiglu": silu(gate) * up without biases (Shazeer 2020,
            arXiv 2002.05202), which has three matrices instead of two.
        output_scale: Factor of the initial output projection.

    Attributes:
        joined: Tells while it is called whether "swiglu" is to multiply by both matrices at once, so that one kernel
            writes both gradients, as suits a GPU's compiler; whoever trains the model may set it.
    """

    joined: Callable[[], bool] = bool

    def __init__(self, *, width: int, hidden: int, activation: str, output_scale: float = 1.0, name: str) -> None:
        super().__init__(name=name)
        gated = activation == "swiglu"
        self._width, self._hidden = width, hidden
        self._activation = {"relu": tf.nn.relu, "gelu": tf.nn.gelu, "swiglu": tf.nn.silu}[activation]
        self.gate = projection(hidden, name="gate") if gated else None
        self.up = projection(hidden, use_bias=not gated, name="up")
        self.down = projection(width, scale=output_scale, use_bias=not gated, name="down")
        self.layers = [layer for layer in (self.gate, self.up, self.down) if layer is not None]

    def build(self, *_: Any) -> None:
        for layer in self.layers:
            layer.build((None, None, self._hidden if layer is self.down else self._width))

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        del training  # which its layers are told by Keras
        if self.gate is None:
            return self.down(self._activation(self.up(inputs)))
        gate, up = products(inputs, [self.gate, self.up], at_once=self.joined())
        return self.down(tf.cast(self._activation(gate), up.dtype) * up)
