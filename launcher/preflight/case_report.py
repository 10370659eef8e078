"""The preflight report of one case: memory, time and suggestions, for a terminal and for preflight.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.preflight.compilation import Compilation
from launcher.preflight.costs import Costs
from launcher.preflight.forecast import Forecast, forecast
from launcher.preflight.hbm import HbmUse
from launcher.preflight.largest_batch import LargestBatch, batch_size
from launcher.preflight.roofline import VECTOR_UNIT, Roofline, of_operation
from launcher.preflight.slice_finding import SliceFinding
from launcher.preflight.suggestions import Suggestion
from launcher.reporting.console import Console, show_table
from launcher.reporting.units import amount, bytes_text, milliseconds, plural, step_text
from launcher.step_program.op_source import short_name

_OF_PLAN = ("task", "data", "batch", "rematerialisation", "policy", "steps")
_MEASURED = ("verdict", "memory needed", "of it", "step", "bound by", "compiled in")
_SHOWN = 8
_DIFFERENT = 1.005  # of HFU and MFU, beyond rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """A suggestion, and what came of it.

    Attributes:
      finding: None when it could not be compiled.
      refused: why it could not be.
    """

    suggestion: Suggestion
    finding: SliceFinding | None = None
    refused: str | None = None

    @property
    def fits(self) -> bool:
        return self.finding is not None and self.finding.fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseReport:
    """A finding with what was compiled to make it fit, or, with `largest`, to find the batch that it is of."""

    finding: SliceFinding
    tried: tuple[Tried, ...] = ()
    largest: LargestBatch | None = None


def verdict(finding: SliceFinding) -> str:
    """One word or two: "fits", "does not fit" or "does not compile"."""
    if finding.refusal is not None:
        return "does not compile"
    return "fits" if finding.fits else "does not fit"


def show(reported: CaseReport, console: Console) -> None:
    """Prints everything about one case."""
    finding = reported.finding
    costs, published = finding.costs, _forecast(finding)
    console.plan(_summary(finding))
    if finding.hbm is not None:
        _show_section(
            f"{_capital(finding.case.where.memory_name)} of one device", console, lines=_hbm_lines(finding.hbm)
        )
        if finding.hbm.buffers:
            _show_section("", console, rows=_buffer_rows(finding))
    if finding.roofline is not None:
        _show_section("Time of a step", console, lines=_roofline_lines(finding))
        if finding.roofline.estimated:
            _show_section("", console, rows=_unfilled_rows(finding))
    if published is not None:
        _show_section("", console, rows=published.rows())
    if costs is not None and costs.collectives:
        _show_section("", console, rows=_collective_rows(costs))
    if costs is not None and costs.kernels_by_kind:
        rows = [["kernels", "a step"], *([kind, str(count)] for kind, count in costs.kernels_by_kind.items())]
        _show_section("", console, rows=rows)
    if finding.advice:
        _show_section("Advice", console)
        for line in finding.advice:
            console.note(f"- {line}")
    if reported.tried:
        _show_section("Knobs, measured", console, rows=_tried_rows(reported))
    if reported.largest:
        _show_section("The largest batch", console, rows=_batch_rows(reported.largest))
        console.note(largest_text(reported.largest))


def _show_section(
    title: str, console: Console, *, lines: Mapping[str, str] | None = None, rows: Sequence[Sequence[str]] = ()
) -> None:
    console.note("")
    if title:
        console.note(title)
    if lines:
        console.plan(dict(lines))
    if rows:
        show_table(rows, console)


def largest_text(found: LargestBatch) -> str:
    """A sentence for people: the largest batch that fits, and the one that does not."""
    if found.fits is None:
        assert found.refused is not None
        return f"no batch fits, not even one of {batch_size(found.refused):,}"
    replica = found.fits.plan.per_replica_batch_size
    largest = f"the largest global batch that fits is {batch_size(found.fits):,}, {replica:,} examples a replica"
    if found.refused is None:
        return f"at least, for the search ended before a batch was refused: {largest}"
    refused = f"{batch_size(found.refused):,} needs {bytes_text(found.refused.hbm.needed)}" if found.refused.hbm else ""
    if found.is_exact:
        return f"{largest}; the next one, {refused} and does not fit"
    return f"{largest}, of those that were compiled; {refused} and does not fit, what lies between was not compiled"


def show_constants(findings: Sequence[SliceFinding], console: Console) -> None:
    """Prints what the estimates stand on, with the source of each number."""
    constants = {
        f"{finding.case.where.device_name} {name}": constant
        for finding in findings
        for name, constant in {**finding.case.where.constants, **(finding.hbm.reserved if finding.hbm else {})}.items()
    }
    lines = {
        name.replace("_", " "): f"{amount(constant.value)}{constant.unit} ({constant.source})"
        for name, constant in constants.items()
    }
    _show_section("Constants of the estimates", console, lines=lines)


def _summary(finding: SliceFinding) -> dict[str, str]:
    plan, model, compilation = finding.plan, finding.model, finding.compilation
    lines = plan.describe()
    lines.pop("cluster")
    outcome = verdict(finding)
    notes = enumerate((*plan.notes, *model.notes), start=1)
    return {
        "where": finding.case.where.describe(),
        **({"figures of": finding.case.where.figures_of} if finding.case.where.figures_of else {}),
        **({"changed": "; ".join(finding.case.changes)} if finding.case.changes else {}),
        **{name: lines[name] for name in _OF_PLAN if name in lines},
        "wire": plan.wire_dtype.name,
        "parameters": f"{model.trained_parameters:,} trained of {model.parameters:,}",
        **model.computed,
        **{f"note {number}": note for number, note in notes},
        "compiler": f"compiled in {_seconds(compilation)}",
        "verdict": outcome if finding.refusal is None else f"{outcome}: {finding.refusal}",
        **_unread(finding),
    }


def _hbm_lines(hbm: HbmUse) -> dict[str, str]:
    share = hbm.needed / hbm.available
    lines = {
        "arguments": f"{bytes_text(hbm.arguments)} (variables and the batch)",
        "outputs": f"{bytes_text(hbm.outputs)} (beyond those that take an argument's place)",
        "temporaries": f"{bytes_text(hbm.temporaries)} (activations, gradients)",
        **({"code": bytes_text(hbm.code)} if hbm.code else {}),
        **{name: f"{bytes_text(constant.value)}, allowed for" for name, constant in hbm.reserved.items()},
        "needed": f"{bytes_text(hbm.needed)}, {share:.0%} of what a program may use",
        "available": bytes_text(hbm.available),
    }
    if not hbm.fits:
        lines["missing"] = bytes_text(hbm.excess)
    return lines


def _buffer_rows(finding: SliceFinding) -> list[list[str]]:
    assert finding.hbm is not None
    rows = [["biggest buffers", finding.case.where.memory_name, "padding", "shape", "from"]]
    for buffer in finding.hbm.buffers:
        padding = f"{buffer.padding / buffer.bytes:.0%}" if buffer.padding else ""
        shape = str(buffer.array) if buffer.array else ""
        name = f"{buffer.kind} {buffer.name}" if buffer.kind != "temporary" else buffer.name
        rows.append([name, bytes_text(buffer.bytes), padding, shape, _where(buffer.where)])
    return rows


def _where(source: str) -> str:
    name, _, line = source.partition(" at ")
    return " at ".join(part for part in (short_name(name), line) if part)


def _roofline_lines(finding: SliceFinding) -> dict[str, str]:
    bounds, costs, plan = finding.roofline, finding.costs, finding.plan
    assert bounds is not None
    assert costs is not None
    where = finding.case.where
    memory, wire = where.memory_name, where.wire_name
    times = {"compute": bounds.compute_seconds, memory: bounds.hbm_seconds, wire: bounds.wire_seconds}
    reduced = sum(one.bytes * one.times for one in costs.collectives)
    collectives = plural(sum(one.times for one in costs.collectives), "collective")
    what = {
        "compute": where.compute_words(costs),
        memory: f"{amount(costs.hbm_bytes)}B read and written a device",
        wire: f"{amount(reduced)}B in {collectives} {where.wire_words()}",
    }
    lines = {"step": f"{step_text(bounds.step_seconds, bounds.estimated_seconds)}, bound by {_mostly(bounds)}"}
    if bounds.estimated:
        lines["estimate"] = (
            f"the compiler's cost model, one operation after another at {where.clock_words}, and collectives with "
            f"their latency: {_parts(bounds)}{_without_estimate(costs)}"
        )
    elif costs.unestimated:
        lines["estimate"] = f"none{_without_estimate(costs)}, and they may be most of the step"
    lines |= {
        f"{name}, at least": f"{milliseconds(seconds)}: {what[name]}{', the bound' if name == bounds.bound_by else ''}"
        for name, seconds in times.items()
    }
    published = _forecast(finding)
    lines["forecast"] = str(published) if published else "none: no published rate of a comparable step is known"
    about, most = ("about", "about") if bounds.estimated else ("at least", "at most")
    lines["MFU"] = f"{most} {bounds.mfu:.1%}"
    if finding.model.flops is None:
        lines["MFU"] += ", products that are computed again counted as well"
    elif bounds.hfu > _DIFFERENT * bounds.mfu:
        lines["HFU"] = f"{most} {bounds.hfu:.1%}, with what is computed again or filled up to whole tiles"
    lines["throughput"] = f"{most} {bounds.examples_per_second:,.0f} examples/s in all" + (
        f", {bounds.tokens_per_second:,.0f} tokens/s" if bounds.tokens_per_second is not None else ""
    )
    lines["the whole run"] = f"{about} {_hours(bounds.hours)} for {plan.total_steps:,} steps, training alone"
    return lines


def _mostly(bounds: Roofline) -> str:
    """What the step is bound by; of an estimate, what most of it goes to."""
    if bounds.most_for != VECTOR_UNIT:
        return bounds.most_for
    return f"the {VECTOR_UNIT}, that is by operations that fill neither memory bandwidth nor matrix unit"


def _parts(bounds: Roofline) -> str:
    """ "vector unit 12.3 ms (60%), compute 8 ms (40%)"."""
    total = sum(bounds.estimated.values())
    parts = sorted(bounds.estimated.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {milliseconds(seconds)} ({seconds / total:.0%})" for name, seconds in parts if seconds)


def _unfilled_rows(finding: SliceFinding) -> list[list[str]]:
    """The operations that fill neither memory bandwidth nor matrix unit, those of a layer together."""
    costs, where = finding.costs, finding.case.where
    assert costs is not None
    groups: dict[str, list[float]] = {}
    for one in costs.operations:
        seconds, fills = of_operation(one, where)
        if fills == VECTOR_UNIT:
            group = groups.setdefault(short_name(str(one.source)) or one.opcode, [0, 0, 0.0])
            for place, more in enumerate((1, one.cycles or 0, seconds)):
                group[place] += more
    rows = [["fills neither memory bandwidth nor matrix unit", "operations", "cycles a step", "time"]]
    for name, (count, cycles, seconds) in sorted(groups.items(), key=lambda item: -item[1][2])[:_SHOWN]:
        rows.append([name, f"{count:,.0f}", f"{cycles:,.0f}", milliseconds(seconds)])
    return rows


def _forecast(finding: SliceFinding) -> Forecast | None:
    """What published runs say of the bound."""
    if finding.roofline is None:
        return None
    return forecast(finding.model.kind, finding.roofline, finding.case.where.accelerator)


def _without_estimate(costs: Costs) -> str:
    """What the compiler's cost model leaves out."""
    if not costs.unestimated:
        return ""
    taken = ", taken at what their memory traffic needs" if costs.operations else ""
    return f"; the compiler has no estimate for {plural(costs.unestimated, 'operation')}{taken}"


