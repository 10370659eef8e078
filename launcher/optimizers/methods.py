"""Launcher's own Keras optimizers: LAMB and LARS for very large batches, Adafactor for little memory, Nadam, Muon."""

import math
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import keras
import tensorflow as tf

from launcher.optimizers.weight_shards import Variables, WeightShard, means, norms, whole_of, without_axis


class _Method(keras.optimizers.Optimizer):
    """A Keras optimizer with settings of its own and a weight decay, `layer_decay`, that is part of its update.

    A subclass names its settings in `defaults`; each is an argument and an attribute. It has `_make_slots` and `_move`,
    which updates a variable or its shard.

    Args:
      layer_decay: weight decay.
      exclude: regular expressions searched for in variables' paths; what a match means is the method's.
      arguments: settings, and those of every Keras optimizer; slots' names begin with `name`.
    """

    reduces_shards = True
    defaults: ClassVar[Mapping[str, Any]] = {}
    learning_rate_by_default = 0.001

    def __init__(self, *, layer_decay: float = 0.0, exclude: Sequence[str] = (), **arguments: Any):
        settings = {name: arguments.pop(name, default) for name, default in self.defaults.items()}
        common = {"learning_rate": self.learning_rate_by_default, "name": type(self).__name__.lower()}
        super().__init__(**{**common, **arguments})
        for name, value in settings.items():
            setattr(self, name, value)
        self.layer_decay = layer_decay
        self.exclude = tuple(exclude)

    def build(self, variables: Variables) -> None:
        if not self.built:
            super().build(variables)
            self.included = [not any(re.search(pattern, v.path) for pattern in self.exclude) for v in variables]
            self._make_slots(variables)

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable | WeightShard, learning_rate: tf.Tensor
    ) -> None:
        """Updates one variable, or a replica's shard of it, as Keras calls it.

        Args:
          gradient: of the shape of the variable; cast to its dtype.
          variable: one of those given to `build`.
          learning_rate: scalar; cast to the variable's dtype.
        """
        weight, index = tf.convert_to_tensor(variable), self._get_variable_index(variable)
        self._move(index, variable, weight, tf.cast(gradient, weight.dtype), tf.cast(learning_rate, weight.dtype))

    def _slots(self, variables: Variables, name: str) -> list[keras.Variable]:
        return [self.add_variable_from_reference(variable, name) for variable in variables]

    def _count(self, weight: tf.Tensor) -> tf.Tensor:
        """The number of this update, from 1, in the dtype of a weight."""
        return tf.cast(tf.convert_to_tensor(self.iterations), weight.dtype) + 1.0

    def get_config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in (*self.defaults, "layer_decay", "exclude")}
        return {**super().get_config(), **own}


class LAMB(_Method):
    """Layer-wise adaptive moments (You et al. 2019, arXiv 1904.00962, algorithm 2, with phi the identity).

        m = beta_1 m + (1 - beta_1) g            v = beta_2 v + (1 - beta_2) g^2
        u = m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon) + layer_decay w
        w = w - learning_rate * (|w| / |u|) * u

    The trust ratio |w| / |u| is 1 where either norm is 0. Excluded variables get neither decay nor the ratio.
    `keras.optimizers.Lamb` differs: it decays outside the ratio and cannot exclude variables from it.
    """

    defaults: ClassVar = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-6}

    def _make_slots(self, variables: Variables) -> None:
        self._first, self._second = (self._slots(variables, name) for name in ("first_moment", "second_moment"))

    def _move(self, index: int, variable: Any, weight: tf.Tensor, gradient: tf.Tensor, rate: tf.Tensor) -> None:
        first, second = self._first[index], self._second[index]
        count = self._count(weight)
        new_first = _average(self.beta_1, first, gradient)
        new_second = _average(self.beta_2, second, tf.square(gradient))
        unbiased_first = _unbiased(self.beta_1, new_first, count)
        unbiased_second = _unbiased(self.beta_2, new_second, count)
        update = unbiased_first / (tf.sqrt(unbiased_second) + self.epsilon)
        if self.included[index]:
            update += self.layer_decay * weight
            weight_norm, update_norm = norms(variable, weight, update)
            update *= _trust_ratio(weight_norm, update_norm, tf.math.divide_no_nan(weight_norm, update_norm))
        self.assign(first, new_first)
        self.assign(second, new_second)
        self.assign_sub(variable, rate * update)


