"""Imports of TensorFlow leave out what is not used, and leave nothing broken behind."""

import json
import os
import subprocess
import sys

import pytest
from places import ROOT

pytestmark = pytest.mark.slow

IMPORTS = """
import gc, json, sys
if {first!r}:
    __import__({first!r})
from launcher.machine.tensorflow_import import import_tensorflow
import_tensorflow()
packages = {{"keras", "tensorflow", "sklearn", "matplotlib", "jax", "pandas", "scipy"}}
state = {{"imported": sorted(packages & set(sys.modules))}}
"""
USES = """
import matplotlib.figure, pandas, scipy.sparse, sklearn.datasets
import keras
import tensorflow as tf
state["digits"] = sklearn.datasets.load_digits().data.shape
state["collecting"] = gc.isenabled()
state["sum"] = int(tf.reduce_sum(tf.ones(3)))
doubled = keras.Sequential([keras.Input([2]), keras.layers.Rescaling(2.0)])
frame = pandas.DataFrame({"b": [1.0, 2.0, 3.0], "a": [4, 5, 6]})
state["of a frame"] = doubled.predict(frame, batch_size=2, verbose=0).tolist()
state["of a sparse matrix"] = doubled.predict(scipy.sparse.eye(2, format="csr"), verbose=0).tolist()
"""


def _state(first: str = "", uses: str = "") -> dict:
    program = [sys.executable, "-c", f"{IMPORTS.format(first=first)}{uses}print(json.dumps(state))"]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""  # what TensorFlow logs of itself while it is loaded
    return json.loads(done.stdout)


def test_packages_that_nothing_here_uses_are_left_out_and_can_be_imported_later():
    state = _state(uses=USES)
    assert state["imported"] == ["keras", "tensorflow"]
    assert state["digits"] == [1797, 64]
    assert state["collecting"] and state["sum"] == 3
    assert state["of a frame"] == [[2.0, 8.0], [4.0, 10.0], [6.0, 12.0]]
    assert state["of a sparse matrix"] == [[2.0, 0.0], [0.0, 2.0]]


@pytest.mark.nightly  # the other way round: above
def test_a_package_that_was_imported_before_stays():
    imported = _state(first="sklearn")["imported"]
    assert imported == sorted({"keras", "scipy", "sklearn", "tensorflow", *({"pandas"} & set(imported))})


def test_a_run_imports_them_so(tmp_path):
    flags = ("--gin_file=experiment_resnet18.gin", f"--model_dir={tmp_path}/run", "--dry_run")
    program = [sys.executable, "-X", "importtime", "-m", "launcher.main", *flags]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    # What is looked for in vain is in the list, too, but not what it would have imported.
    left_out = {"sklearn.utils", "matplotlib.cbook", "jax._src", "pandas.core.api", "scipy.sparse._base"}
    assert {"keras", "tensorflow"} <= imported and not left_out & imported


EARLY = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795351047.083791    4814 port.cc:153] oneDNN custom operations are on.
W0000 00:00:1795351047.083791    4814 cpu_device.cc:12] something odd
E0000 00:00:1795351047.083791    4814 cuda_dnn.cc:8310] something bad
The TensorFlow library was compiled to use AVX instructions
not a whole line"""
LOADING = f"""
import os
from launcher.machine.tensorflow_import import without_early_log
with without_early_log():
    os.write(2, {EARLY!r}.encode())
    {{ending}}
os.write(2, b"; and on")
"""


@pytest.mark.parametrize(("level", "left_out"), [("0", ()), ("1", (0, 1)), ("2", (0, 1, 2)), ("high", ())])
def test_early_log_lines_follow_the_level_and_all_others_are_passed_on(level, left_out):
    lines = EARLY.splitlines()
    kept = [line for number, line in enumerate(lines) if number not in left_out]
    assert _stderr_of("pass", level) == "\n".join(kept) + "; and on"


def test_the_last_words_of_a_process_that_dies_while_loading_are_passed_on():
    assert _stderr_of("os.abort()", "3").splitlines() == EARLY.splitlines()[3:]


def test_a_closed_standard_error_does_not_matter():
    program = f"import os; os.close(2){LOADING.format(ending='os._exit(0)').replace('os.write(2', 'print(2')}"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True).stderr == b""


def _stderr_of(ending, level):
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": level}
    program = [sys.executable, "-c", LOADING.format(ending=ending)]
    return subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, check=False).stderr
