"""benchmarks/keras_trainer_tests.py tells what passes through `launcher.fit` from what is refused and what differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from places import PYTHONPATH, ROOT

CASES = """
import keras
import numpy as np
import pytest
from keras.src import testing

X = np.ones((8, 2), np.float32)


def model(loss="mse"):
    made = keras.Sequential([keras.layers.Dense(1)])
    made.compile("sgd", loss)
    return made


class Tests(testing.TestCase):
    def test_trains(self):
        made = model()
        history = made.fit(X, X[:, :1], epochs=2, verbose=0)
        self.assertLess(history.history["loss"][1], history.history["loss"][0] + 1e-9)
        self.assertEqual(made.predict(X, verbose=0).shape, (8, 1))

    def test_sum(self):
        model(keras.losses.MeanSquaredError(reduction="sum")).fit(X, X[:, :1], verbose=0)

    def test_of_keras_alone(self):
        made = model()
        self.assertNotIn("model_dir", vars(made.fit(X, X[:, :1], verbose=0)))

    def test_no_fit(self):
        model().predict(X, verbose=0)

    @pytest.mark.skipif(True, reason="JAX only")
    def test_of_jax(self):
        pass
"""


@pytest.mark.nightly
@pytest.mark.heavy
def test_each_case_is_told_by_what_becomes_of_it(tmp_path):
    (tmp_path / "some_test.py").write_text(CASES)
    page = tmp_path / "page.md"
    marks = "<!-- Written by benchmarks/keras_trainer_tests.py -->\n", "<!-- until here -->\n"
    page.write_text("before\n{}old\n{}after\n".format(*marks))
    command = [sys.executable, ROOT / "benchmarks/keras_trainer_tests.py", tmp_path / "some_test.py", f"--page={page}"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["cases"]["one replica"] == {"passed": 1, "refused": 1, "failed": 1}
    assert told["cases"]["two replicas"] == {"passed": 1}
    assert told["unaccounted for"] == ["test_of_keras_alone on one replica"]
    before, written, after = page.read_text().partition(marks[0])[0], page.read_text(), page.read_text()[-6:]
    assert (before, after) == ("before\n", "after\n")
    assert "| trains | 1 | 1 |  |  |  |\n" in written
    assert "| sum |  |  |  | 1 |" in written
    assert "reduction='sum'" in written
    assert "\n1 more cases call no `fit`" in written
    assert "old" not in written