class LARS(_Method):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888, algorithm 1).

        trust = trust_coefficient |w| / (|g| + layer_decay |w| + epsilon)
        v = momentum v + learning_rate * trust * (g + layer_decay w)
        w = w - v

    The velocity holds updates already multiplied by the learning rate, as in the paper and in MLPerf's reference for
    TensorFlow; PyTorch's form, which multiplies afterwards, differs whenever the rate changes. The trust ratio is 1
    where |w| or |g| is 0. With Nesterov, `w = w - (momentum v + learning_rate * trust * (g + layer_decay w))`. Excluded
    variables get neither decay nor the ratio. `trust_coefficient` is eta in the paper.
    """

    defaults: ClassVar = {"momentum": 0.9, "nesterov": False, "trust_coefficient": 0.001, "epsilon": 0.0}
    learning_rate_by_default = 0.1

    def _make_slots(self, variables: Variables) -> None:
        self._velocities = self._slots(variables, "velocity")

    def _move(self, index: int, variable: Any, weight: tf.Tensor, gradient: tf.Tensor, rate: tf.Tensor) -> None:
        velocity = self._velocities[index]
        if self.included[index]:
            weight_norm, gradient_norm = norms(variable, weight, gradient)
            denominator = gradient_norm + self.layer_decay * weight_norm + self.epsilon
            trust = self.trust_coefficient * tf.math.divide_no_nan(weight_norm, denominator)
            rate *= _trust_ratio(weight_norm, gradient_norm, trust)
            gradient += self.layer_decay * weight
        step = rate * gradient
        new_velocity = self.momentum * tf.convert_to_tensor(velocity) + step
        self.assign(velocity, new_velocity)
        self.assign_sub(variable, self.momentum * new_velocity + step if self.nesterov else new_velocity)


class Adafactor(_Method):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5) without momentum.

        beta = 1 - t ** -decay                       t counts updates from 1
        s = g ^ 2 + epsilon
        R = beta R + (1 - beta) mean of s over columns        C = beta C + (1 - beta) mean of s over rows
        V = R C / mean(R)                            of a matrix; V = beta V + (1 - beta) s of a vector
        u = g / sqrt(V),    u = u / max(1, rms(u) / clip_threshold)
        w = w - learning_rate * (max(scale_epsilon, rms(w)) * u + layer_decay * w)

    Of tensors with more axes, the last two are those of the matrix. With means in place of the paper's sums the factors
    are the same. The learning rate is the paper's rho, a relative step: its own choice is `min(1e-2, 1 / sqrt(t))`.
    The weight decay is not the paper's; as in its implementations, rms(w) is taken before it. Excluded variables are
    not decayed.

    `keras.optimizers.Adafactor` differs: it keeps the whole of V of every matrix as a slot, which is the memory that
    this method is there to save, and it never lets the rate be more than `1 / sqrt(t)`, whatever the schedule says.
    """

    defaults: ClassVar = {"decay": 0.8, "epsilon": 1e-30, "scale_epsilon": 1e-3, "clip_threshold": 1.0}
    learning_rate_by_default = 0.01

    def _make_slots(self, variables: Variables) -> None:
        self._moments = [self._moments_of(variable) for variable in variables]

    def _moments_of(self, variable: keras.Variable | WeightShard) -> list[keras.Variable]:
        """The moments of rows and of columns, or of each element of a vector."""
        if len(variable.shape) < 2:
            return self._slots([variable], "second_moment")
        return [
            self._mean_slot(without_axis(variable, -1), "row_moment"),
            self._mean_slot(without_axis(variable, -2), "column_moment"),
        ]

    def _mean_slot(self, like: SimpleNamespace | WeightShard, name: str) -> keras.Variable:
        if isinstance(like, WeightShard):
            return self.add_variable_from_reference(like, name)
        # Keras would put it beside its reference, which has to be a variable for that.
        name = f"{like.path.replace('/', '_')}_{name}"
        return self.add_variable(shape=like.shape, initializer="zeros", dtype=like.dtype, name=name)

    def _move(self, index: int, variable: Any, weight: tf.Tensor, gradient: tf.Tensor, rate: tf.Tensor) -> None:
        moments = self._moments[index]
        count = self._count(weight)
        beta = 1.0 - tf.pow(count, -self.decay)
        squares = tf.square(gradient) + self.epsilon
        seen = [squares] if len(moments) == 1 else [means(variable, squares, axis=axis)[0] for axis in (-1, -2)]
        new = [_average(beta, old, mean) for old, mean in zip(moments, seen, strict=True)]
        if len(new) == 1:
            update = gradient * tf.math.rsqrt(new[0])
        else:
            rows, columns = new
            # Two roots instead of one of the product, which could be too small for a float.
            shares = rows / means(without_axis(variable, -1), rows, axis=-1)[0][..., None]
            update = gradient * tf.math.rsqrt(shares)[..., :, None] * tf.math.rsqrt(columns)[..., None, :]
        update_rms, weight_rms = map(tf.sqrt, means(variable, tf.square(update), tf.square(weight)))
        update /= tf.maximum(1.0, update_rms / self.clip_threshold)
        for moment, value in zip(moments, new, strict=True):
            self.assign(moment, value)
        update *= tf.maximum(weight_rms, self.scale_epsilon)
        if self.included[index] and self.layer_decay:
            update += self.layer_decay * weight
        self.assign_sub(variable, rate * update)


