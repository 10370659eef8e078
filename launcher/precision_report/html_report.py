"""precision.html: a precision report as one self-contained page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.precision_report import terminal
from launcher.precision_report.examine import Examined
from launcher.precision_report.lint import LintFinding
from launcher.reporting import page
from launcher.reporting.summary import versions


def make(found: Examined, plan: Mapping[str, str], *, layers: int) -> str:
    """The whole page.

    Args:
      found: what to report.
      plan: what the recipe resolved to, by name.
      layers: rows and plots for single layers.
    """
    first, *rest = terminal.verdict(found)
    tables = dict(terminal.tables(found, layers))
    head = list(tables)[:3]
    return page.page(
        f"Precision of {plan['recipe']}",
        [
            f"<h1>Precision of {html.escape(plan['recipe'])}</h1>",
            f"<p><strong>{html.escape(first)}</strong></p>",
            *(f"<p>{html.escape(line)}</p>" for line in rest),
            "<h2>Under each loss scale</h2>",
            _figure("sweep", found),
            *(_section(title, tables[title]) for title in head),
            "<h2>Where the exponents lie</h2>",
            "<p>Of the gradients as float32 computes them. Left of 2^-25 float16 has only zero, left of 2^-14 fewer "
            "bits, right of 65504 only infinity.</p>",
            _figure("histograms", found, layers),
            *(_section(title, rows) for title, rows in tables.items() if title not in head),
            "<h2>Lint</h2>",
            _findings(found.findings),
            page.table("Plan", plan),
            page.table("Versions", versions()),
        ],
    )


def _section(title: str, rows: Sequence[Sequence[str]]) -> str:
    return f"<h2>{html.escape(title)}</h2>{page.grid(rows)}"


def _findings(findings: Sequence[LintFinding]) -> str:
    if not findings:
        return "<p>Nothing found.</p>"
    groups: dict[tuple[str, str, str], list[LintFinding]] = {}
    for one in findings:
        groups.setdefault((one.level, one.rule, one.fix), []).append(one)
    parts = []
    for (level, rule, fix), group in groups.items():
        lines = [html.escape(": ".join(filter(None, (one.path, one.text)))) for one in group]
        items = "".join(f"<li>{line}</li>" for line in lines)
        details = f"<details><summary>{lines[0]}{_more(lines)}</summary><ul>{items}</ul></details>"
        parts.append(f"<p><strong>{level}: {html.escape(rule)}.</strong> {html.escape(fix)}.</p>{details}")
    return "".join(parts)


def _more(lines: Sequence[str]) -> str:
    return f" and {len(lines) - 1} more" if len(lines) > 1 else ""


def _figure(name: str, found: Examined, *args: Any) -> str:
    if not found.narrow:
        return "<p>Nothing is in 16 bits.</p>"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return f"<p>{page.NO_PLOTS}</p>"
    from launcher.precision_report import plots

    descriptions = {
        "sweep": "Shares of gradients that float16 loses, by loss scale",
        "histograms": "Histograms of the exponents of gradients",
    }
    return page.image(getattr(plots, name)(found, *args), descriptions[name])
