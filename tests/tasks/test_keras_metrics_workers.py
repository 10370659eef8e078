"""What `launcher.fit` reports on two workers is what Keras's `fit` reports on one device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from places import SUPPORT
from test_keras_metrics import CASES, of_keras

PROGRAM = f"""
import json, sys
sys.path[:0] = {[str(Path(__file__).parent), str(SUPPORT)]!r}
import launcher
from test_keras_metrics import CASES

for name in NAMES:
    build, train, validation, arguments = CASES[name]
    found = launcher.fit(build, train, validation, epochs=2, batch_size=16, shuffle=False, **arguments)
    print("HISTORY", json.dumps([name, found.history]), flush=True)
"""


# Each is reported on two replicas in test_keras_metrics.py. Here: states of every kind, and weights of every kind.
FEW = ["metrics of one's own", "class weights"]


@pytest.mark.heavy
@pytest.mark.parametrize("names", [FEW, pytest.param(list(CASES), marks=pytest.mark.nightly)], ids=["few", "all"])
def test_two_workers_report_what_keras_does(run_launcher, tmp_path, names):
    (tmp_path / "program.py").write_text(PROGRAM.replace("NAMES", repr(names)))
    arguments = ("--workers=2", "--gin_file=program.py", "--model_dir=run")
    done = run_launcher(*arguments, module="launcher.launch", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("HISTORY ")[2] for line in done.stdout.splitlines() if "HISTORY " in line]
    histories = dict(json.loads(line) for line in lines)
    assert list(histories) == names
    for name in names:
        build, train, validation, arguments = CASES[name]
        expected = of_keras(build, train, validation, **arguments)
        if "hits_variable" in expected:  # of which Keras shows, after an epoch, what it is worth after the validation
            expected["hits_variable"] = expected["hits"]
        assert histories[name].keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(histories[name][key], values, rtol=1e-5, atol=1e-5, err_msg=f"{name}: {key}")
