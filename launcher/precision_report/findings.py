"""Findings of a precision report: in words and tables for people, and precision.json for programs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.precision_report.examine import Examined
from launcher.reporting.console import Console, show_table
from launcher.reporting.summary import versions
from launcher.run.layer_lint import LintFinding
from launcher.watch import float16_losses
from launcher.watch.float16_losses import BIAS, NON_FINITE_BIN, Gradient

Rows = list[list[str]]


def show(found: Examined, console: Console, *, layers: int) -> None:
    """Prints the report: the recommendation, then tables with the worst first; of those by layer, so many `layers`."""
    console.note("")
    for line in recommendation(found):
        console.note(line)
    for title, rows in (
        ("What float16 does to the gradients, shares of those that are not zero", totals(found)),
        ("Worst layers", worst(found, layers)),
        ("The real 16-bit pass against float32, worst weights", errors(found, layers)),
    ):
        if len(rows) > 1:
            console.note("")
            console.note(title)
            show_table(rows, console)
    console.note("")
    for line in findings(found.findings):
        console.note(line)


def recommendation(found: Examined) -> list[str]:
    """Recommendation in words: what to do, first."""
    advice, now = found.advice, found.loss_scale_log2
    needed = "loss scaling is needed" if advice.needed else "loss scaling is not needed"
    lines = [f"{found.policy}: {needed}: {advice.why}."]
    if advice.scale_log2 is not None:
        at_most = advice.scale_log2 == float16_losses.CEILING
        lines.append(
            f"Recommended scale: {power(advice.scale_log2)}, with {advice.headroom_bits:.1f} bits of headroom"
            + (" (no larger, for the float32 sums of scaled losses)" if at_most else "")
            + f": train.loss_scale = @DynamicLossScale(), DynamicLossScale.initial_scale = {2.0**advice.scale_log2}."
        )
        lines.append(
            f"Less than 0.1% of all is lost, and nothing overflows, from {_range(advice.harmless)}."
            if advice.harmless
            else "Every scale loses 0.1% or more of all: the gradients span more than float16 does."
        )
    if found.policy == "mixed_float16" and found.narrow:
        left = min(float16_losses.headroom(gradient.maximum, now) for gradient in found.narrow)
        state = f"{left:.1f} bits of headroom" if left >= 0 else f"an overflow, {-left:.1f} bits too high"
        lines.append(f"The run's scale now: {power(now)}, {state}.")
    expected, real = found.losses
    lines.append(f"Loss of the last batch: {expected:.6g} in float32, {real:.6g} under {found.policy}.")
    return lines


def totals(found: Examined) -> Rows:
    rows = [["gradients of", "scale", "flushed < 2^-25", "subnormal < 2^-14", "above 65504", "headroom"]]
    for kind, name in (("weight", "weights"), ("activation", "activations"), ("wire", "weights, summed over replicas")):
        chosen = [gradient for gradient in found.narrow if gradient.kind == kind]
        for k in found.errors if chosen else ():
            shares = float16_losses.pooled(chosen, k)
            left = float16_losses.headroom(max(gradient.maximum for gradient in chosen), k)
            rows.append([name, power(k), *(share(value) for value in shares), f"{left:.1f} bits"])
    return rows


def worst(found: Examined, count: int) -> Rows:
    """Weights and activations that lose the most at scale 1, first values, then bits; the worst first."""

    scales = list(dict.fromkeys([0, *found.advice.recommended]))
    at_scales = [f"{what} at {power(k)}" for k in scales for what in ("lost", "subnormal")]
    rows = [["layer or weight", "gradient of", *at_scales, "largest", "headroom"]]
    gradients = [
        (gradient, [value for k in scales for value in _lost(gradient, k)])
        for gradient in found.narrow
        if gradient.kind != "wire"
    ]
    for gradient, lost in sorted(gradients, key=lambda row: row[1][:2], reverse=True)[:count]:
        left = float16_losses.headroom(gradient.maximum, found.loss_scale_log2)
        rows.append([gradient.path, gradient.kind, *map(share, lost), f"{gradient.maximum:.1e}", f"{left:.1f} bits"])
    return rows


def _lost(gradient: Gradient, scale_log2: int) -> tuple[float, float]:
    shares = float16_losses.shares(gradient.counts, scale_log2, gradient.maximum)
    return shares.lost, shares.subnormal


def errors(found: Examined, count: int) -> Rows:
    by_scale = {k: {error.path: error for error in rows if not error.is_rounding} for k, rows in found.errors.items()}
    now = by_scale[found.loss_scale_log2]
    order = sorted(now.values(), key=lambda error: -error.relative if math.isfinite(error.relative) else -math.inf)[
        :count
    ]
    rows = [["weight", *(f"error at {power(k)}" for k in by_scale), *(f"cosine at {power(k)}" for k in by_scale)]]
    for error in order:
        same = [found_at[error.path] for found_at in by_scale.values()]
        relative = (f"{each.relative:.1e}" if math.isfinite(each.relative) else "not finite" for each in same)
        cosines = (f"{each.cosine:.5f}" if math.isfinite(each.cosine) else "-" for each in same)
        rows.append([error.path, *relative, *cosines])
    return rows


def findings(found: Sequence[LintFinding], shown: int = 3) -> list[str]:
    """The lint in lines: what has one remedy together."""
    if not found:
        return ["Lint: nothing found"]
    groups: dict[tuple[str, str, str], list[LintFinding]] = {}
    for finding in found:
        groups.setdefault((finding.level, finding.rule, finding.fix), []).append(finding)
    lines = ["Lint"]
    for (level, rule, fix), group in groups.items():
        lines.append(f"  {level}: {rule}: {fix}")
        lines += [f"    {': '.join(filter(None, (finding.path, finding.text)))}" for finding in group[:shown]]
        if len(group) > shown:
            lines.append(f"    and {len(group) - shown} more, in precision.json")
    return lines


def power(scale_log2: int) -> str:
    return f"2^{scale_log2}" if scale_log2 else "1"


def share(value: float) -> str:
    """A share in percent, with as many digits as it takes to tell it from none."""
    if value == 0:
        return "0"
    return f"{value:.1%}" if value >= 0.01 else f"{value:.2%}" if value >= 1e-4 else "< 0.01%"


def _range(harmless: tuple[int, int]) -> str:
    low, high = harmless
    below = "below " if low == float16_losses.FLOOR else ""
    return f"{below}{power(low)} to {power(high)}" + (" at least" if high == float16_losses.CEILING else "")


def as_json(found: Examined, plan: Mapping[str, str]) -> dict[str, Any]:
    """The report with what the recipe resolved to, by name."""
    advice = found.advice
    return {
        "format": 3,
        "plan": dict(plan),
        "policy": found.policy,
        "batches": found.batches,
        "loss": {"float32": found.losses[0], found.policy: found.losses[1]},
        "loss_scale": {
            "needed": advice.needed,
            "why": advice.why,
            "now": 2.0**found.loss_scale_log2,
            "recommended": None if advice.scale_log2 is None else 2.0**advice.scale_log2,
            "headroom_bits": advice.headroom_bits,
            "less_than_0.1%_lost": advice.harmless and [2.0**k for k in advice.harmless],
        },
        "sweep": [
            {"scale": 2.0**k, **float16_losses.pooled(found.narrow, k)._asdict()}
            for k in range(float16_losses.FLOOR, float16_losses.CEILING + 1)
        ],
        "gradients": [_gradient(one) for one in found.gradients],
        "errors": {f"{2.0**k:.17g}": [one._asdict() for one in rows] for k, rows in found.errors.items()},
        "lint": [dataclasses.asdict(one) for one in found.findings],
        "versions": versions(),
    }


def _gradient(gradient: Gradient) -> dict[str, Any]:
    known = [exponent for exponent in range(1, NON_FINITE_BIN) if gradient.counts[exponent]]
    return {
        "path": gradient.path,
        "kind": gradient.kind,
        "dtype": gradient.dtype,
        "maxima": gradient.maxima.tolist(),
        "headroom_bits": float16_losses.headroom(gradient.maximum),
        "zeros": gradient.counts[0],
        "not_finite": gradient.counts[NON_FINITE_BIN],
        "counts_by_exponent": {str(place - BIAS): gradient.counts[place] for place in known},
        "at_scale_1": float16_losses.shares(gradient.counts, 0, gradient.maximum)._asdict(),
    }