def _unread(finding: SliceFinding) -> dict[str, str]:
    """That the compiled program was not read whole, and what follows."""
    if not finding.unread:
        return {}
    return {
        "not read": f"{plural(len(finding.unread), 'part')} of the compiled program, so nothing is said of its time "
        f"and FLOPs; memory is the compiler's own figure. First: {finding.unread[0]}. Please report it"
    }


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{60 * hours:.1f} minutes" if hours >= 1 / 60 else f"{3600 * hours:.1f} seconds"


def _collective_rows(costs: Costs) -> list[list[str]]:
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for one in costs.collectives:
        group = groups.setdefault((one.kind, one.dtypes), [0, 0])
        group[0] += one.times
        group[1] += one.times * one.bytes
    rows = [["collective", "dtype", "a step", "bytes"]]
    for (kind, dtypes), (times, size) in sorted(groups.items(), key=lambda item: -item[1][1]):
        rows.append([kind, ", ".join(dtypes), str(times), bytes_text(size)])
    return rows


def _tried_rows(reported: CaseReport) -> list[list[str]]:
    rows = [["change", *_MEASURED]]
    rows.append(["as it is", *_measurements(reported.finding)])
    for one in reported.tried:
        if one.finding is not None:
            rows.append([one.suggestion.flag, *_measurements(one.finding)])
        elif one.refused is not None:
            rows.append([one.suggestion.flag, f"not applicable: {one.refused}", *[""] * 5])
    return rows


