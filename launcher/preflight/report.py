"""The bill of health: what was found, for a person and for a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.preflight.examine import Finding
from launcher.preflight.memory import Memory
from launcher.preflight.op_names import short_name
from launcher.preflight.suggestions import Suggestion
from launcher.reporting.console import Console
from launcher.reporting.tables import show_table
from launcher.reporting.units import amount, bytes_text, milliseconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """A suggestion, and what came of it when it was measured.

    Attributes:
      finding: None when it was not tried, or could not be.
      refused: why it could not be.
    """

    suggestion: Suggestion
    finding: Finding | None = None
    refused: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A finding with what can be done about it."""

    finding: Finding
    tried: tuple[Tried, ...] = ()


def verdict(finding: Finding) -> str:
    """One word or two: "fits", "does not fit" or "does not compile"."""
    if finding.refusal is not None:
        return "does not compile"
    return "fits" if finding.fits else "does not fit"


def show(entry: Entry, console: Console) -> None:
    """Prints everything about one case."""
    finding = entry.finding
    console.plan(_summary(finding))
    if finding.memory is not None:
        console.note("")
        console.note("HBM of one device")
        console.plan(_memory_lines(finding.memory))
        if finding.memory.buffers:
            console.note("")
            show_table(_buffer_rows(finding.memory), console)
    if finding.roofline is not None:
        console.note("")
        console.note("Time of a step, at least")
        console.plan(_roofline_lines(finding))
    if finding.costs is not None and finding.costs.collectives:
        console.note("")
        show_table(_collective_rows(finding), console)
    for title, lines in (("Advice", finding.advice), ("What would make it fit", _untried(entry))):
        if lines:
            console.note("")
            console.note(title)
            for line in lines:
                console.note(f"- {line}")
    if any(one.finding is not None or one.refused is not None for one in entry.tried):
        console.note("")
        console.note("Knobs, measured")
        show_table(_tried_rows(entry), console)


def show_constants(findings: Sequence[Finding], console: Console) -> None:
    """Prints what the estimates stand on, with the source of each number."""
    console.note("")
    console.note("Constants of the estimates")
    chips = {finding.case.where.chip.generation: finding.case.where.chip for finding in findings}
    console.plan(
        {
            f"{generation} {name.replace('_', ' ')}": f"{amount(constant.value)}{constant.unit} ({constant.source})"
            for generation, chip in chips.items()
            for name, constant in chip.constants.items()
        }
    )


def _summary(finding: Finding) -> dict[str, str]:
    plan, model, compilation = finding.plan, finding.model, finding.compilation
    lines = plan.describe()
    lines.pop("cluster")
    when = "found in the cache, compiled before in" if compilation.cached else "compiled in"
    outcome = verdict(finding)
    notes = enumerate((*plan.notes, *model.notes), start=1)
    return {
        "slice": finding.case.where.describe(),
        **({"changed": "; ".join(finding.case.changes)} if finding.case.changes else {}),
        **{name: lines[name] for name in ("task", "data", "batch", "policy", "steps")},
        "wire": plan.wire_dtype.name,
        "parameters": f"{model.trained_parameters:,} trained of {model.parameters:,}",
        **{f"note {number}": note for number, note in notes},
        "compiler": f"{when} {compilation.seconds:.0f} s",
        "verdict": outcome if finding.refusal is None else f"{outcome}: {finding.refusal}",
    }


def _memory_lines(memory: Memory) -> dict[str, str]:
    share = memory.needed / memory.available
    lines = {
        "arguments": f"{bytes_text(memory.arguments)} (variables and the batch)",
        "outputs": f"{bytes_text(memory.outputs)} (beyond those that take an argument's place)",
        "temporaries": f"{bytes_text(memory.temporaries)} (activations, gradients)",
        **({"code": bytes_text(memory.code)} if memory.code else {}),
        "needed": f"{bytes_text(memory.needed)}, {share:.0%} of what a program may use",
        "available": bytes_text(memory.available),
    }
    if not memory.fits:
        lines["missing"] = bytes_text(memory.excess)
    return lines


def _buffer_rows(memory: Memory) -> list[list[str]]:
    rows = [["biggest buffers", "HBM", "padding", "shape", "from"]]
    for buffer in memory.buffers:
        padding = f"{buffer.padding / buffer.bytes:.0%}" if buffer.padding else ""
        shape = str(buffer.array) if buffer.array else ""
        name = f"{buffer.kind} {buffer.name}" if buffer.kind != "temporary" else buffer.name
        rows.append([name, bytes_text(buffer.bytes), padding, shape, _where(buffer.where)])
    return rows


def _where(source: str) -> str:
    name, _, line = source.partition(" at ")
    return " at ".join(part for part in (short_name(name), line) if part)