class Nadam(_Method):
    """Adam with Nesterov's momentum (Dozat 2016, Incorporating Nesterov Momentum into Adam, with its warm-up).

        mu_t = beta_1 (1 - 0.5 * 0.96^(t * momentum_decay))          M_t = mu_1 ... mu_t
        m = beta_1 m + (1 - beta_1) g                                v = beta_2 v + (1 - beta_2) g^2
        u = (mu_{t+1} m / (1 - M_{t+1}) + (1 - mu_t) g / (1 - M_t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)
        w = w - learning_rate * (u + layer_decay w)

    So do `torch.optim.NAdam` and Keras 2. `keras.optimizers.Nadam` of Keras 3 differs: its momentum warms up by
    0.96^t, 250 times as fast. The weight decay is not the paper's; excluded variables have none.
    """

    defaults: ClassVar = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8, "momentum_decay": 0.004}

    def _make_slots(self, variables: Variables) -> None:
        self._first, self._second = (self._slots(variables, name) for name in ("first_moment", "second_moment"))
        self._products = [
            self.add_variable((), "ones", one.dtype, name=f"{one.path.replace('/', '_')}_momentum_product")
            for one in variables
        ]

    def _move(self, index: int, variable: Any, weight: tf.Tensor, gradient: tf.Tensor, rate: tf.Tensor) -> None:
        first, second, product = self._first[index], self._second[index], self._products[index]
        count = self._count(weight)

        def momentum(step: tf.Tensor) -> tf.Tensor:
            return self.beta_1 * (1.0 - 0.5 * tf.pow(tf.cast(0.96, weight.dtype), step * self.momentum_decay))

        new_first = _average(self.beta_1, first, gradient)
        new_second = _average(self.beta_2, second, tf.square(gradient))
        new_product = tf.convert_to_tensor(product) * momentum(count)
        update = (momentum(count + 1.0) / (1.0 - new_product * momentum(count + 1.0))) * new_first
        update += ((1.0 - momentum(count)) / (1.0 - new_product)) * gradient
        unbiased_second = _unbiased(self.beta_2, new_second, count)
        update /= tf.sqrt(unbiased_second) + self.epsilon
        if self.included[index] and self.layer_decay:
            update += self.layer_decay * weight
        self.assign(first, new_first)
        self.assign(second, new_second)
        self.assign(product, new_product)
        self.assign_sub(variable, rate * update)


