"""benchmarks/published_examples.py over programs of the kinds that keras.io publishes: a test has no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import PYTHONPATH, ROOT, SUPPORT

PROGRAMS = SUPPORT / "keras_kinds"


def _without_parts(told):
    """Without the losses of single outputs: those of an epoch differ on purpose."""
    return {name: values for name, values in told.items() if not name.endswith(("price_loss", "kind_loss"))}


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
    # What this kind differs by on purpose, see docs/keras_differences.md: with dense gradients Keras is equal.
    rows_twice = rows.pop("words")
    assert rows_twice["dense_difference"] <= 1e-5 < rows_twice["replicas_1_difference"]
    for name, row in rows.items():
        for where in ("replicas_1", "replicas_2", "again"):
            assert row.get(f"{where}_error", "") == row.get("keras_error", "") == "", (name, where, row)
            of_keras = row["keras_again" if where == "again" else "keras"]
            told, expected = ([_without_parts(one) for one in fits] for fits in (row[where], of_keras))
            assert [one.keys() for one in told] == [one.keys() for one in expected], (name, where)
            for one, other in zip(told, expected, strict=True):
                for key, values in other.items():
                    np.testing.assert_allclose(one[key], values, rtol=1e-5, atol=1e-5, err_msg=f"{name} {where} {key}")
