"""A strategy of a user's own, bound in a recipe, trains as Launcher's own does."""

from __future__ import annotations

import numpy as np
import pytest
from places import PYTHONPATH, SMALL_DIGITS

from launcher.checkpoints import CheckpointStore

pytestmark = pytest.mark.slow

MINE = """
import gin
import tensorflow as tf

TWO = ["CPU:0", "CPU:1"]

class Mirrored(tf.distribute.MirroredStrategy):
    def __init__(self):
        super().__init__(TWO, cross_device_ops=tf.distribute.ReductionToOneDevice("CPU:1"))

@gin.configurable
def mirrored():
    return Mirrored()

@gin.configurable
def central():
    return tf.distribute.experimental.CentralStorageStrategy(TWO)

class Unknown(tf.distribute.Strategy):
    def __init__(self):
        super().__init__(tf.distribute.MirroredStrategy(TWO).extended)

@gin.configurable
def unknown():
    return Unknown()
"""
# One after the other in one process, as a start takes most of the time.
RUNS = """
import sys
from launcher import main

for name in ("auto", "mirrored", "central", "unknown"):
    strategy = "'auto'" if name == "auto" else f"@mine.{name}"
    flags = [f"--gin_param=train.strategy = {strategy}", f"--model_dir={name}", "--gin_param=train.steps = 4"]
    print(name, main.main([sys.argv[0], *sys.argv[1:], *flags]))
"""


def test_a_function_that_a_recipe_binds_makes_the_strategy_that_trains(run_launcher, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "runs.py").write_text(RUNS)
    (tmp_path / "recipe.gin").write_text(f"include '{SMALL_DIGITS}'\nimport mine\nCheckpoints.save_model = 'none'\n")
    env = {"PYTHONPATH": f"{PYTHONPATH}:{tmp_path}"}
    done = run_launcher("--gin_file=recipe.gin", "--replicas=2", module="runs", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for made in ("Mirrored", "CentralStorageStrategy"):
        assert f"the {made} that was given" in done.stdout
    assert "unknown 64" in done.stdout and "Unknown is none of TensorFlow's strategies" in done.stderr
    assert "Traits(...)" in done.stderr and "Traceback" not in done.stderr
    stores = {name: CheckpointStore(str(tmp_path / name / "checkpoints")) for name in ("auto", "mirrored", "central")}
    expected, *found = (store.read(store.latest()) for store in stores.values())
    for state in found:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
