"""A precision report for programs: precision.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from launcher.precision_report.examine import Examined, PassError
from launcher.reporting.summary import versions
from launcher.watch import float16_losses
from launcher.watch.float16_losses import BIAS, NON_FINITE_BIN, Gradient


def as_json(found: Examined, plan: Mapping[str, str]) -> dict[str, Any]:
    """The report with what the recipe resolved to, by name."""
    verdict = found.verdict
    return {
        "format": 3,
        "plan": dict(plan),
        "policy": found.policy,
        "batches": found.batches,
        "loss": {"float32": found.losses[0], found.policy: found.losses[1]},
        "loss_scale": {
            "needed": verdict.needed,
            "why": verdict.why,
            "now": math.ldexp(1.0, found.loss_scale_log2),
            "recommended": None if verdict.scale_log2 is None else math.ldexp(1.0, verdict.scale_log2),
            "headroom_bits": verdict.headroom_bits,
            "less_than_0.1%_lost": verdict.harmless and [math.ldexp(1.0, k) for k in verdict.harmless],
        },
        "sweep": [
            {"scale": math.ldexp(1.0, k), **float16_losses.pooled(found.narrow, k)._asdict()}
            for k in range(float16_losses.FLOOR, float16_losses.CEILING + 1)
        ],
        "gradients": [_gradient(one) for one in found.gradients],
        "errors": {f"{math.ldexp(1.0, k):.17g}": [_error(one) for one in rows] for k, rows in found.errors.items()},
        "lint": [dataclasses.asdict(one) for one in found.findings],
        "versions": versions(),
    }


def _gradient(one: Gradient) -> dict[str, Any]:
    known = [exponent for exponent in range(1, NON_FINITE_BIN) if one.counts[exponent]]
    return {
        "path": one.path,
        "kind": one.kind,
        "dtype": one.dtype,
        "maxima": [float(value) for value in one.maxima],
        "headroom_bits": _known(float16_losses.headroom(one.maximum)),
        "zeros": one.counts[0],
        "not_finite": one.counts[NON_FINITE_BIN],
        "counts_by_exponent": {str(place - BIAS): one.counts[place] for place in known},
        "at_scale_1": float16_losses.shares(one.counts, 0, one.maximum)._asdict(),
    }


def _error(one: PassError) -> dict[str, Any]:
    return {**one._asdict(), "cosine": _known(one.cosine), "relative": _known(one.relative)}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
