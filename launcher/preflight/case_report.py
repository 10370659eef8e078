"""The preflight report: memory, time and suggestions of a case, and a table of several, for people and programs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.preflight.compiled import Compilation
from launcher.preflight.compiled.costs import Costs, summed
from launcher.preflight.compiled.hbm import HbmUse
from launcher.preflight.roofline import VECTOR_UNIT, Roofline, of_operation
from launcher.preflight.searches import LargestBatch, Suggestion, batch_size
from launcher.preflight.slice_finding import SliceFinding
from launcher.preflight.targets import Target
from launcher.reporting.console import Console, show_table
from launcher.reporting.units import amount, bytes_text, milliseconds, plural, step_text
from launcher.step.op_source import short_name

_OF_PLAN = ("task", "data", "batch", "rematerialisation", "policy", "steps")
_MEASURED = ("result", "memory needed", "of it", "step", "bound by")
_COMPILED = (*_MEASURED, "compiled in")
_SHOWN = 8
_DIFFERENT = 1.005  # of HFU and MFU, beyond rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseReport:
    """A finding with what was compiled to make it fit, or, with `largest`, to find the batch that it is of."""

    finding: SliceFinding
    tried: tuple[Suggestion, ...] = ()
    largest: LargestBatch | None = None


def result(finding: SliceFinding) -> str:
    """One word or two: "fits", "does not fit" or "does not compile"."""
    if finding.refusal is not None:
        return "does not compile"
    return "fits" if finding.fits else "does not fit"


def show(reported: CaseReport, console: Console) -> None:
    """Prints everything about one case."""
    finding = reported.finding
    hbm, costs, bounds, where = finding.hbm, finding.costs, finding.roofline, finding.case.where
    console.plan(_summary(finding))
    if hbm is not None:
        memory = where.memory_name
        _show_section(console, f"{memory[:1].upper()}{memory[1:]} of one device", _hbm_lines(hbm))
        _show_section(console, rows=_buffer_rows(hbm, memory))
    if costs is not None and bounds is not None:
        _show_section(console, "Time of a step", _roofline_lines(finding, bounds, costs))
        if bounds.estimated:
            _show_section(console, rows=_unfilled_rows(where, costs))
    if costs is not None:
        _show_section(console, rows=_collective_rows(costs))
        kernels = ([kind, str(count)] for kind, count in costs.kernels_by_kind.items())
        _show_section(console, rows=[["kernels", "a step"], *kernels])
    _show_section(console, "Advice", notes=[f"- {line}" for line in finding.advice])
    if reported.tried:
        _show_section(console, "Knobs, measured", rows=_tried_rows(reported))
    if reported.largest:
        rows, text = _batch_rows(reported.largest), largest_text(reported.largest)
        _show_section(console, "The largest batch", rows=rows, notes=[text])


def _show_section(
    console: Console,
    title: str = "",
    lines: Mapping[str, str] | None = None,
    rows: Sequence[Sequence[str]] = (),
    notes: Sequence[str] = (),
) -> None:
    """Prints a part of the report, or nothing where it has none of lines, rows below a heading, and notes."""
    if not (lines or rows[1:] or notes):
        return
    console.note("")
    if title:
        console.note(title)
    if lines:
        console.plan(_without_gaps(lines))
    if rows:
        show_table(rows, console)
    for note in notes:
        console.note(note)


def _without_gaps(lines: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in lines.items() if text}


def comparison(findings: Sequence[SliceFinding], not_applicable: Sequence[tuple[str, str]]) -> list[list[str]]:
    """The table of several targets or batch sizes, its heading first; and of cases why there is no finding."""
    table = [["where", "batch", "a replica", *_MEASURED, "MFU", "examples/s", "hours"]]
    for finding in findings:
        plan, bounds = finding.plan, finding.roofline
        parts = f" in {plan.microbatches}" if plan.microbatches > 1 else ""
        batch = [str(batch_size(finding)), f"{plan.per_replica_batch_size}{parts}"]
        rates = [f"{bounds.mfu:.1%}", f"{bounds.examples_per_second:,.0f}", f"{bounds.hours:,.2f}"] if bounds else []
        table.append([finding.case.where.name, *batch, *_measurements(finding), *rates])
    return table + [[name, "", "", f"not applicable: {why}"] for name, why in not_applicable]


def largest_text(largest: LargestBatch) -> str:
    """A sentence for people: the largest batch that fits, and the one that does not."""
    fits, refused = largest.fits, largest.refused
    if fits is None:
        assert refused is not None
        return f"no batch fits, not even one of {batch_size(refused):,}"
    replica = fits.plan.per_replica_batch_size
    words = f"the largest global batch that fits is {batch_size(fits):,}, {replica:,} examples a replica"
    if refused is None:
        return f"at least, for the search ended before a batch was refused: {words}"
    needs = f"{batch_size(refused):,} needs {bytes_text(refused.hbm.needed)}" if refused.hbm else ""
    if largest.is_exact:
        return f"{words}; the next one, {needs} and does not fit"
    return f"{words}, of those that were compiled; {needs} and does not fit, what lies between was not compiled"


def show_constants(findings: Sequence[SliceFinding], console: Console) -> None:
    """Prints the numbers that the estimates stand on, with the source of each."""
    constants = {
        f"{finding.case.where.device_name} {name}": constant
        for finding in findings
        for name, constant in {**finding.case.where.constants, **(finding.hbm.reserved if finding.hbm else {})}.items()
    }
    lines = {
        name.replace("_", " "): f"{amount(constant.value)}{constant.unit} ({constant.source})"
        for name, constant in constants.items()
    }
    _show_section(console, "Constants of the estimates", lines)


def _summary(finding: SliceFinding) -> dict[str, str]:
    plan, model, where, unread = finding.plan, finding.model, finding.case.where, finding.unread
    lines = plan.describe()
    notes = enumerate((*plan.notes, *model.notes), start=1)
    return _without_gaps(
        {
            "where": where.describe(),
            "figures of": where.figures_of,
            "changed": "; ".join(finding.case.changes),
            **{name: lines[name] for name in _OF_PLAN if name in lines},
            "reduce dtype": plan.reduce_dtype.name,
            "parameters": f"{model.trained_parameters:,} trained of {model.parameters:,}",
            **model.computed,
            **{f"note {number}": note for number, note in notes},
            "compiler": f"compiled in {_seconds(finding.compilation)}",
            "result": ": ".join(filter(None, (result(finding), finding.refusal))),
            "not read": f"{plural(len(unread), 'part')} of the compiled program, so nothing is said of its time and "
            f"FLOPs; memory is the compiler's own figure. First: {unread[0]}. Please report it"
            if unread
            else "",
        }
    )


def _hbm_lines(hbm: HbmUse) -> dict[str, str]:
    return {
        "arguments": f"{bytes_text(hbm.arguments)} (variables and the batch)",
        "outputs": f"{bytes_text(hbm.outputs)} (beyond those that take an argument's place)",
        "temporaries": f"{bytes_text(hbm.temporaries)} (activations, gradients)",
        "code": bytes_text(hbm.code) if hbm.code else "",
        **{name: f"{bytes_text(constant.value)}, allowed for" for name, constant in hbm.reserved.items()},
        "needed": f"{bytes_text(hbm.needed)}, {hbm.needed / hbm.available:.0%} of what a program may use",
        "available": bytes_text(hbm.available),
        "missing": "" if hbm.fits else bytes_text(hbm.excess),
    }


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
    where, model = finding.case.where, finding.model
    reduced = sum(collective.bytes * collective.times for collective in costs.collectives)
    collectives = plural(sum(collective.times for collective in costs.collectives), "collective")
    floors = {
        "compute": (bounds.compute_seconds, where.compute_words(costs)),
        where.memory_name: (bounds.hbm_seconds, f"{amount(costs.hbm_bytes)}B read and written a device"),
        where.link_name: (bounds.wire_seconds, f"{amount(reduced)}B in {collectives} {where.link_words()}"),
    }
    bound_by = bounds.most_for  # of an estimate, what most of it goes to
    if bound_by == VECTOR_UNIT:
        bound_by = f"the {VECTOR_UNIT}, that is by operations that fill neither memory bandwidth nor matrix unit"
    unestimated = _without_estimate(costs)
    estimate = unestimated and f"none{unestimated}, and they may be most of the step"
    if bounds.estimated:
        estimate = (
            f"the compiler's cost model, one operation after another at {where.clock_words}, and collectives with "
            f"their latency: {_parts(bounds)}{unestimated}"
        )
    about, most = ("about", "about") if bounds.estimated else ("at least", "at most")
    needless = "" if model.flops else ", products that are computed again counted as well"
    is_more = model.flops and bounds.hfu > _DIFFERENT * bounds.mfu
    tokens = "" if bounds.tokens_per_second is None else f", {bounds.tokens_per_second:,.0f} tokens/s"
    return {
        "step": f"{step_text(bounds.step_seconds, bounds.estimated_seconds)}, bound by {bound_by}",
        "estimate": estimate,
        **{
            f"{name}, at least": f"{milliseconds(seconds)}: {of}{', the bound' if name == bounds.bound_by else ''}"
            for name, (seconds, of) in floors.items()
        },
        "MFU": f"{most} {bounds.mfu:.1%}{needless}",
        "HFU": f"{most} {bounds.hfu:.1%}, with what is computed again or filled up to whole tiles" if is_more else "",
        "throughput": f"{most} {bounds.examples_per_second:,.0f} examples/s in all{tokens}",
        "the whole run": f"{about} {_hours(bounds.hours)} for {finding.plan.total_steps:,} steps, training alone",
    }


def _parts(bounds: Roofline) -> str:
    """ "vector unit 12.3 ms (60%), compute 8 ms (40%)"."""
    total = sum(bounds.estimated.values())
    parts = sorted(bounds.estimated.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {milliseconds(seconds)} ({seconds / total:.0%})" for name, seconds in parts if seconds)


def _unfilled_rows(where: Target, costs: Costs) -> list[list[str]]:
    """The operations that fill neither memory bandwidth nor matrix unit, those of a layer together."""
    timed = [(operation, *of_operation(operation, where)) for operation in costs.operations]
    groups = summed(
        (short_name(str(operation.source)) or operation.opcode, 1, operation.cycles or 0, seconds)
        for operation, seconds, fills in timed
        if fills == VECTOR_UNIT
    )
    rows = [["fills neither memory bandwidth nor matrix unit", "operations", "cycles a step", "time"]]
    for name, count, cycles, seconds in groups[:_SHOWN]:
        rows.append([name, f"{count:,.0f}", f"{cycles:,.0f}", milliseconds(seconds)])
    return rows


def _without_estimate(costs: Costs) -> str:
    """Operations that the compiler's cost model leaves out, in words."""
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
    groups = summed(
        ((collective.kind, collective.dtypes), collective.times, collective.times * collective.bytes)
        for collective in costs.collectives
    )
    rows = [["collective", "dtype", "a step", "bytes"]]
    for (kind, dtypes), times, size in groups:
        rows.append([kind, ", ".join(dtypes), str(times), bytes_text(size)])
    return rows


