"""The preflight report: memory, time and suggestions of a case, and a table of several, for people and programs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.preflight.compiled import Compilation
from launcher.preflight.compiled.costs import Costs
from launcher.preflight.compiled.hbm import HbmUse
from launcher.preflight.largest_batch import LargestBatch, batch_size
from launcher.preflight.roofline import VECTOR_UNIT, Roofline, of_operation
from launcher.preflight.slice_finding import SliceFinding
from launcher.preflight.suggestions import Suggestion
from launcher.preflight.targets import Target
from launcher.reporting.console import Console, show_table
from launcher.reporting.units import amount, bytes_text, milliseconds, plural, step_text
from launcher.step_program.op_source import short_name

_OF_PLAN = ("task", "data", "batch", "rematerialisation", "policy", "steps")
_MEASURED = ("verdict", "memory needed", "of it", "step", "bound by")
_SHOWN = 8
_DIFFERENT = 1.005  # of HFU and MFU, beyond rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseReport:
    """A finding with what was compiled to make it fit, or, with `largest`, to find the batch that it is of."""

    finding: SliceFinding
    tried: tuple[Suggestion, ...] = ()
    largest: LargestBatch | None = None


def verdict(finding: SliceFinding) -> str:
    """One word or two: "fits", "does not fit" or "does not compile"."""
    if finding.refusal is not None:
        return "does not compile"
    return "fits" if finding.fits else "does not fit"


def show(reported: CaseReport, console: Console) -> None:
    """Prints everything about one case."""
    finding = reported.finding
    costs, memory = finding.costs, finding.case.where.memory_name
    console.plan(_summary(finding))
    if finding.hbm is not None:
        _show_section(f"{memory[:1].upper()}{memory[1:]} of one device", console, lines=_hbm_lines(finding.hbm))
        if finding.hbm.buffers:
            _show_section("", console, rows=_buffer_rows(finding.hbm, memory))
    if costs is not None and finding.roofline is not None:
        _show_section("Time of a step", console, lines=_roofline_lines(finding, finding.roofline, costs))
        if finding.roofline.estimated:
            _show_section("", console, rows=_unfilled_rows(finding.case.where, costs))
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


def comparison(findings: Sequence[SliceFinding], not_applicable: Sequence[tuple[str, str]]) -> list[list[str]]:
    """The table of several targets or batch sizes, its heading first; and of cases why there is no finding."""
    table = [["where", "batch", "a replica", *_MEASURED, "MFU", "examples/s", "hours"]]
    for finding in findings:
        plan, bounds = finding.plan, finding.roofline
        parts = f" in {plan.microbatches}" if plan.microbatches > 1 else ""
        batch = [str(plan.recipe.global_batch_size), f"{plan.per_replica_batch_size}{parts}"]
        rates = [""] * 3
        if bounds:
            rates = [f"{bounds.mfu:.1%}", f"{bounds.examples_per_second:,.0f}", f"{bounds.hours:,.2f}"]
        table.append([finding.case.where.name, *batch, *_measurements(finding), *rates])
    return table + [[name, "", "", f"not applicable: {why}", *[""] * 7] for name, why in not_applicable]


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
    notes = enumerate((*plan.notes, *model.notes), start=1)
    found = {
        "where": finding.case.where.describe(),
        **({"figures of": finding.case.where.figures_of} if finding.case.where.figures_of else {}),
        **({"changed": "; ".join(finding.case.changes)} if finding.case.changes else {}),
        **{name: lines[name] for name in _OF_PLAN if name in lines},
        "wire": plan.reduce_dtype.name,
        "parameters": f"{model.trained_parameters:,} trained of {model.parameters:,}",
        **model.computed,
        **{f"note {number}": note for number, note in notes},
        "compiler": f"compiled in {_seconds(compilation)}",
        "verdict": ": ".join(filter(None, (verdict(finding), finding.refusal))),
    }
    if finding.unread:
        found["not read"] = (
            f"{plural(len(finding.unread), 'part')} of the compiled program, so nothing is said of its time and FLOPs; "
            f"memory is the compiler's own figure. First: {finding.unread[0]}. Please report it"
        )
    return found


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


def _buffer_rows(hbm: HbmUse, memory: str) -> list[list[str]]:
    rows = [["biggest buffers", memory, "padding", "shape", "from"]]
    for buffer in hbm.buffers:
        padding = f"{buffer.padding / buffer.bytes:.0%}" if buffer.padding else ""
        shape = str(buffer.array) if buffer.array else ""
        name = f"{buffer.kind} {buffer.name}" if buffer.kind != "temporary" else buffer.name
        op_name, _, line = buffer.where.partition(" at ")
        source = " at ".join(filter(None, (short_name(op_name), line)))
        rows.append([name, bytes_text(buffer.bytes), padding, shape, source])
    return rows


def _roofline_lines(finding: SliceFinding, bounds: Roofline, costs: Costs) -> dict[str, str]:
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
    bound_by = bounds.most_for  # of an estimate, what most of it goes to
    if bound_by == VECTOR_UNIT:
        bound_by = f"the {VECTOR_UNIT}, that is by operations that fill neither memory bandwidth nor matrix unit"
    lines = {"step": f"{step_text(bounds.step_seconds, bounds.estimated_seconds)}, bound by {bound_by}"}
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
    about, most = ("about", "about") if bounds.estimated else ("at least", "at most")
    lines["MFU"] = f"{most} {bounds.mfu:.1%}"
    if finding.model.flops is None:
        lines["MFU"] += ", products that are computed again counted as well"
    elif bounds.hfu > _DIFFERENT * bounds.mfu:
        lines["HFU"] = f"{most} {bounds.hfu:.1%}, with what is computed again or filled up to whole tiles"
    lines["throughput"] = f"{most} {bounds.examples_per_second:,.0f} examples/s in all" + (
        f", {bounds.tokens_per_second:,.0f} tokens/s" if bounds.tokens_per_second is not None else ""
    )
    lines["the whole run"] = f"{about} {_hours(bounds.hours)} for {finding.plan.total_steps:,} steps, training alone"
    return lines


def _parts(bounds: Roofline) -> str:
    """ "vector unit 12.3 ms (60%), compute 8 ms (40%)"."""
    total = sum(bounds.estimated.values())
    parts = sorted(bounds.estimated.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {milliseconds(seconds)} ({seconds / total:.0%})" for name, seconds in parts if seconds)


def _unfilled_rows(where: Target, costs: Costs) -> list[list[str]]:
    """The operations that fill neither memory bandwidth nor matrix unit, those of a layer together."""
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


def _without_estimate(costs: Costs) -> str:
    """What the compiler's cost model leaves out."""
    if not costs.unestimated:
        return ""
    kernels = ", kernels of attention also at their products and exponentials" if costs.attention_kernels else ""
    taken = f", taken at what their memory traffic needs{kernels}" if costs.operations else ""
    return f"; the compiler has no estimate for {plural(costs.unestimated, 'operation')}{taken}"


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
    rows = [["change", *_MEASURED, "compiled in"], ["as it is", *_measured_with_time(reported.finding)]]
    for one in reported.tried:
        refused = [f"not applicable: {one.refused}", *[""] * 5]
        rows.append([one.flag, *(_measured_with_time(one.finding) if one.finding else refused)])
    return rows


