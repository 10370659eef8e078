"""benchmarks/published_examples.py over programs of the kinds that keras.io publishes: a test has no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import PYTHONPATH, ROOT, SUPPORT

PROGRAMS = SUPPORT / "keras_kinds"


@pytest.mark.nightly
@pytest.mark.heavy
def test_programs_of_each_kind_tell_what_keras_does_on_one_replica_on_two_and_again_with_another_rate(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    lines = tmp_path / "lines.jsonl"
    command = [sys.executable, ROOT / "benchmarks/published_examples.py", PROGRAMS, "--again", f"--lines={lines}"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {Path(row["example"]).stem: row for row in map(json.loads, lines.read_text().splitlines())}
    assert rows.keys() == {path.stem for path in PROGRAMS.rglob("*.py")}
    # What this kind differs by on purpose, see docs/keras.md: with dense gradients Keras is equal.
    rows_twice = rows.pop("words")
    assert rows_twice["dense_difference"] <= 1e-5 < rows_twice["replicas_1_difference"]
    for name, row in rows.items():
        for where in ("replicas_1", "replicas_2", "again"):
            assert row.get(f"{where}_error", "") == row.get("keras_error", "") == "", (name, where, row)
            assert row[f"{where}_difference"] <= 1e-5, (name, where, row)
