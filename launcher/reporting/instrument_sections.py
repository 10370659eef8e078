"""The sections of a page on what other modes found: precision, verify, drill, preflight, doctor."""

import html
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.reporting import page, run_folder
from launcher.reporting.page import Section
from launcher.reporting.units import bytes_text, step_text


def precision(found: Mapping[str, Any]) -> Section:
    """What 16 bits do to the gradients: the advice, what is lost where, the lint."""
    parts = [page.paragraph(line) for line in found.get("verdict", [])]
    for table in found.get("tables", []):
        parts += [f"<h3>{html.escape(table['title'])}</h3>", page.grid(table["rows"])]
    parts += _lint(found.get("lint", []))
    parts.append(page.details("What was examined", page.facts(found.get("plan", {}))))
    return Section("Precision", "\n".join(parts))


def verify(found: Mapping[str, Any]) -> Section:
    """The same training on other topologies, compared."""
    topologies = [one for one in found.get("topologies", []) if isinstance(one, Mapping)]
    names = list(dict.fromkeys(name for one in topologies for name in one.get("deviations", {})))
    rows = [["Topology", "Verdict", *(name.replace("_", " ") for name in names), "Time"]]
    for one in topologies:
        cells = [_deviation(one.get("deviations", {}).get(name)) for name in names]
        rows.append([one.get("topology"), one.get("verdict"), *cells, page.duration(one.get("seconds"))])
    reasons = [f"{one.get('topology')}: {one['reason']}" for one in topologies if one.get("reason")]
    said = "The recipe trains alike on all topologies." if found.get("verified") else "The topologies do not agree."
    body = _verdict(said, bool(found.get("verified"))) + page.grid(rows)
    return Section("Verify", body + "".join(map(page.paragraph, reasons)))


def drill(found: Mapping[str, Any]) -> Section:
    """A fault that was caused on purpose, and how the job survived it."""
    passed = bool(found.get("passed"))
    step = found.get("fault_step")
    where = "never happened" if step is None else f"worker {found.get('worker')}, step {step:,}"
    rows = {
        "Fault": f"{found.get('kind')}: {where}",
        "Named": found.get("named"),
        "Noticed after": page.duration(found.get("seconds_to_detection")),
        "Training again after": page.duration(found.get("seconds_to_training")),
        "Went on from step": found.get("resumed_from"),
        "Steps repeated": found.get("steps_repeated"),
        "Restarts": found.get("restarts"),
        "Processes left over": found.get("orphans"),
    }
    if found.get("difference") is not None:
        rows["Reference"] = found["difference"] or "equal bit for bit"
    said = f"The drill {'passed' if passed else 'did not pass'}."
    return Section("Drill", _verdict(said, passed) + page.facts(rows) + _list(found.get("failures", [])))


def preflight(found: Mapping[str, Any]) -> Section:
    """Whether the step fits TPUs and GPUs, and how fast it can be there."""
    cases = [one for one in found.get("cases", []) if isinstance(one, Mapping)]
    heading = ["Where", "Batch", "A replica", "Verdict", "Memory needed", "Of it", "Step", "Bound by", "MFU"]
    rows = [[*heading, "Examples/s"], *map(_preflight_row, cases)]
    rows += [
        [one.get("case"), "", "", f"not applicable: {one.get('why')}", *[""] * 6]
        for one in found.get("not_applicable", [])
    ]
    body = page.grid(rows)
    for one in cases:
        told = [str(one["refusal"])] if one.get("refusal") else []
        told += list(one.get("advice", []))
        if told:
            changes = ", ".join(map(str, one.get("changes", [])))
            name = f"{one.get('accelerator_type')}{changes and f' with {changes}'}"
            body += f"<h3>{html.escape(name)}</h3>{_list(told)}"
    recipe = ", ".join(found.get("recipe", []))
    return Section("Preflight", page.paragraph(f"Compiled for these: {recipe}") + body)


def doctor(found: Mapping[str, Any]) -> Section:
    """What was found of the machine; what is well is folded away."""
    findings = [one for one in found.get("findings", []) if isinstance(one, Mapping)]
    counts = Counter(one.get("status") for one in findings)
    said = ", ".join(f"{counts[name]} {name}" for name in ("fail", "warn", "ok") if counts[name])
    body = _verdict(f"{said}.", not counts["fail"])
    heading = ["", "Check", "Seen", "Fix"]

    def rows(chosen: Sequence[Mapping[str, Any]]) -> str:
        cells = [[one.get("status"), one.get("check"), one.get("seen"), one.get("fix") or ""] for one in chosen]
        return page.grid([heading, *cells])

    troubles = [one for one in findings if one.get("status") != "ok"]
    well = [one for one in findings if one.get("status") == "ok"]
    body += rows(troubles) if troubles else ""
    body += page.details(f"{len(well)} checks that found nothing", rows(well)) if well else ""
    return Section("Doctor", body)


SECTIONS: dict[str, Callable[[Mapping[str, Any]], Section]] = {
    run_folder.DRILL: drill,
    run_folder.PRECISION: precision,
    run_folder.VERIFY: verify,
    run_folder.PREFLIGHT: preflight,
    run_folder.DOCTOR: doctor,
}


def _lint(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has one remedy together."""
    if not findings:
        return []
    groups: dict[tuple[str, str, str], list[str]] = {}
    for one in findings:
        line = ": ".join(filter(None, (one.get("path"), one.get("text"))))
        groups.setdefault((one["level"], one["rule"], one["fix"]), []).append(line)
    parts = ["<h3>Lint</h3>"]
    for (level, rule, fix), lines in groups.items():
        parts.append(f"<p><b>{html.escape(level)}: {html.escape(rule)}.</b> {html.escape(fix)}.</p>")
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        parts.append(page.details(f"{lines[0]}{more}", _list(lines)))
    return parts


def _preflight_row(one: Mapping[str, Any]) -> list[str]:
    hbm, bounds = one.get("hbm"), one.get("roofline")
    row = [page.show(one.get(name)) for name in ("accelerator_type", "global_batch_size", "per_replica_batch_size")]
    row.append(str(one.get("verdict")))
    row += [bytes_text(hbm["needed"]), f"{hbm['needed'] / hbm['available']:.0%}"] if hbm else ["", ""]
    if not bounds:
        return [*row, "", "", "", ""]
    mfu, rate = bounds.get("mfu"), bounds.get("examples_per_second")
    return [
        *row,
        step_text(bounds["step_seconds"], bounds.get("estimated_seconds")),
        str(bounds.get("most_for", bounds["bound_by"])),
        "" if mfu is None else f"{mfu:.1%}",
        "" if rate is None else f"{rate:,.0f}",
    ]


def _deviation(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    value = found.get("value")
    text = f"{value:.1e}" if isinstance(value, float) else page.show(value)
    return text if found.get("within") else f"{text} (over {page.show(found.get('tolerance'))})"


def _verdict(said: str, is_good: bool) -> str:
    return f'<p class="{"good" if is_good else "bad"}"><b>{html.escape(said)}</b></p>'


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(str(line))}</li>' for line in lines)}</ul>" if lines else ""
