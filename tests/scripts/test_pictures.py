"""Pictures of a terminal show what a terminal would."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from places import ROOT


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_that_moves_is_there_once_with_its_colour(program, tmp_path, capfd):
    shown = "from rich.live import Live; from rich.console import Console; from rich.text import Text\n"
    shown += "console = Console(force_terminal=True); line = Live(console=console, auto_refresh=False); line.start()\n"
    shown += "for step in (1, 2):\n    line.update(Text(f'step {step}', style='green'), refresh=True)\n"
    shown += "    console.print('note', step)\n"
    shown += "line.stop()"
    page = tmp_path / "shown.html"
    text, code = program.run_on_terminal([sys.executable, "-c", shown], 40)
    rows = program.left_on_screen(text)
    plain = [program.re.sub(r"\x1b\[[0-9;]*m", "", row) for row in rows]
    assert (plain, code) == (["note 1", "note 2", "step 2"], 0)
    page.write_text(program.screen_page("python shown.py", rows, 40))
    assert page.read_text().count("step 2") == 1 and "step 1" not in page.read_text()
    assert "#4cc38a" in page.read_text(), "green"


def test_a_dry_run_prints_the_runs_and_makes_none(tmp_path):
    script = [str(ROOT / "scripts" / "pictures.sh"), "--dry_run", "--all=there"]
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(script, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert all(line.startswith("+ ") for line in done.stdout.splitlines())
    assert "docs/pictures/report.png" in done.stdout and f"{tmp_path}/there/killed_twice.png" in done.stdout
    assert not os.listdir(tmp_path)


def test_what_is_not_understood_is_no_picture(program):
    with pytest.raises(ValueError, match="written over"):
        program.left_on_screen("a long line\rshort")
    with pytest.raises(ValueError, match="is not known"):
        program.left_on_screen("\x1b[5;5Hthere")


def test_the_newest_step_of_a_run_that_has_not_begun_is_0(program, tmp_path):
    assert program._newest_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 20}) + "\n")
    assert program._newest_step(tmp_path) == 20