def _tried_rows(reported: CaseReport) -> list[list[str]]:
    rows = [["change", *_COMPILED], ["as it is", *_compiled(reported.finding)]]
    for suggestion in reported.tried:
        rows.append(
            [
                suggestion.flag,
                *(_compiled(suggestion.finding) if suggestion.finding else [f"not applicable: {suggestion.refused}"]),
            ]
        )
    return rows


def _batch_rows(largest: LargestBatch) -> list[list[str]]:
    sizes = [(batch_size(finding), finding.plan.per_replica_batch_size, finding) for finding in largest.tried]
    rows = [
        [f"{batch:,}", f"{part:,}", *_compiled(finding)]
        for batch, part, finding in sorted(sizes, key=lambda row: row[0])
    ]
    return [["global batch", "a replica", *_COMPILED], *rows]


def _compiled(finding: SliceFinding) -> list[str]:
    return [*_measurements(finding), _seconds(finding.compilation)]


def _measurements(finding: SliceFinding) -> list[str]:
    hbm, bounds = finding.hbm, finding.roofline
    memory = [bytes_text(hbm.needed), f"{hbm.needed / hbm.available:.0%}"] if hbm else ["", ""]
    times = [step_text(bounds.step_seconds, bounds.estimated_seconds), bounds.most_for] if bounds else ["", ""]
    return [result(finding), *memory, *times]


