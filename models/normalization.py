"""Batch normalisation whose function does not depend on how many replicas share the batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# Beyond so many groups, one kernel for each makes a program that an accelerator's compiler takes many minutes for.
_KERNELS = 4

Normalized = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""Features that are normalised, and the mean and the biased variance that they had."""


@keras.saving.register_keras_serializable(package="models")
class BatchNormalization(keras.layers.Layer):
    """Batch normalisation with float32 statistics over groups of examples, over the batch, or over all replicas.

    In training the statistics come from the batch, in one of three ways:

    * `group_size=n`: every n consecutive examples are normalised by themselves. With the same n everywhere the
      function that is trained is the same on any topology: 128 examples on one replica are 4 groups of 32, and so are
      4 replicas of 32. Goyal et al. 2017 (arXiv 1706.02677, section 2.3) keep n = 32 whatever the number of workers.
    * `group_size=None`: the whole batch that this replica (or microbatch) sees.
    * `synchronized=True`: the batch of all replicas together, by one float32 all-reduce of 2 * channels + 1 numbers
      forward and one backward. `tf.distribute` reduces by joining the replicas' threads, so this cannot stand inside a
      `tf.while_loop` of a replica, nor inside another `tf.function` there, compiled by XLA or not.

    Each training call moves `moving_mean` and `moving_variance` once, `moving = moving * momentum + batch *
    (1 - momentum)`, where `batch` is the mean over the groups of the mean, or of the biased variance. The update is
    affine in the batch statistic, so averaging the moving statistics of replicas and microbatches that started from the
    same ones, which is left to the caller, gives what one replica with all the groups would have. Outside training,
    and when the layer is frozen (`trainable=False`), the moving statistics normalise.

    Statistics and weights are float32 under every dtype policy; the output has the layer's compute dtype. Outside XLA
    the kernels subtract the mean before they square; XLA expands the same operation to E[x^2] - E[x]^2, which loses
    digits where the mean is tens of standard deviations away from zero.

    Source: Ioffe and Szegedy 2015, arXiv 1502.03167.

    Args:
        momentum: Share of the old moving statistic that one call keeps, in [0, 1].
        epsilon: Added to the variance, greater than 0.
        gamma_initializer: Initial scale; "zeros" in the last normalisation of a residual block makes it an identity.
        group_size: Examples that are normalised together, or None for the whole local batch. A batch of unknown size
            (as when a functional model is built) is one group.
        synchronized: Take the statistics over all replicas. The layer must then be called by every replica alike, and
            the replicas' `moving_mean` must be equal, as they are after any number of synchronised updates.
        name, dtype: As of any layer.

    Attributes:
        compiling: Tells while a model is called whether XLA compiles that; whoever trains the model may set it.

    Inputs are floating point tensors [batch, ..., channels] of rank 2 or more.

    Raises:
        ValueError: An argument out of range, `synchronized` together with `group_size`, or, in training, a batch that
            is no multiple of `group_size`.
    """

    compiling: Callable[[], bool] = bool

    def __init__(
        self,
        *,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        gamma_initializer: str | keras.initializers.Initializer = "ones",
        group_size: int | None = None,
        synchronized: bool = False,
        name: str | None = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, dtype=dtype, **kwargs)
        if not 0.0 <= momentum <= 1.0:
            raise ValueError(f"momentum must lie between 0 and 1, and is {momentum}.")
        if epsilon <= 0.0:
            raise ValueError(f"epsilon must be greater than 0, and is {epsilon}.")
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size must be at least 1, or None for the whole batch, and is {group_size}.")
        if synchronized and group_size is not None:
            raise ValueError(
                f"Normalisation is synchronized or in groups of group_size={group_size}: choose one of them."
            )
        self.momentum = float(momentum)
        self.epsilon = float(epsilon)
        self.gamma_initializer = keras.initializers.get(gamma_initializer)
        self.group_size = group_size
        self.synchronized = synchronized

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        channels = input_shape[-1]
        if len(input_shape) < 2 or channels is None:
            raise ValueError(f"Inputs must be [batch, ..., channels], channels known, and are {tuple(input_shape)}.")
        # autocast=False: a 16-bit policy would otherwise hand the weight to `call` in 16 bits.
        add = functools.partial(self.add_weight, shape=(channels,), dtype="float32", autocast=False)
        self.gamma = add(name="gamma", initializer=self.gamma_initializer)
        self.beta = add(name="beta", initializer="zeros")
        self.moving_mean = add(name="moving_mean", initializer="zeros", trainable=False)
        self.moving_variance = add(name="moving_variance", initializer="ones", trainable=False)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        normalize = self._normalize_by_batch if training and self.trainable else self._normalize
        if inputs.shape.rank == 4:
            return normalize(inputs)
        # The kernels want four dimensions; which of them are spatial makes no difference to them.
        images = tf.reshape(inputs, [tf.shape(inputs)[0], -1, 1, inputs.shape[-1]])
        return tf.reshape(normalize(images), tf.shape(inputs))

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "gamma_initializer": keras.initializers.serialize(self.gamma_initializer),
            "group_size": self.group_size,
            "synchronized": self.synchronized,
        }

    def _normalize(self, images: tf.Tensor) -> tf.Tensor:
        return self._fused(images, self.moving_mean, self.moving_variance, is_training=False).y

    def _fused(self, images: tf.Tensor, mean: Any, variance: Any, *, is_training: bool) -> Any:
        return tf.raw_ops.FusedBatchNormV3(
            x=images,
            scale=tf.convert_to_tensor(self.gamma),
            offset=tf.convert_to_tensor(self.beta),
            mean=tf.convert_to_tensor(mean),
            variance=tf.convert_to_tensor(variance),
            epsilon=self.epsilon,
            is_training=is_training,
        )

    def _normalize_by_batch(self, images: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context() if self.synchronized else None
        num_groups = self._num_groups(images.shape[0])
        if context is not None and context.num_replicas_in_sync > 1:
            outputs, mean, variance = self._normalize_replicas(images, context)
        elif num_groups == 1:
            outputs, mean, variance = self._normalize_group(images)
        elif num_groups > _KERNELS or self.compiling():
            outputs, mean, variance = self._normalize_many_groups(images, num_groups)
        else:
            # One kernel a group instead of one set of reductions over [groups, ...]: about twice as fast on a CPU and
            # cuDNN's kernel on a GPU; and a group gives the same bits here as on a replica that has only this group.
            # XLA has no such kernel, and takes twice as long to compile a set of reductions for each group.
            groups = [self._normalize_group(group) for group in tf.split(images, num_groups)]
            all_outputs, means, variances = zip(*groups, strict=True)
            outputs, mean = tf.concat(all_outputs, 0), tf.add_n(means) / num_groups
            variance = tf.add_n(variances) / num_groups
        self._move(self.moving_mean, mean)
        self._move(self.moving_variance, variance)
        return outputs

    def _move(self, moving: keras.Variable, statistic: tf.Tensor) -> None:
        moving.assign(tf.convert_to_tensor(moving) * self.momentum + statistic * (1.0 - self.momentum))

    def _normalize_many_groups(self, images: tf.Tensor, num_groups: int) -> Normalized:
        """Normalises each group by itself, in operations whose number does not grow with that of the groups."""
        shape = tf.concat([[num_groups, self.group_size], tf.shape(images)[1:]], 0)
        groups = tf.cast(tf.reshape(images, shape), tf.float32)
        mean_of = functools.partial(tf.reduce_mean, axis=[1, 2, 3], keepdims=True)
        if images.dtype.size == 2 and self.compiling():
            # Both in one pass over the features, around what is near their mean, see `_normalize_replicas`.
            origin = tf.stop_gradient(tf.convert_to_tensor(self.moving_mean))
            offset, squares = mean_of(groups - origin), mean_of(tf.square(groups - origin))
            mean, variance = offset + origin, tf.maximum(squares - tf.square(offset), 0.0)
        else:
            mean = mean_of(groups)
            # The variance does not move with the mean it is taken around, so its gradient need not go through it.
            variance = mean_of(tf.math.squared_difference(groups, tf.stop_gradient(mean)))
        scale = tf.math.rsqrt(variance + self.epsilon) * self.gamma
        outputs = tf.cast((groups - mean) * scale + self.beta, images.dtype)
        channels = [num_groups, images.shape[-1]]
        statistics = [tf.reduce_mean(tf.reshape(one, channels), 0) for one in (mean, variance)]
        return tf.reshape(outputs, tf.shape(images)), *statistics

    def _num_groups(self, batch_size: int | None) -> int:
        if self.group_size is None or batch_size is None:
            return 1
        if batch_size % self.group_size:
            raise ValueError(
                f"{self.name}: a batch of {batch_size} examples cannot be normalised in groups of "
                f"group_size={self.group_size}. Make the batch of one replica and microbatch a multiple of "
                f"{self.group_size}, or set group_size to a divisor of {batch_size}, such as "
                f"{math.gcd(batch_size, self.group_size)}, or to None for the whole local batch."
            )
        return max(1, batch_size // self.group_size)

    def _normalize_group(self, images: tf.Tensor) -> Normalized:
        """Normalises by the statistics of these examples; returns the outputs, the mean and the biased variance."""
        empty = tf.zeros([0], tf.float32)  # no running statistics: the kernel returns those of the batch
        result = self._fused(images, empty, empty, is_training=True)
        # The kernel normalises by the biased variance but returns it times n / (n - 1) (Bessel's correction), which
        # would make the moving variance depend on the size of the group.
        values = tf.cast(tf.size(images) // images.shape[-1], tf.float32)
        return result.y, result.batch_mean, result.batch_variance * ((values - 1.0) / values)

    def _normalize_replicas(self, images: tf.Tensor, context: tf.distribute.ReplicaContext) -> Normalized:
        """Normalises by the statistics over all replicas; returns the outputs, the mean and the biased variance."""
        # Sums of squares lose digits as the mean grows. Around the moving mean, which all replicas share, there is
        # little to lose, and it needs no second collective as the mean of the batch would.
        origin = tf.stop_gradient(tf.convert_to_tensor(self.moving_mean))
        centred = tf.cast(images, tf.float32) - origin
        values = tf.cast(tf.size(images) // images.shape[-1], tf.float32)
        sums = [tf.reduce_sum(centred, [0, 1, 2]), tf.reduce_sum(tf.square(centred), [0, 1, 2]), values[tf.newaxis]]
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.concat(sums, 0))
        channels = images.shape[-1]
        offset, squares = total[:channels] / total[-1], total[channels:-1] / total[-1]
        variance = tf.maximum(squares - tf.square(offset), 0.0)
        scale = tf.math.rsqrt(variance + self.epsilon) * self.gamma
        outputs = (centred - offset) * scale + self.beta
        return tf.cast(outputs, images.dtype), offset + origin, variance


@keras.saving.register_keras_serializable(package="models")
class PooledBatchNormalization(BatchNormalization):
    """Batch normalisation, then ReLU, then the maxima of 3x3 with stride 2, padded as TensorFlow pads.

    Where XLA compiles 16-bit features, the maxima are taken first: a quarter of them is normalised and kept. Neither
    normalisation by a scale that is not negative nor ReLU nor rounding changes which is highest, and where a scale is
    negative, features and scale change their signs. So the outputs are equal up to the rounding of the statistics; of
    features that become equal only when normalised, the gradient goes to the highest.
    """

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        batch, *sizes, channels = input_shape
        return (batch, *(None if size is None else -(-size // 2) for size in sizes), channels)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        outputs = super().call(inputs, training)
        is_pooled = outputs.shape[1:] != inputs.shape[1:]  # of 1 x 1, the second time changes nothing
        return outputs if is_pooled else _maxima(tf.nn.relu(outputs))

    def _normalize_group(self, images: tf.Tensor) -> Normalized:
        if images.dtype.size > 2 or not self.compiling() or not images.shape[1:].is_fully_defined():
            return super()._normalize_group(images)
        gamma = tf.convert_to_tensor(self.gamma)
        sign = tf.where(gamma < 0, -1.0, 1.0)
        features = images * tf.cast(sign, images.dtype)
        outputs, mean, variance = self._normalize_maxima(features, gamma * sign, tf.convert_to_tensor(self.beta))
        return outputs, mean * sign, variance

    @tf.custom_gradient
    def _normalize_maxima(self, features: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple[Any, Callable]:
        """Normalises and takes maxima, by a `gamma` that is not negative."""
        dtype, values = features.dtype, tf.cast(tf.size(features) // features.shape[-1], tf.float32)
        whole = tf.cast(features, tf.float32)
        mean, squares = tf.reduce_sum(whole, [0, 1, 2]) / values, tf.reduce_sum(whole * whole, [0, 1, 2]) / values
        variance = tf.maximum(squares - mean * mean, 0.0)
        root = tf.math.rsqrt(variance + self.epsilon)
        scale, maxima = gamma * root, _maxima(features)
        centred = tf.cast(maxima, tf.float32) - mean
        outputs = tf.nn.relu(tf.cast(centred * scale + beta, dtype))

        def gradient(by: tf.Tensor, *_: Any) -> Normalized:
            by = tf.where(outputs > 0, tf.cast(by, tf.float32), 0.0)
            by_beta, by_gamma = tf.reduce_sum(by, [0, 1, 2]), tf.reduce_sum(by * centred, [0, 1, 2]) * root
            by_highest = tf.raw_ops.MaxPoolGrad(
                orig_input=features, orig_output=maxima, grad=tf.cast(by * scale, dtype), **_WINDOWS
            )
            others = (tf.cast(features, tf.float32) - mean) * (by_gamma * root) + by_beta  # by the statistics
            return tf.cast(tf.cast(by_highest, tf.float32) - others * (scale / values), dtype), by_gamma, by_beta

        return (outputs, mean, variance), gradient


_WINDOWS = {"ksize": [1, 3, 3, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}


def _maxima(images: tf.Tensor) -> tf.Tensor:
    return tf.nn.max_pool2d(images, **_WINDOWS)
