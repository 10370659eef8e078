"""The frame of a self-contained HTML page: no script, no file beside it."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.reporting import strict_json

NO_PLOTS = "The curves need matplotlib, which is not installed (the extra <code>report</code> brings it)."
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0 0 1.5rem; } td, th { padding: .2rem 1.2rem .2rem 0; text-align: left; }
tr { border-bottom: 1px solid #ddd; } img { max-width: 100%; } .failed { color: #b00020; }
pre { white-space: pre-wrap; } .grid { font-size: 13px; } .grid td { white-space: nowrap; padding-right: .8rem; }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """A whole page.

    Args:
      title: of the window; plain text.
      sections: HTML, in order.
    """
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(sections) + "\n</body></html>\n"


def table(title: str, rows: Mapping[str, Any]) -> str:
    """A heading and a row for each name; nothing without rows. Numbers have six digits."""
    if not rows:
        return ""
    cells = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(_show(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<h2>{title}</h2><table>{cells}</table>"


def grid(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its heading; plain text."""
    heading, *body = ["".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in _tagged(rows)]
    body_rows = "".join(f"<tr>{row}</tr>" for row in body)
    return f'<table class="grid"><tr>{heading}</tr>{body_rows}</table>'


def image(figure: Any, description: str) -> str:
    """A matplotlib figure inside the page.

    Args:
      figure: `matplotlib.figure.Figure`.
      description: for who cannot see it; plain text.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    encoded = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="{html.escape(description)}" src="data:image/png;base64,{encoded}">'


def _tagged(rows: Sequence[Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    return [("td" if number else "th", row) for number, row in enumerate(rows)]


def _show(value: Any) -> str:
    if value is None or isinstance(value, str):
        return str(value)
    return f"{strict_json.number(value):.6g}"
