"""The sections of a page on what other modes found: precision, verify, drill."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.reporting import page, run_folder
from launcher.reporting.page import Section


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


SECTIONS: dict[str, Callable[[Mapping[str, Any]], Section]] = {
    run_folder.DRILL: drill,
    run_folder.PRECISION: precision,
    run_folder.VERIFY: verify,
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
