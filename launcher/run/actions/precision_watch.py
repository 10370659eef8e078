"""The precision watch: samples, between training steps, of gradients in float32 and of what float16 makes of them.

A sample is a device program of its own, beside the one that trains: the forward and backward pass of each replica's
first microbatch with the present weights in the model's float32 copy, so that nothing is lost before it is counted. The
program that trains is the same with and without a watch, and so are the weights.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.config.bound_types import check_least
from launcher.data.pipeline import Batch
from launcher.errors import TrainingError
from launcher.reporting.reporter import Reporter
from launcher.step.layers import owners
from launcher.step.state import unique_name
from launcher.step.trainer import Trainer
from launcher.watch import float16_losses, gradient_taps
from launcher.watch.float16_losses import NUM_BINS, Gradient


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionWatch:
    """Samples the exponents of gradients during training; `train.precision_watch = @PrecisionWatch()`.

    Attributes:
      every: steps between samples. A sample takes about as long as some steps, see docs/precision.md.
    """

    every: int = 200

    def __post_init__(self) -> None:
        check_least("PrecisionWatch", self, every=1)


class Sample(NamedTuple):
    """Sample of one batch.

    Attributes:
      event: fields of a log event but the step: `lost_share`, `subnormal_share`, `headroom_bits`, `recommended_scale`,
        `worst_layer`, `worst_layer_lost_share`, and in `layers` the lost share, the subnormal share and the headroom
        of every tensor, as `statistics` defines them, at the present loss scale; a layer's output is PATH:output.
      exponents: how many values have the exponent e, by what they are: "weight_gradients", "activation_gradients";
        float64 [256], bin 127 is 2^0.
    """

    event: dict[str, Any]
    exponents: dict[str, np.ndarray]


class Watch:
    """Samples a trainer's gradients.

    The shares are over the tensors that the run computes in float16; over all of them where it has none, as what
    mixed_float16 would do.

    Args:
      trainer: whose weights, step and loss scale are used and left as they are.
      reference: the float32 copy of its model, which takes its weights before each sample; see
        `launcher.run.session.float32_model`.
    """

    def __init__(self, trainer: Trainer, reference: keras.Model, reporter: Reporter):
        self._trainer, self._reference, self._reporter = trainer, reference, reporter
        self._pass = gradient_taps.TappedPass(trainer, reference)
        self._tensors = self._describe_tensors()

    def look(self, step: int, batch: Batch) -> None:
        """Reports the sample of a batch; see `LookAtBatches`."""
        sample = self.sample(batch)
        self._reporter.precision({"step": step, **sample.event}, sample.exponents)

    def sample(self, batch: Batch) -> Sample:
        """Looks at a batch; all workers call this after the same step. TrainingError without memory for the pass."""
        trainer = self._trainer
        trainer.runtime.state.bring_home()
        try:
            with self._pass.taps.installed():
                counts, maxima = trainer.runtime.host.call(self._in_replica, batch)
        except tf.errors.ResourceExhaustedError as error:
            raise TrainingError(
                "precision_watch: there is no memory for the float32 pass of a microbatch; raise train.microbatches, "
                f"or take train.precision_watch out ({error.message.splitlines()[0]})"
            ) from error
        seen = [
            Gradient(path=path, kind=kind, dtype=dtype, counts=table, maxima=largest)
            for (path, kind, dtype), table, largest in zip(self._tensors, counts, maxima.T, strict=True)
            if table.any()
        ]
        return summarise(seen, trainer.loss_scale)

    def _in_replica(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        """Counts [tensors, 256] and largest magnitudes [replicas, tensors], equal on every replica."""
        copy_weights(self._trainer.model, self._reference)
        seen, _ = self._pass.observe(batch, tf.constant(1.0))
        return seen.counts, seen.maxima

    def _describe_tensors(self) -> list[tuple[str, str, str]]:
        """Path, kind and dtype under the run's policies of the gradients by weights and by tapped layers' outputs."""
        model = self._trainer.model
        holders = owners(model)
        named: dict[str, tuple[str, str]] = {}
        for variable in model.trainable_variables:
            named[unique_name(variable.path, named)] = "weight", holders[id(variable)].layer.compute_dtype
        for path, layer in gradient_taps.named_leaves(model).items():
            named[unique_name(f"{path}:output", named)] = "activation", layer.compute_dtype
        return [(path, *rest) for path, rest in named.items()]


def copy_weights(source: keras.Model, copy: keras.Model) -> None:
    """Gives a float32 copy of a model the present weights of `source`; in a replica's function."""
    for one, other in zip(source.weights, copy.weights, strict=True):
        other.value.assign(tf.cast(one.value, other.dtype))


def summarise(seen: list[Gradient], scale: float) -> Sample:
    """A sample from unscaled gradients, under the loss scale rounded down to a power of two."""
    power = math.floor(math.log2(scale))
    in_float16 = [one for one in seen if one.dtype == "float16"] or seen
    total = float16_losses.pooled(in_float16, power)
    shares = {one.path: float16_losses.shares(one.counts, power, one.maximum) for one in seen}
    headroom = {one.path: float16_losses.headroom(one.maximum, math.log2(scale)) for one in seen}

    def severity(path: str) -> tuple[float, float, float]:
        return shares[path].lost, shares[path].subnormal, -headroom[path]

    worst = max((one.path for one in in_float16), key=severity)
    recommended = float16_losses.largest_scale([one.maximum for one in in_float16])
    event = {
        "lost_share": total.lost,
        "subnormal_share": total.subnormal,
        "headroom_bits": min(headroom[one.path] for one in in_float16),
        "recommended_scale": math.nan if recommended is None else 2.0**recommended,
        "worst_layer": worst,
        "worst_layer_lost_share": shares[worst].lost,
        "layers": {
            path: [_short(share.lost), _short(share.subnormal), _short(headroom[path])]  # None: all zero
            for path, share in shares.items()
        },
        "loss_scale": scale,
    }
    exponents = {
        f"{kind}_gradients": sum((one.counts for one in seen if one.kind == kind), start=np.zeros(NUM_BINS))
        for kind in ("weight", "activation")
    }
    return Sample(event, exponents)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
