"""Figures of a precision report; import it only where matplotlib may be needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from launcher.precision_report import terminal
from launcher.precision_report.examine import Examined
from launcher.watch import float16_losses
from launcher.watch.float16_losses import BIAS, NON_FINITE_BIN, Gradient

_BEFORE, _AFTER = "#9aa5b1", "#1f6fb2"
_LINES = (
    (float16_losses.FLUSH, "2^-25", "#b00020"),
    (float16_losses.NORMAL, "2^-14", "#c77700"),
    (16, "65504", "#b00020"),
)


def sweep(found: Examined) -> Any:
    """Shares lost under every loss scale: of all, and of the worst layers; a matplotlib Figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.add_subplot()
    scales = range(float16_losses.FLOOR, float16_losses.CEILING + 1)
    for kind, color in (("weight", "#1f6fb2"), ("activation", "#2e8b57")):
        chosen = [one for one in found.narrow if one.kind == kind]
        if not chosen:
            continue
        shares = [float16_losses.pooled(chosen, k) for k in scales]
        axes.plot(scales, [100 * one.flushed for one in shares], color=color, label=f"{kind}s: flushed")
        axes.plot(
            scales, [100 * one.subnormal for one in shares], color=color, linestyle=":", label=f"{kind}s: subnormal"
        )
        axes.plot(
            scales, [100 * one.above for one in shares], color=color, linestyle="--", label=f"{kind}s: above 65504"
        )
    axes.axvline(found.loss_scale_log2, color="#444", linestyle="-.", label="the run's scale")
    if found.verdict.scale_log2 is not None:
        axes.axvline(found.verdict.scale_log2, color="#b00020", label="recommended")
    if found.verdict.harmless:
        low, high = found.verdict.harmless
        axes.axvspan(low, high, color="#2e8b57", alpha=0.08, label="less than 0.1% lost")
    axes.set_xlabel("loss scale, power of two")
    axes.set_ylabel("% of gradients that are not zero")
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 0.01, 0.1, 1, 10, 100], ["0", "0.01", "0.1", "1", "10", "100"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def histograms(found: Examined, layers: int) -> Any:
    """Exponents of all gradients and of the worst layers, at scale 1 and at the recommended one; a Figure."""
    from matplotlib.figure import Figure

    panels: list[tuple[str, Sequence[Gradient]]] = [
        (f"all gradients of {kind}s", [one for one in found.narrow if one.kind == kind])
        for kind in ("weight", "activation")
    ]
    panels += [(f"{one.path} ({one.kind})", [one]) for one in terminal.worst_gradients(found, layers)]
    panels = [(title, chosen) for title, chosen in panels if chosen]
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 2.6 * rows), layout="constrained")
    # One range for all, so that layers can be compared.
    low, high = _range([one for _, chosen in panels for one in chosen], found.verdict.scale_log2 or 0)
    for index, (title, chosen) in enumerate(panels):
        axes = figure.add_subplot(rows, 2, index + 1)
        counts = np.sum([one.counts for one in chosen], axis=0)
        _histogram(axes, counts, found.verdict.scale_log2)
        axes.set_xlim(low, high)
        title = title if len(title) < 60 else f"…{title[-58:]}"
        axes.set_title(f"{title}, {counts[0] / counts.sum():.1%} zeros", fontsize=9)
        if index == 0:
            axes.legend(fontsize=7, loc="upper left")
        if index >= len(panels) - 2:
            axes.set_xlabel("exponent of the magnitude, power of two")
        if index % 2 == 0:
            axes.set_ylabel("% of those not zero")
    return figure


def _histogram(axes: Any, counts: np.ndarray, recommended: int | None) -> None:
    exponents = np.arange(1, NON_FINITE_BIN) - BIAS
    total = counts[1:NON_FINITE_BIN].sum() or 1.0
    heights = 100 * counts[1:NON_FINITE_BIN] / total
    shown = heights > 0
    # A bin reaches from its exponent to the next.
    axes.bar(exponents[shown], heights[shown], width=1.0, align="edge", color=_BEFORE, label="scale 1")
    if recommended:
        axes.step(
            np.append(exponents, exponents[-1] + 1) + recommended,
            np.append(heights, 0.0),
            where="post",
            color=_AFTER,
            linewidth=1.2,
            label=f"scale {terminal.power(recommended)}",
        )
    for place, name, color in _LINES:
        axes.axvline(place, color=color, linewidth=1)
        axes.annotate(
            name, (place, 1), xycoords=("data", "axes fraction"), xytext=(2, -9), textcoords="offset points",
            fontsize=7, color=color,
        )  # fmt: skip
    axes.grid(alpha=0.3)


def _range(gradients: Sequence[Gradient], recommended: int) -> tuple[float, float]:
    counts = np.sum([one.counts for one in gradients], axis=0)[1:NON_FINITE_BIN]
    places = np.nonzero(counts)[0] + 1 - BIAS
    if not len(places):
        return -40.0, 20.0
    # The rest of a long tail would make the rest small.
    cumulated = np.cumsum(counts) / counts.sum()
    low = int(np.searchsorted(cumulated, 1e-4)) + 1 - BIAS
    return min(low, float16_losses.FLUSH) - 3.0, max(places[-1] + 1 + recommended, 17) + 3.0
