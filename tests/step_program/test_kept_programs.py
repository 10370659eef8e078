"""--compile_cache with JAX's engine: what was lowered is kept there, and never taken for another program."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import keras
import numpy as np
import launcher

@keras.saving.register_keras_serializable()
class Layer(keras.layers.Layer):
    def call(self, x):
        return x * 1.0  # layer

def loss(y, found):
    return keras.ops.mean(keras.ops.square(y - found), axis=-1) * 1.0  # loss

def metric(y, found):
    return keras.ops.mean(keras.ops.abs(y - found), axis=-1) * 1.0  # metric

class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 * keras.ops.cast(step + 1, "float32") * 1.0  # schedule

    def get_config(self):
        return {}

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), Layer(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(Schedule()), loss, metrics=[metric])
    return model

x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32) * 1.0  # data
launcher.fit(build, (x, x[:, :1]), epochs=1, batch_size=8)
"""
KINDS = ("layer", "loss", "metric", "schedule", "data")


@pytest.mark.parametrize(
    "kinds", [("layer",), pytest.param(KINDS[1:], marks=pytest.mark.nightly)], ids=["layer", "others"]
)
def test_a_restart_lowers_nothing_again_but_what_was_edited_or_damaged(run_launcher, tmp_path, kinds):
    cache, program = tmp_path / "cache", tmp_path / "program.py"

    def trained(name, text, *on):
        program.write_text(text)
        save = "--gin_param=Checkpoints.save_model = 'none'"
        every = "--gin_param=train.log_every = 1"
        done = run_launcher(f"--gin_file={program}", f"--model_dir={tmp_path / name}", save, every, *on)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [{key: row[key] for key in ("loss", "metric", "learning_rate")} for row in rows]

    kept = ("--engine=pjrt", f"--compile_cache={cache}")
    first = trained("first", PROGRAM, *kept)
    times = {path: path.stat().st_mtime_ns for path in cache.glob("*.program")}
    assert times
    assert trained("again", PROGRAM, *kept) == first
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.program")} == times
    for path in times:
        path.write_bytes(path.read_bytes()[:1000])
    assert trained("damaged", PROGRAM, *kept) == first
    assert all(path.stat().st_size > 1000 for path in times)
    for kind in kinds:
        edited = PROGRAM.replace(f"1.0  # {kind}", f"0.5  # {kind}")
        found = trained(kind, edited, *kept)
        assert found != first, kind
        for mine, wanted in zip(found, trained(f"{kind} without", edited, "--engine=pjrt"), strict=True):
            assert mine == wanted, kind