class Muon(_Method):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for matrices, and AdamW for all other weights.

        b = momentum b + (1 - momentum) g
        u = orthogonal(momentum b + (1 - momentum) g)              by ns_steps Newton-Schulz iterations
        w = w - learning_rate * (scale u + layer_decay w)

    The scale is sqrt(max(1, outputs / inputs)), the paper's; with `rms` it is rms * sqrt(max(outputs, inputs)), with
    which the updates are as large as Adam's and have its rate and decay (Liu et al. 2025, arXiv 2502.16982).

    A matrix is a weight with two axes or more: its last axis against all others, as of a convolution or of attention's
    output, but the first one against the others where `heads_last` says that these are heads. What `by_adam` matches
    and vectors have Adam's update, at the rate times `adam_rate`. Excluded variables are not decayed.

    `keras.optimizers.Muon` differs: it takes the biases of attention, which have two axes, for matrices, leaves its
    kernels, which have three, to Adam, and has no scale by the ratio of outputs and inputs.
    """

    defaults: ClassVar = {
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "rms": 0.2,
        "adam_rate": 1.0,
        "beta_1": 0.9,
        "beta_2": 0.95,
        "epsilon": 1e-8,
        "by_adam": (r"bias$", r"gamma$", r"beta$", r"embedding", r"depthwise"),
        "heads_last": (r"(query|key|value|qkv)[^/]*/kernel$",),
    }

    def _make_slots(self, variables: Variables) -> None:
        def matches(patterns: Sequence[str], path: str) -> bool:
            return any(re.search(pattern, path) for pattern in patterns)

        is_matrix = [len(v.shape) >= 2 and not matches(self.by_adam, v.path) for v in variables]
        self._splits = [
            None if not is_one else 1 if matches(self.heads_last, v.path) else len(v.shape) - 1
            for v, is_one in zip(variables, is_matrix, strict=True)
        ]
        self._first = self._slots(variables, "momentum")
        self._second = [
            None if is_one else self._slots([v], "second_moment")[0]
            for v, is_one in zip(variables, is_matrix, strict=True)
        ]

    def _move(self, index: int, variable: Any, weight: tf.Tensor, gradient: tf.Tensor, rate: tf.Tensor) -> None:
        first, second, split = self._first[index], self._second[index], self._splits[index]
        beta = self.beta_1 if split is None else self.momentum
        new_first = _average(beta, first, gradient)
        if split is not None:
            ahead = beta * new_first + (1.0 - beta) * gradient if self.nesterov else new_first
            update = self._orthogonal(whole_of(variable, ahead), split)
            update = variable.of(update) if isinstance(variable, WeightShard) else update
        else:
            count = self._count(weight)
            new_second = _average(self.beta_2, second, tf.square(gradient))
            unbiased_first = _unbiased(beta, new_first, count)
            unbiased_second = _unbiased(self.beta_2, new_second, count)
            update = unbiased_first / (tf.sqrt(unbiased_second) + self.epsilon)
            rate *= self.adam_rate
            self.assign(second, new_second)
        if self.included[index] and self.layer_decay:
            update += self.layer_decay * weight
        self.assign(first, new_first)
        self.assign_sub(variable, rate * update)

    def _orthogonal(self, tensor: tf.Tensor, split: int) -> tf.Tensor:
        """The nearest orthogonal matrix, about, times the scale; of a tensor as one of its first axes and the others.

        The iteration is Newton-Schulz's of the fifth order, with the paper's coefficients.
        """
        inputs, outputs = math.prod(tensor.shape[:split]), math.prod(tensor.shape[split:])
        matrix = tf.reshape(tensor, [inputs, outputs])
        is_tall = inputs > outputs
        matrix = tf.transpose(matrix) if is_tall else matrix
        matrix /= tf.norm(matrix) + 1e-7
        for _ in range(self.ns_steps):
            square = tf.matmul(matrix, matrix, transpose_b=True)
            matrix = 3.4445 * matrix + tf.matmul(-4.7750 * square + 2.0315 * tf.matmul(square, square), matrix)
        matrix = tf.transpose(matrix) if is_tall else matrix
        by_shape = math.sqrt(max(1.0, outputs / inputs))
        scale = by_shape if self.rms is None else self.rms * math.sqrt(max(outputs, inputs))
        return scale * tf.reshape(matrix, tensor.shape)


def _average(decay: float | tf.Tensor, slot: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """A slot's moving average, one update on."""
    return decay * tf.convert_to_tensor(slot) + (1.0 - decay) * value


def _unbiased(decay: float, moment: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """A moment without what its first value, 0, has left in it (Kingma & Ba 2015, section 3).

    By the logarithm, as a Python program has it: of 0.999, float32 knows 1 - decay to five digits alone.
    """
    return moment / -tf.math.expm1(count * math.log(decay)) if decay else moment


def _trust_ratio(weight_norm: tf.Tensor, other_norm: tf.Tensor, ratio: tf.Tensor) -> tf.Tensor:
    """The ratio, and 1 where either norm is 0."""
    usable = tf.logical_and(weight_norm > 0.0, other_norm > 0.0)
    return tf.where(usable, ratio, tf.ones_like(weight_norm))