def _roofline_lines(finding: Finding) -> dict[str, str]:
    bounds, costs, plan = finding.roofline, finding.costs, finding.plan
    assert bounds is not None
    assert costs is not None
    where = finding.case.where
    times = {"compute": bounds.compute_seconds, "HBM": bounds.hbm_seconds, "ICI": bounds.ici_seconds}
    reduced = sum(one.bytes * one.times for one in costs.collectives)
    collectives = _counted(sum(one.times for one in costs.collectives), "collective")
    what = {
        "compute": f"{amount(costs.flops)}FLOP a device",
        "HBM": f"{amount(costs.hbm_bytes)}B read and written a device",
        "ICI": f"{amount(reduced)}B in {collectives} over the {_counted(where.links, 'link')} of a corner chip",
    }
    lines = {
        name: f"{milliseconds(seconds)}: {what[name]}{', the bound' if name == bounds.bound_by else ''}"
        for name, seconds in times.items()
    }
    if bounds.cost_model_seconds:
        lines["cost model"] = (
            f"{milliseconds(bounds.cost_model_seconds)}: no bound but the compiler's own estimate, one operation after "
            f"another at {where.chip.clock / 1e9:.2f} GHz"
        )
    lines["MFU"] = f"at most {bounds.mfu:.1%}"
    lines["throughput"] = f"at most {bounds.examples_per_second:,.0f} examples/s for the slice" + (
        f", {bounds.tokens_per_second:,.0f} tokens/s" if bounds.tokens_per_second is not None else ""
    )
    lines["the whole run"] = f"at least {_hours(bounds.hours)} for {plan.total_steps:,} steps, training alone"
    return lines


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{60 * hours:.1f} minutes" if hours >= 1 / 60 else f"{3600 * hours:.1f} seconds"


def _collective_rows(finding: Finding) -> list[list[str]]:
    costs = finding.costs
    assert costs is not None
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for one in costs.collectives:
        group = groups.setdefault((one.kind, one.dtypes), [0, 0])
        group[0] += one.times
        group[1] += one.times * one.bytes
    rows = [["collective", "dtype", "a step", "bytes"]]
    for (kind, dtypes), (times, size) in sorted(groups.items(), key=lambda item: -item[1][1]):
        rows.append([kind, ", ".join(dtypes), str(times), bytes_text(size)])
    return rows


def _untried(entry: Entry) -> list[str]:
    if entry.finding.fits:
        return []
    return [one.suggestion.text for one in entry.tried if one.finding is None and one.refused is None]


def _tried_rows(entry: Entry) -> list[list[str]]:
    rows = [["change", "verdict", "HBM needed", "of it", "step at least", "bound by"]]
    rows.append(["as it is", *_measurements(entry.finding)])
    for one in entry.tried:
        if one.finding is not None:
            rows.append([one.suggestion.flag, *_measurements(one.finding)])
        elif one.refused is not None:
            rows.append([one.suggestion.flag, f"not applicable: {one.refused}", "", "", "", ""])
    return rows


def _measurements(finding: Finding) -> list[str]:
    memory, bounds = finding.memory, finding.roofline
    return [
        verdict(finding),
        bytes_text(memory.needed) if memory else "",
        f"{memory.needed / memory.available:.0%}" if memory else "",
        milliseconds(bounds.step_seconds) if bounds else "",
        bounds.bound_by if bounds else "",
    ]


def as_json(entry: Entry) -> dict[str, Any]:
    """The same for a program; sizes in bytes, times in seconds."""
    finding = entry.finding
    plan, memory, costs, bounds = finding.plan, finding.memory, finding.costs, finding.roofline
    where = finding.case.where
    return {
        "accelerator_type": where.accelerator_type,
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
        "microbatches": plan.recipe.microbatches,
        "policy": plan.policy,
        "wire_dtype": plan.wire_dtype.name,
        "steps": plan.total_steps,
        "parameters": finding.model.parameters,
        "compile_seconds": finding.compilation.seconds,
        "from_cache": finding.compilation.cached,
        "hbm": None if memory is None else _memory_json(memory),
        "costs": None
        if costs is None
        else {
            "flops": costs.flops,
            "hbm_bytes": costs.hbm_bytes,
            "compiler_flops": finding.compilation.cost.get("flops"),
            "compiler_bytes_accessed": finding.compilation.cost.get("bytes accessed"),
            "collectives": [
                {"kind": one.kind, "bytes": one.bytes, "times": one.times, "dtypes": list(one.dtypes)}
                for one in costs.collectives
            ],
            "host_transfers": len(costs.host_transfers),
            "dynamic_shapes": len(costs.dynamic),
        },
        "roofline": None
        if bounds is None
        else {**dataclasses.asdict(bounds), "step_seconds": bounds.step_seconds, "bound_by": bounds.bound_by},
        "advice": list(finding.advice),
        "suggestions": [_tried_json(one) for one in entry.tried],
        "constants": {name: dataclasses.asdict(constant) for name, constant in where.chip.constants.items()},
    }


def _memory_json(memory: Memory) -> Mapping[str, Any]:
    return {
        **{name: getattr(memory, name) for name in ("available", "needed", "arguments", "outputs", "temporaries")},
        "code": memory.code,
        "missing": memory.excess,
        "buffers": [
            {
                "kind": one.kind,
                "name": one.name,
                "bytes": one.bytes,
                "padding_bytes": one.padding,
                "shape": str(one.array) if one.array else None,
                "from": one.where,
            }
            for one in memory.buffers
        ],
    }


def _tried_json(one: Tried) -> Mapping[str, Any]:
    found = one.finding
    return {
        "flag": one.suggestion.flag,
        "why": one.suggestion.why,
        "expected_hbm_bytes": one.suggestion.needed,
        "verdict": None if found is None else verdict(found),
        "hbm_bytes": None if found is None or found.memory is None else found.memory.needed,
        "step_seconds": None if found is None or found.roofline is None else found.roofline.step_seconds,
        "refused": one.refused,
    }
