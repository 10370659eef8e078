"""Everything a precision report says, measured on a few batches of a session.

Recipes or `--gin_param` bind its settings as `precision_report.…`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from launcher.config import gin_bindings
from launcher.config.bound_types import check_least
from launcher.errors import TrainingError, UsageError
from launcher.precision_report import lint
from launcher.precision_report.probe import Probe, Probed, Tensor
from launcher.run.layer_lint import LintFinding
from launcher.run.plan import RunPlan
from launcher.run.session import Session
from launcher.step.precision import POLICIES
from launcher.step.statistics import is_overwritten
from launcher.watch import float16_losses
from launcher.watch.float16_losses import Gradient, ScaleAdvice

# A gradient this far below the others is what rounding leaves of an exact zero: its direction means nothing.
_ROUNDING = 1e-6
_STEPS_OF_SCALES = 2  # after which float8 has scales by what it has seen


@gin_bindings.settings("precision_report")
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionReportSettings:
    """Settings of a precision report.

    Attributes:
      batches: calibration batches, of the steps that follow the weights.
      policy: the policy to examine; None for the recipe's, and mixed_float16 where that is float32.
      layers: how many layers the tables show, the worst first; precision.json has all.
    """

    batches: int = 2
    policy: str | None = None
    layers: int = 8

    def __post_init__(self) -> None:
        check_least("precision_report", self, batches=1, layers=1)
        if self.policy is not None and self.policy not in POLICIES:
            raise UsageError(f"precision_report.policy = {self.policy!r}: expected one of {', '.join(POLICIES)}")

    def policy_for(self, resolved: str) -> str:
        """The policy to examine in a run whose own is `resolved`."""
        return self.policy or ("mixed_float16" if resolved == "float32" else resolved)


class PassError(NamedTuple):
    """Distance of the 16-bit gradient of one weight from the float32 one."""

    path: str
    cosine: float  # of the angle between them; NaN where the 16-bit one is not finite
    relative: float  # norm of the difference over the norm of the float32 one
    is_rounding: bool  # whether the float32 one is zero but for rounding, so that neither says anything


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examined:
    """Findings under `policy`.

    Attributes:
      loss_scale_log2: of the run's next step.
      batches: how many were looked at.
      gradients: in float32 at scale 1, of weights and activations, and of sums over replicas.
      errors: of the 16-bit pass, by the scale's exponent: of 1, the run's and the recommended one, each once.
      losses: mean loss of the last batch, in float32 and under the policy.
    """

    policy: str
    loss_scale_log2: int
    batches: int
    gradients: list[Gradient]
    errors: dict[int, list[PassError]]
    losses: tuple[float, float]
    advice: ScaleAdvice
    findings: list[LintFinding]

    @property
    def narrow(self) -> list[Gradient]:
        """The gradients that are in 16 bits."""
        return [one for one in self.gradients if one.is_16_bit]


def examine(built: Session, settings: PrecisionReportSettings, scale: float, say: Callable[[str], None]) -> Examined:
    """Examines a session.

    Args:
      built: under the policy to examine, its weights in place.
      scale: the loss scale that counts as the run's.
      say: told what is being done.

    Raises:
      UsageError: the task builds another model each time.
      TrainingError: float32 gradients are not finite or all zero.
    """
    probe = Probe(built)
    batches = built.trainer.batches(built.plan.data)
    found: list[Probed] = []
    say(f"{built.plan.policy} beside float32: tracing both passes")
    if any(map(is_overwritten, built.model.trainable_variables)):
        for _ in range(_STEPS_OF_SCALES):
            probe.run(next(batches), scale)
    for number in range(settings.batches):
        batch = next(batches)
        found.append(probe.run(batch, scale))
        say(f"batch {number + 1} of {settings.batches}: loss {found[-1].shadow.loss:.4g}")
    if not np.isfinite(found[-1].shadow.loss):
        raise TrainingError(f"the loss is {found[-1].shadow.loss} in float32 already: there is no precision to examine")
    plan = built.plan
    gradients = _gradients(probe, found, plan)
    advice = float16_losses.advise([one for one in gradients if one.is_16_bit], plan.policy)
    now = round(math.log2(scale))
    errors = {}
    for k in dict.fromkeys([0, now, *advice.recommended]):
        say(f"the 16-bit pass at scale 2^{k}")
        errors[k] = _errors(probe, found[-1] if k == now else probe.run(batch, 2.0**k))
    say("lint")
    seen = [one.path for one in gradients if one.kind == "activation"]
    return Examined(
        policy=plan.policy,
        loss_scale_log2=now,
        batches=settings.batches,
        gradients=gradients,
        errors=errors,
        losses=(float(found[-1].shadow.loss), float(found[-1].real.loss)),
        advice=advice,
        findings=lint.lint(built, probe.graph(batch), seen),
    )


def _gradients(probe: Probe, found: Sequence[Probed], plan: RunPlan) -> list[Gradient]:
    """Gradients of weights and activations, and sums over replicas where they are others than those of the weights."""
    left = {one.path for one in probe.model.trainable_variables if is_overwritten(one)}
    counts, maxima = (
        _total([probed.shadow.counts for probed in found]),
        np.max([probed.shadow.maxima for probed in found], axis=0),
    )
    gradients = [
        Gradient(**vars(tensor), counts=counts[index], maxima=maxima[:, index])
        for index, tensor in enumerate(probe.tensors)
        if counts[index].sum() and tensor.path not in left  # else a layer without a gradient
    ]
    parts, dtype = plan.strategy.num_replicas * plan.microbatches, plan.reduce_dtype.name
    sums = _total([probed.sum_counts for probed in found])
    # What the other microbatches add is not known, but at most as much each.
    largest = np.max([probed.sum_maxima for probed in found], axis=0) * plan.microbatches
    for index, weight in enumerate(_weights(probe)):
        if weight.path not in left and (parts > 1 or weight.dtype != dtype):
            of_sum = {"kind": "wire", "counts": sums[index], "maxima": largest[index : index + 1]}
            gradients.append(Gradient(path=weight.path, dtype=dtype, **of_sum))
    return gradients


def _weights(probe: Probe) -> list[Tensor]:
    return [tensor for tensor in probe.tensors if tensor.kind == "weight"]


def _total(counts: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(np.sum(counts, axis=0, dtype=np.float64))


def _errors(probe: Probe, probed: Probed) -> list[PassError]:
    compared = probed.compared
    variables, weights = probe.model.trainable_variables, _weights(probe)
    kept = [place for place, variable in enumerate(variables) if not is_overwritten(variable)]
    norms, cosines, errors = (
        np.asarray(one)[kept] for one in (compared.norm, compared.cosine, compared.relative_error)
    )
    typical = norms / np.sqrt([variables[place].value.shape.num_elements() for place in kept])
    is_rounding = typical < _ROUNDING * np.median(typical)
    columns = ([weights[place] for place in kept], cosines, errors, is_rounding)
    return [
        PassError(weight.path, float(cosine), float(relative), bool(rounded))
        for weight, cosine, relative, rounded in zip(*columns, strict=True)
    ]
