"""docs/traps.md: what it names is there, scripts/traps.py asks what it says, and mended rows are mended."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from places import ROOT

import launcher

PAGE = (ROOT / "docs/traps.md").read_text()
SCRIPT = ROOT / "scripts/traps.py"


def test_tests_that_rows_name_are_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE))
    assert len(named) > 20
    for path, name in named:
        defined = {
            one.name for one in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(one, ast.FunctionDef)
        }
        assert not name or name in defined, f"{path}::{name}"


def test_each_check_of_the_script_has_a_row_and_each_named_row_a_check():
    done = subprocess.run([sys.executable, str(SCRIPT), "--list"], capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(re.findall(r"^\| `([\w-]+)`:", PAGE, re.M))
    sources = [SCRIPT, *(ROOT / "scripts/trap_rows").glob("*.py")]
    assert len(sources) > 2 and not any(re.search(r"(?:import|from) launcher", one.read_text()) for one in sources)


def test_a_row_is_one_line_that_says_what_was_seen():
    command = [sys.executable, str(SCRIPT), "--only=safetensors-order"]
    done = subprocess.run(command, capture_output=True, text=True)
    versions, line, counts = done.stdout.splitlines()
    assert f"keras {keras.__version__}" in versions and re.match(r"(holds|mended|cannot tell) +safetensors-order", line)
    assert counts.count("0 ") == 2 and done.returncode == line.startswith("mended")
    wrong = subprocess.run([*command[:2], "--only=safetensors"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "there is no row 'safetensors'" in wrong.stderr


class Counts(keras.metrics.Metric):
    """Returns its variable, which is another number by the time that the epoch is told."""

    def __init__(self):
        super().__init__(name="counts")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float32")))

    def result(self):
        return self.total


@pytest.mark.slow
def test_a_run_on_two_replicas_meets_neither_trap(tmp_path):
    """A mask before synchronized statistics, and a metric that is a variable; on one device Keras has them right."""

    def build():
        norm = keras.layers.BatchNormalization(momentum=0.0, synchronized=True, name="norm")
        masked = [keras.Input((3, 1)), keras.layers.Masking(-1.0), norm]
        model = keras.Sequential([*masked, keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Counts()])
        return model

    x = np.repeat(np.float32([0.0, 10.0]), 2)[:, None, None] * np.ones((4, 3, 1), np.float32)
    x[0, 2] = x[3, 1:] = -1.0
    y = np.ones((4, 1), np.float32)
    validation = (x, 15 * y)
    one = build()
    told = one.fit(x, y, epochs=1, batch_size=4, shuffle=False, verbose=0).history
    settings = {"epochs": 1, "batch_size": 4, "shuffle": False, "replicas": 2, "verbose": 0, "model_dir": str(tmp_path)}
    ours = launcher.fit(build, (x, y), validation=validation, **settings)
    wanted, found = (model.get_layer("norm").moving_mean.numpy() for model in (one, ours.model))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(wanted, x[x >= 0].mean(), rtol=1e-6)
    assert ours.history["counts"] == [4.0] == [float(each) for each in told["counts"]]
    assert ours.history["val_counts"] == [60.0]