def _batch_rows(found: LargestBatch) -> list[list[str]]:
    rows = [["global batch", "a replica", *_MEASURED, "compiled in"]]
    for one in sorted(found.tried, key=batch_size):
        rows.append([f"{batch_size(one):,}", f"{one.plan.per_replica_batch_size:,}", *_measured_with_time(one)])
    return rows


def _measured_with_time(finding: SliceFinding) -> list[str]:
    return [*_measurements(finding), _seconds(finding.compilation)]


def _measurements(finding: SliceFinding) -> list[str]:
    hbm, bounds = finding.hbm, finding.roofline
    return [
        verdict(finding),
        bytes_text(hbm.needed) if hbm else "",
        f"{hbm.needed / hbm.available:.0%}" if hbm else "",
        step_text(bounds.step_seconds, bounds.estimated_seconds) if bounds else "",
        bounds.most_for if bounds else "",
    ]


def _seconds(compilation: Compilation) -> str:
    return f"{compilation.seconds:.0f} s" + (" (before, it was in the cache)" if compilation.cached else "")


def as_json(reported: CaseReport) -> dict[str, Any]:
    """The same for a program; sizes in bytes, times in seconds."""
    finding = reported.finding
    plan, where = finding.plan, finding.case.where
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
        "reduce_dtype": plan.reduce_dtype.name,
        "steps": plan.total_steps,
        "parameters": finding.model.parameters,
        "computed": dict(finding.model.computed),
        "compile_seconds": finding.compilation.seconds,
        "from_cache": finding.compilation.cached,
        "unread": list(finding.unread),
        "hbm": finding.hbm and _hbm_json(finding.hbm),
        "costs": finding.costs and _costs_json(finding, finding.costs),
        "roofline": finding.roofline and _roofline_json(finding.roofline),
        "advice": list(finding.advice),
        "suggestions": [_tried_json(one) for one in reported.tried],
        "largest_batch": reported.largest and _largest_json(reported.largest),
        "constants": {name: dataclasses.asdict(constant) for name, constant in where.constants.items()},
    }