def _batch_rows(found: LargestBatch) -> list[list[str]]:
    rows = [["global batch", "a replica", *_MEASURED]]
    for one in sorted(found.tried, key=batch_size):
        rows.append([f"{batch_size(one):,}", f"{one.plan.per_replica_batch_size:,}", *_measurements(one)])
    return rows


def _measurements(finding: SliceFinding) -> list[str]:
    hbm, bounds = finding.hbm, finding.roofline
    return [
        verdict(finding),
        bytes_text(hbm.needed) if hbm else "",
        f"{hbm.needed / hbm.available:.0%}" if hbm else "",
        step_text(bounds.step_seconds, bounds.estimated_seconds) if bounds else "",
        bounds.most_for if bounds else "",
        _seconds(finding.compilation),
    ]


def _seconds(compilation: Compilation) -> str:
    return f"{compilation.seconds:.0f} s" + (" (before, it was in the cache)" if compilation.cached else "")


def as_json(reported: CaseReport) -> dict[str, Any]:
    """The same for a program; sizes in bytes, times in seconds."""
    finding = reported.finding
    plan, hbm, costs, bounds = finding.plan, finding.hbm, finding.costs, finding.roofline
    where, published = finding.case.where, _forecast(finding)
    return {
        "accelerator_type": where.name,
        "topology": where.topology_name,
        "chips": where.num_chips,
        "hosts": where.num_hosts,
        "replicas": where.num_replicas,
        "changes": list(finding.case.changes),
        "verdict": verdict(finding),
        "refusal": finding.refusal,
        "compiler_error": finding.compilation.error,
        "global_batch_size": plan.recipe.global_batch_size,
        "per_replica_batch_size": plan.per_replica_batch_size,
        "microbatches": plan.microbatches,
        "rematerialize": plan.rematerialize,
        "policy": plan.policy,
        "wire_dtype": plan.wire_dtype.name,
        "steps": plan.total_steps,
        "parameters": finding.model.parameters,
        "computed": dict(finding.model.computed),
        "compile_seconds": finding.compilation.seconds,
        "from_cache": finding.compilation.cached,
        "unread": list(finding.unread),
        "hbm": None if hbm is None else _hbm_json(hbm),
        "costs": None
        if costs is None
        else {
            "flops": costs.flops,
            "model_flops": None if finding.model.flops is None else finding.model.flops.model,
            "hbm_bytes": costs.hbm_bytes,
            "compiler_flops": finding.compilation.cost.get("flops"),
            "compiler_bytes_accessed": finding.compilation.cost.get("bytes accessed"),
            "collectives": [
                {name: value for name, value in dataclasses.asdict(one).items() if name != "source"}
                for one in costs.collectives
            ],
            "host_transfers": len(costs.host_transfers),
            "dynamic_shapes": len(costs.dynamic),
            "operations_without_estimate": costs.unestimated,
            "custom_kernels": costs.kernels,
            "kernels_by_kind": dict(costs.kernels_by_kind),
            "recomputed": len(costs.recomputed),
        },
        "roofline": None
        if bounds is None
        else {
            **dataclasses.asdict(bounds),
            "step_seconds": bounds.step_seconds,
            "estimated_seconds": bounds.estimated_seconds,
            "most_for": bounds.most_for,
        },
        "forecast": None if published is None else published.as_json(),
        "advice": list(finding.advice),
        "suggestions": [_tried_json(one) for one in reported.tried],
        "largest_batch": None if reported.largest is None else _largest_json(reported.largest),
        "constants": {name: dataclasses.asdict(constant) for name, constant in where.constants.items()},
    }