def _seconds(compilation: Compilation) -> str:
    return f"{compilation.seconds:.0f} s" + (" (before, it was in the cache)" if compilation.cached else "")


def as_json(reported: CaseReport) -> dict[str, Any]:
    """The same for a program; sizes in bytes, times in seconds."""
    finding, largest = reported.finding, reported.largest
    plan, where, hbm, bounds = finding.plan, finding.case.where, finding.hbm, finding.roofline
    derived = ("step_seconds", "estimated_seconds", "most_for")
    return {
        "accelerator_type": where.name,
        "topology": where.topology_name,
        "chips": where.num_chips,
        "hosts": where.num_hosts,
        "replicas": where.num_replicas,
        "changes": list(finding.case.changes),
        "verdict": result(finding),
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
        "hbm": hbm and _hbm_json(hbm),
        "costs": finding.costs and _costs_json(finding, finding.costs),
        "roofline": bounds and {**dataclasses.asdict(bounds), **{name: getattr(bounds, name) for name in derived}},
        "advice": list(finding.advice),
        "suggestions": [
            {"flag": one.flag, "why": one.why, "refused": one.refused, **_outcome(one.finding)}
            for one in reported.tried
        ],
        "largest_batch": largest
        and {
            "fits": largest.fits and batch_size(largest.fits),
            "refused": largest.refused and batch_size(largest.refused),
            "exact": largest.is_exact,
            "unit": largest.unit,
            "tried": [
                {"global_batch_size": batch_size(one), **_outcome(one)} for one in sorted(largest.tried, key=batch_size)
            ],
        },
        "constants": {name: dataclasses.asdict(constant) for name, constant in where.constants.items()},
    }


def _outcome(finding: SliceFinding | None) -> dict[str, Any]:
    """Result, memory and time of a compilation; null of one that could not be begun."""
    hbm, bounds = finding and finding.hbm, finding and finding.roofline
    return {
        "verdict": finding and result(finding),
        "hbm_bytes": hbm and hbm.needed,
        "step_seconds": bounds and bounds.step_seconds,
        "estimated_seconds": bounds and bounds.estimated_seconds,
        "compile_seconds": finding and finding.compilation.seconds,
    }


def _costs_json(finding: SliceFinding, costs: Costs) -> dict[str, Any]:
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


def _hbm_json(hbm: HbmUse) -> dict[str, Any]:
    return {
        **{name: value for name, value in dataclasses.asdict(hbm).items() if name not in ("fits", "unread")},
        "reserved": {name: constant.value for name, constant in hbm.reserved.items()},
        "missing": hbm.excess,
        "buffers": [
            {
                "kind": buffer.kind,
                "name": buffer.name,
                "bytes": buffer.bytes,
                "padding_bytes": buffer.padding,
                "shape": str(buffer.array) if buffer.array else None,
                "from": buffer.where,
            }
            for buffer in hbm.buffers
        ],
    }