def _costs_json(finding: SliceFinding, costs: Costs) -> Mapping[str, Any]:
    flops, counted = finding.model.flops, finding.compilation.cost
    collectives = [dataclasses.asdict(one) for one in costs.collectives]
    return {
        "flops": costs.flops,
        "model_flops": flops and flops.model,
        "hbm_bytes": costs.hbm_bytes,
        "compiler_flops": counted.get("flops"),
        "compiler_bytes_accessed": counted.get("bytes accessed"),
        "collectives": [{name: one[name] for name in one if name != "source"} for one in collectives],
        "host_transfers": len(costs.host_transfers),
        "dynamic_shapes": len(costs.dynamic),
        "operations_without_estimate": costs.unestimated,
        "custom_kernels": costs.kernels,
        "attention_kernels": costs.attention_kernels,
        "kernels_by_kind": dict(costs.kernels_by_kind),
        "recomputed": len(costs.recomputed),
    }


def _roofline_json(bounds: Roofline) -> Mapping[str, Any]:
    derived = ("step_seconds", "estimated_seconds", "most_for")
    return {**dataclasses.asdict(bounds), **{name: getattr(bounds, name) for name in derived}}


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


def _tried_json(one: Suggestion) -> Mapping[str, Any]:
    found, bounds = one.finding, one.finding and one.finding.roofline
    return {
        "flag": one.flag,
        "why": one.why,
        "verdict": found and verdict(found),
        "hbm_bytes": found and found.hbm and found.hbm.needed,
        "step_seconds": bounds and bounds.step_seconds,
        "estimated_seconds": bounds and bounds.estimated_seconds,
        "compile_seconds": found and found.compilation.seconds,
        "refused": one.refused,
    }


def _largest_json(found: LargestBatch) -> Mapping[str, Any]:
    return {
        "fits": found.fits and batch_size(found.fits),
        "refused": found.refused and batch_size(found.refused),
        "exact": found.is_exact,
        "unit": found.unit,
        "tried": [
            {
                "global_batch_size": batch_size(one),
                "verdict": verdict(one),
                "hbm_bytes": one.hbm and one.hbm.needed,
                "compile_seconds": one.compilation.seconds,
            }
            for one in sorted(found.tried, key=batch_size)
        ],
    }