def _hbm_json(hbm: HbmUse) -> Mapping[str, Any]:
    return {
        **{name: value for name, value in dataclasses.asdict(hbm).items() if name != "fits"},
        "reserved": {name: constant.value for name, constant in hbm.reserved.items()},
        "missing": hbm.excess,
        "buffers": [
            {
                "kind": one.kind,
                "name": one.name,
                "bytes": one.bytes,
                "padding_bytes": one.padding,
                "shape": str(one.array) if one.array else None,
                "from": one.where,
            }
            for one in hbm.buffers
        ],
    }


def _tried_json(one: Tried) -> Mapping[str, Any]:
    found = one.finding
    return {
        "flag": one.suggestion.flag,
        "why": one.suggestion.why,
        "verdict": None if found is None else verdict(found),
        "hbm_bytes": None if found is None or found.hbm is None else found.hbm.needed,
        "step_seconds": None if found is None or found.roofline is None else found.roofline.step_seconds,
        "estimated_seconds": None if found is None or found.roofline is None else found.roofline.estimated_seconds,
        "compile_seconds": None if found is None else found.compilation.seconds,
        "refused": one.refused,
    }


def _largest_json(found: LargestBatch) -> Mapping[str, Any]:
    tried = sorted(found.tried, key=batch_size)
    return {
        "fits": None if found.fits is None else batch_size(found.fits),
        "refused": None if found.refused is None else batch_size(found.refused),
        "exact": found.is_exact,
        "unit": found.unit,
        "tried": [
            {
                "global_batch_size": batch_size(one),
                "verdict": verdict(one),
                "hbm_bytes": None if one.hbm is None else one.hbm.needed,
                "compile_seconds": one.compilation.seconds,
            }
            for one in tried
        ],
    }
