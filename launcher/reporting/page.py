"""The frame of a self-contained HTML page, which fetches nothing: template, styles, charts and their library inside."""

import html
import importlib.resources
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launcher.reporting import strict_json
from launcher.reporting.curves import Charts

_NO_CHARTS = Charts()


class Section(NamedTuple):
    """A part of a page: its heading, HTML, and what the elements with `data-panels` in it show."""

    title: str
    body: str
    charts: Charts = _NO_CHARTS


def page(title: str, *, header: str, sections: Sequence[Section], footer: str = "") -> str:
    """A whole page: its title in plain text, header and footer as HTML, and its sections in order."""
    data = json.dumps(
        {
            "groups": {name: axes for section in sections for name, axes in section.charts.groups.items()},
            "panels": {place: panels for section in sections for place, panels in section.charts.panels.items()},
            "marks": [mark for section in sections for mark in section.charts.marks],
        },
        allow_nan=False,
    )
    links = [f'<a href="#{_anchor(section.title)}">{html.escape(section.title)}</a>' for section in sections]
    return string.Template(_file("page.html")).substitute(
        title=html.escape(title),
        styles=f"{_file('uplot/uPlot.min.css')}\n{_file('page.css')}",
        header=header,
        contents="\n".join(links) if len(links) > 2 else "",
        sections="\n".join(
            f'<section id="{_anchor(one.title)}"><h2>{html.escape(one.title)}</h2>\n{one.body}</section>'
            for one in sections
        ),
        footer=footer,
        data=data.replace("<", "\\u003c"),  # text inside must not end the element
        # The licence asks for its text beside the code.
        scripts=f"/*\n{_file('uplot/LICENSE')}*/\n{_library()}\n{_file('charts.js')}",
    )


def chart_tools(charts: Charts) -> str:
    """The controls of the curves that follow them."""
    known = [axis for axis in ("step", "time", "epoch") if any(axis in group for group in charts.groups.values())]
    choices = "".join(f'<option value="{axis}">{axis}</option>' for axis in known)
    return (
        f'<div class="tools"><label>over <select data-view="axis">{choices}</select></label>'
        '<label>smoothing <input data-view="smoothing" type="range" min="0" max="0.98" step="0.02" value="0"></label>'
        '<label><input data-view="log" type="checkbox"> log axis</label>'
        "<span>Drag to zoom in, double-click to zoom out.</span></div>"
    )


def panels(name: str) -> str:
    """The place of a page's charts of this name."""
    return f'<div class="charts" data-panels="{name}"></div>'


def facts(rows: Mapping[str, Any]) -> str:
    """A row for each name; nothing without rows."""
    told = ((html.escape(name), html.escape(show(value))) for name, value in rows.items())
    cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in told)
    return f'<table class="facts">{cells}</table>' if rows else ""


def grid(rows: Sequence[Sequence[Any]]) -> str:
    """A table whose first row is its heading; columns of numbers stand to the right."""
    heading, *body = [[show(cell) for cell in row] for row in rows]
    numeric = [bool(body) and all(_is_number(row[place]) for row in body) for place in range(len(heading))]
    return (
        f'<div class="scroll"><table><tr>{_cells("th", heading, numeric)}</tr>'
        + "".join(f"<tr>{_cells('td', row, numeric)}</tr>" for row in body)
        + "</table></div>"
    )


def details(summary: str, body: str) -> str:
    """A part that is shown once it is asked for; `summary` is plain text."""
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>"


def paragraph(text: str) -> str:
    """The text; nothing without any."""
    return f"<p>{html.escape(text)}</p>" if text else ""


def tile(value: str, name: str) -> str:
    """A number that stands out."""
    return f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'


def bar(parts: Mapping[str, float], words: Mapping[str, str]) -> str:
    """Shares of a whole, by the parts' sizes, and a key that names them with the size of each in words."""
    whole = sum(parts.values()) or 1.0
    shown = {name: size for name, size in parts.items() if size > whole / 2000}
    colors = {name: f"var(--c{index})" if index < 8 else "var(--muted)" for index, name in enumerate(parts)}
    blocks = "".join(
        f'<div style="width:{100 * size / whole:.2f}%;background:{colors[name]}" title="{html.escape(name)}"></div>'
        for name, size in shown.items()
    )
    key = "".join(
        f'<span><i style="background:{colors[name]}"></i>{html.escape(name)} {html.escape(words[name])}, '
        f"{size / whole:.1%}</span>"
        for name, size in shown.items()
    )
    return f'<div class="bar">{blocks}</div><div class="key">{key}</div>'


def show(value: Any) -> str:
    """A value as text; numbers have four digits."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    number = strict_json.number(value)
    if isinstance(number, int) or (number == int(number) and abs(number) < 1e15):
        return f"{int(number):,}"
    return f"{number:.4g}"


def duration(seconds: float | None) -> str:
    """ "8.3 s", "4 min 5 s", "2 h 3 min"."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _cells(tag: str, row: Sequence[str], numeric: Sequence[bool]) -> str:
    kinds = [' class="number"' if is_number else "" for is_number in numeric]
    return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(row, kinds, strict=True))


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"(< )?[-+]?[\d.,]+(e[-+]?\d+)?( ?%| s| ms)?|-?", cell) is not None


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _library() -> str:
    """uPlot without the address in its first comment: the page names no place on the network."""
    return re.sub(r"^/\*!.*?\*/\s*", "", _file("uplot/uPlot.iife.min.js"))


def _file(name: str) -> str:
    return importlib.resources.files("launcher.reporting").joinpath("web", *name.split("/")).read_text("utf-8")
