"""Imports of TensorFlow leave out what is not used, and leave nothing broken behind."""

import json
import subprocess
import sys

from places import ROOT

PROGRAM = """
import gc, json, sys
if {first!r}:
    __import__({first!r})
from launcher.machine.tensorflow_import import import_tensorflow
import_tensorflow()
state = {{"imported": sorted({{"keras", "tensorflow", "sklearn", "matplotlib", "jax"}} & set(sys.modules))}}
import matplotlib.figure, sklearn.datasets
import tensorflow as tf
state["digits"] = sklearn.datasets.load_digits().data.shape
state["collecting"] = gc.isenabled()
state["sum"] = int(tf.reduce_sum(tf.ones(3)))
print(json.dumps(state))
"""


def _state(first: str = "") -> dict:
    program = [sys.executable, "-c", PROGRAM.format(first=first)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def test_packages_that_nothing_here_uses_are_left_out_and_can_be_imported_later():
    state = _state()
    assert state["imported"] == ["keras", "tensorflow"]
    assert state["digits"] == [1797, 64]
    assert state["collecting"] and state["sum"] == 3


def test_a_package_that_was_imported_before_stays():
    assert _state(first="sklearn")["imported"] == ["keras", "sklearn", "tensorflow"]


def test_a_run_imports_them_so(tmp_path):
    flags = ("--gin_file=experiment_resnet18.gin", f"--model_dir={tmp_path}/run", "--dry_run")
    program = [sys.executable, "-X", "importtime", "-m", "launcher.main", *flags]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    # What is looked for in vain is in the list, too, but not what it would have imported.
    assert {"keras", "tensorflow"} <= imported and not {"sklearn.utils", "matplotlib.cbook", "jax._src"} & imported
