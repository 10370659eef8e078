"""What pages show of real runs, as scripts/shown.py made it: notebooks with outputs, and the pages of docs/shown."""

from __future__ import annotations

import re

import nbformat
import pytest
from places import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PAGES = sorted((ROOT / "docs" / "shown").glob("*.html"))
OF_A_MACHINE = re.compile(r"(?<![\w:.])/(?:tmp|home|root|work|opt|usr)/")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_outputs_of_a_whole_run_and_nothing_of_the_machine(path):
    written = nbformat.read(path, as_version=4)
    nbformat.validate(written)
    cells = [cell for cell in written.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    printed = "".join(one.text for one in outputs if one.output_type == "stream")
    assert re.search(r"completed  step (\d+) of \1 ", printed)
    text = path.read_text()
    assert not OF_A_MACHINE.findall(text) and len(text) < 200 * 1024


def test_pages_are_a_report_a_comparison_and_a_sweep_of_real_runs():
    assert [page.stem for page in PAGES] == ["comparison", "report", "sweep"]
    for page in PAGES:
        text = page.read_text()
        assert not OF_A_MACHINE.findall(text) and len(text) < 200 * 1024
        assert "accuracy" in text
    assert all(f"peak={peak}" in (ROOT / "docs/shown/sweep.html").read_text() for peak in ("0.02", "0.1", "0.5"))
