"""What `launcher.fit` reports on two workers is what Keras's `fit` reports on one device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_keras_metrics import CASES, of_keras

PROGRAM = f"""
import json, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import launcher
from test_keras_metrics import CASES

for name, (build, train, validation, arguments) in CASES.items():
    found = launcher.fit(build, train, validation, epochs=2, batch_size=16, shuffle=False, **arguments)
    print("HISTORY", json.dumps([name, found.history]), flush=True)
"""


@pytest.mark.heavy
def test_two_workers_report_what_keras_does(run_launcher, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = ("--workers=2", "--gin_file=program.py", "--model_dir=run")
    done = run_launcher(*arguments, module="launcher.launch", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("HISTORY ")[2] for line in done.stdout.splitlines() if "HISTORY " in line]
    histories = dict(json.loads(line) for line in lines)
    assert histories.keys() == CASES.keys()
    for name, (build, train, validation, arguments) in CASES.items():
        expected = of_keras(build, train, validation, **arguments)
        if "hits_variable" in expected:  # of which Keras shows, after an epoch, what it is worth after the validation
            expected["hits_variable"] = expected["hits"]
        assert histories[name].keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(histories[name][key], values, rtol=1e-5, atol=1e-5, err_msg=f"{name}: {key}")
