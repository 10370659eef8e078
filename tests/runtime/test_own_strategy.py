"""A strategy of a user's own, bound in a recipe, trains as Launcher's own does."""

from __future__ import annotations

import numpy as np
import pytest
from places import PYTHONPATH, SMALL_DIGITS

from launcher.checkpoints import CheckpointStore

pytestmark = pytest.mark.slow

MODULE = """
import gin
import tensorflow as tf

@gin.configurable
def mirrored():
    across = tf.distribute.ReductionToOneDevice("CPU:1")
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=across)

class Unknown(tf.distribute.Strategy):
    def __init__(self):
        super().__init__(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).extended)

@gin.configurable
def unknown():
    return Unknown()
"""


def test_a_function_that_a_recipe_binds_makes_the_strategy_that_trains(run_launcher, tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    recipe = tmp_path / "recipe.gin"
    recipe.write_text(f"include '{SMALL_DIGITS}'\nimport mine\ntrain.strategy = @mine.mirrored\n")
    env, found = {"PYTHONPATH": f"{PYTHONPATH}:{tmp_path}"}, {}
    bindings = [f"--gin_param={one}" for one in ("train.steps = 4", "Checkpoints.save_model = 'none'")]
    for name, file in (("theirs", SMALL_DIGITS), ("mine", str(recipe))):
        folder = tmp_path / name
        flags = (f"--gin_file={file}", f"--model_dir={folder}", "--replicas=2", *bindings)
        done = run_launcher(*flags, env=env)
        assert done.returncode == 0, done.stderr
        store = CheckpointStore(str(folder / "checkpoints"))
        found[name] = store.read(store.latest())
    assert "the MirroredStrategy that was given" in done.stdout
    assert found["mine"].keys() == found["theirs"].keys()
    for name, value in found["theirs"].items():
        np.testing.assert_allclose(found["mine"][name], value, rtol=1e-5, atol=1e-7, err_msg=name)

    refused = run_launcher(*flags, "--gin_param=train.strategy = @mine.unknown", "--dry_run", env=env)
    assert refused.returncode == 64 and "Unknown is none of TensorFlow's strategies" in refused.stderr
    assert "Traits(...)" in refused.stderr and "Traceback" not in refused.stderr
