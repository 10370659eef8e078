"""A probe of one batch: what its gradients are like in 16 bits, and what they would be in float32.

A probe runs the forward and backward pass of the training step twice on one batch with the same weights and the same
random numbers: the run's own, under its policy and loss scale, and a shadow in float32.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from launcher.data.pipeline import Batch
from launcher.run import session
from launcher.run.actions.precision_watch import copy_weights
from launcher.run.session import Session
from launcher.step import gradients
from launcher.step.layers import owners
from launcher.step.local_pass import num_replicas
from launcher.step.statistics import is_overwritten
from launcher.watch import gradient_taps
from launcher.watch.gradient_taps import Seen, TappedPass


class Compared(NamedTuple):
    """Unscaled gradients of the weights, summed over replicas in float32, against the shadow's; float32 [weights]."""

    cosine: Any  # of the angle between them; 1 where both are zero, NaN where the real one is not finite
    relative_error: Any  # norm of the difference over the norm of the shadow's; 0 where both are zero
    norm: Any  # of the shadow's


class Probed(NamedTuple):
    """Arrays of NumPy that `Probe` found on one batch."""

    shadow: Seen  # in float32 at scale 1
    real: Seen  # under the run's policy, at the scale of the loss
    compared: Compared  # real against shadow
    sum_counts: Any  # float32 [weights, 256] of the shadow's gradients summed over replicas
    sum_maxima: Any  # float32 [weights] of the same


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor whose gradient a probe counts."""

    path: str  # of the weight or the layer
    kind: str  # "weight", or "activation" for a layer's outputs
    dtype: str  # it has in the real pass, such as "float16": of a weight's gradient, that of the layer's computations


class Probe:
    """Probes a session's model; changes neither its counters nor its variables, but for scales of float8.

    Args:
      built: the session; its trainer's counters give the step, whose random numbers both passes use, and the scale.

    Raises:
      UsageError: the task does not build the same model twice.
    """

    def __init__(self, built: Session):
        self._trainer, self._runtime = built.trainer, built.runtime.host
        self.model = built.model
        self.shadow = session.float32_model(built)
        self._real, self._shadow = TappedPass(built.trainer, self.model), TappedPass(built.trainer, self.shadow)
        self._run = self._runtime.on_replicas(self._in_replica, in_order=True)

    @property
    def tensors(self) -> list[Tensor]:
        """The rows of `Seen.counts`, after the first batch: weights, then tapped layers."""
        holders, taps = owners(self.model), self._real.taps
        weights = ((each.path, holders[id(each)].layer.compute_dtype) for each in self.model.trainable_variables)
        layers = zip(taps.paths, taps.outputs, strict=True)
        return [
            *(Tensor(path, "weight", dtype) for path, dtype in weights),
            *(Tensor(path, "activation", seen[0] if seen else "float32") for path, seen in layers),
        ]

    def graph(self, batch: Any) -> tf.compat.v1.GraphDef:
        """Both passes as TensorFlow runs them, with shapes; after the first batch."""
        with self._real.taps.installed(), self._shadow.taps.installed():
            return self._run.get_concrete_function(batch, tf.constant(1.0)).graph.as_graph_def(add_shapes=True)

    def run(self, batch: Any, scale: float | None = None) -> Probed:
        """Both passes on one batch.

        Args:
          batch: of the trainer's present step, as `next(trainer.batches(data))` gives it.
          scale: of the real pass; None for the trainer's.
        """
        scale = self._trainer.loss_scale if scale is None else scale
        with self._real.taps.installed(), self._shadow.taps.installed():
            found = self._run(batch, tf.constant(scale, tf.float32))
        return tf.nest.map_structure(np.asarray, self._runtime.alike(found))

    def _in_replica(self, batch: Batch, scale: tf.Tensor) -> Probed:
        copy_weights(self.model, self.shadow)
        expected, plain = self._shadow.observe(batch, tf.constant(1.0))
        found, scaled = self._real.observe(batch, scale)
        for one, value in zip(self.model.trainable_variables, scaled, strict=True):
            if is_overwritten(one):  # as a step would
                one.value.assign(gradients.reduce_sum([value])[0] / num_replicas())
        unscaled = [gradient / scale for gradient in scaled]
        both = gradients.reduce_sum([*plain, *unscaled])
        compared = _compare(both[: len(plain)], both[len(plain) :])
        summed = tf.stack([gradient_taps.observe(gradient) for gradient in both[: len(plain)]])
        return Probed(expected, found, compared, gradient_taps.counts(summed), gradient_taps.maxima(summed))


def _compare(expected: list[tf.Tensor], found: list[tf.Tensor]) -> Compared:
    cosines, errors, norms = [], [], []
    for one, other in zip(expected, found, strict=True):
        # Squares of small gradients would be lost in float32.
        size = tf.reduce_max(tf.abs(one))
        size = tf.where(tf.logical_and(size > 0, tf.math.is_finite(size)), size, 1.0)
        one, other = one / size, other / size
        norm, found_norm = tf.norm(one), tf.norm(other)
        equal = tf.reduce_all(one == other)
        cosine = tf.math.divide_no_nan(tf.reduce_sum(one * other), norm * found_norm)
        cosine = tf.where(tf.math.is_finite(found_norm), cosine, float("nan"))
        cosines.append(tf.where(equal, 1.0, cosine))
        errors.append(tf.where(equal, 0.0, tf.norm(other - one) / norm))
        norms.append(norm * size)
    return Compared(tf.stack(cosines), tf.stack(errors), tf.stack(norms))
