"""What runs the steps is chosen by --engine, by a recipe, and by `launcher.fit`."""

from __future__ import annotations

import json

import pytest
from places import PYTHONPATH, SMALL_DIGITS

from launcher import main, modes
from launcher.errors import UsageError
from launcher.machine import jax_devices, nvidia
from launcher.machine.runtime_kinds import PJRT, TENSORFLOW
from launcher.modes import plan

PROGRAM = """\
import json, keras, numpy as np, tensorflow as tf, launcher
from launcher.errors import UsageError

class Forms(keras.layers.Layer):
    "Weights in conditionals, given out of one, and multiplied by each other."

    def build(self, shape):
        self.one, self.other = (self.add_weight(shape=(64, 64), name=name) for name in ("one", "other"))

    def call(self, x):
        one, other, is_first = self.one, self.other, tf.reduce_sum(self.one) > 0
        x = tf.cond(is_first, lambda: x @ one, lambda: x @ other)
        x = tf.switch_case(tf.cast(is_first, tf.int32), [lambda: x @ one, lambda: x @ other])
        return x + x @ keras.ops.cond(is_first, lambda: one, lambda: other) @ (one @ one)

def build():
    layers = keras.layers
    base = layers.Dense(64)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(64, "relu"), base, Forms(),
                              layers.SpectralNormalization(layers.Dense(64)), layers.Dense(1)])
    base.enable_lora(2)
    model.compile("adam", "mse", metrics=["mae"])
    return model

def fit(**how):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    told = launcher.fit(build, x, x[:, :1], validation_data=(x, x[:, :1]), epochs=2, verbose=0, **how)
    return [*told.history["loss"], *told.history["val_mae"], told.model.evaluate(x, x[:, :1], verbose=0)[1]]
"""
IN_TURN = """
found = [fit(engine="pjrt", replicas=2, shard="all"), *ALONE, fit()]
print("FOUND", json.dumps(found))
try:
    fit(engine="pjrt", replicas=3)
except UsageError as error:
    print("REFUSED", error)
"""


def request(*argv):
    return modes.make_request(main.parse(["main", *argv]))


def test_the_flag_goes_before_the_recipe_and_what_is_bound_last_before_what_it_includes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.gin").write_text("train.engine = 'tensorflow'\n")
    (tmp_path / "own.gin").write_text("include 'base.gin'\nENGINE = 'pjrt'\ntrain.engine = %ENGINE\n")
    (tmp_path / "own.py").write_text("import launcher\nlauncher.fit(build, x, y, engine='pjrt')\n")
    own = "--gin_file=own.gin"
    assert request(own).runtime is request("--gin_file=own.py").runtime is PJRT
    assert request("--gin_file=base.gin").runtime is request(own, "--engine=tensorflow").runtime is TENSORFLOW
    assert request("--gin_file=base.gin", "--gin_param=train.engine = 'pjrt'").runtime is PJRT
    # Who writes a manifest may not have the recipe; what is wrong with it is said where it is read.
    assert request("--gin_file=in_the_pods.gin").asked_runtime is None
    assert request("--gin_file=in_the_pods.gin", "--gin_param=train.engine = 'pjrt'").runtime is PJRT
    with pytest.raises(UsageError, match=r"train\.engine = 'pjr': .*did you mean 'pjrt'"):
        _ = request(own, "--gin_param=train.engine = 'pjr'").runtime


def test_a_mode_that_tensorflow_does_says_so_and_others_take_the_flag(capsys, tmp_path):
    recipe = ("--gin_file=mlp_fashion.gin", f"--model_dir={tmp_path}", "--gin_param=train.engine = 'pjrt'")
    assert main.main(["main", *recipe, "--gin_param=train.shard = 'all'", "--mode=precision_report", "--dry_run"]) == 0
    assert "--mode=precision_report is done by TensorFlow, and not by --engine=pjrt" in capsys.readouterr().out
    assert main.main(["main", "--mode=doctor", "--dry_run", "--engine=pjrt"]) == 0


def test_gpus_that_neither_can_use_are_no_quiet_day_on_the_cpu(monkeypatch):
    monkeypatch.setattr(nvidia, "visible", lambda environ: [nvidia.NvidiaGpu("0", "NVIDIA L4")])
    monkeypatch.setattr(jax_devices.importlib.util, "find_spec", lambda name: None)
    recipe = ["--gin_file=mlp_fashion.gin", "--gin_param=image_data.name = 'digits'"]
    with pytest.raises(UsageError, match=r"1 GPU\(s\) NVIDIA L4: .*--strategy=one_device.*--engine=pjrt"):
        plan.resolve(request(*recipe), connect=False)
    assert plan.resolve(request(*recipe, "--strategy=one_device"), connect=False).strategy.accelerator == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    "alone", ["", pytest.param('fit(engine="pjrt")', marks=pytest.mark.nightly)], ids=["several", "and one"]
)
def test_fits_of_one_process_run_by_either_engine_to_the_same_numbers(run_launcher, tmp_path, alone):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + IN_TURN.replace("*ALONE,", f"{alone}," if alone else ""))
    done = run_launcher(module="program", env={"PYTHONPATH": f"{PYTHONPATH}:{tmp_path}"}, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("FOUND", "REFUSED")))
    *by_jax, by_tensorflow = json.loads(lines["FOUND"])
    for found in by_jax:
        assert found == pytest.approx(by_tensorflow, rel=1e-5)
    assert "3 replicas are wanted, and JAX was started with 2 device(s)" in lines["REFUSED"]


@pytest.mark.slow
def test_a_program_that_computes_its_engine_is_told_the_flag(run_launcher, tmp_path):
    (tmp_path / "own.py").write_text(PROGRAM + "fit(engine='pjrt'[:4].lower())\n")
    done = run_launcher("--gin_file=own.py", cwd=tmp_path)
    assert done.returncode == 64 and "add --engine=pjrt" in done.stderr, done.stdout + done.stderr


@pytest.mark.nightly  # each door by itself is in the gate
@pytest.mark.slow
def test_workers_that_fit_or_a_supervisor_starts_train_by_the_engine(run_launcher, tmp_path):
    (tmp_path / "own.py").write_text(PROGRAM + "print('FOUND', fit(engine='pjrt', shard='all', model_dir='own'))\n")
    (tmp_path / "several.py").write_text(PROGRAM + "print('FOUND', fit(engine='pjrt', shard='all', workers=2))\n")
    started = run_launcher("--workers=2", "--gin_file=own.py", module="launcher.launch", cwd=tmp_path)
    called = run_launcher(module="several", env={"PYTHONPATH": f"{PYTHONPATH}:{tmp_path}"}, cwd=tmp_path, fresh=True)
    found = []
    for done in (started, called):
        assert done.returncode == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if "FOUND" in line)
        found.append(json.loads(line.partition("FOUND ")[2]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.nightly  # the recipe's binding by itself is in the gate
@pytest.mark.slow
def test_a_recipe_that_names_the_engine_trains_evaluates_and_exports_without_a_flag(run_launcher, tmp_path):
    bindings = ("train.engine = 'pjrt'", "train.shard = 'all'", "train.steps = 4")
    given = [f"--gin_file={SMALL_DIGITS}", f"--model_dir={tmp_path}", *(f"--gin_param={one}" for one in bindings)]
    for mode, says in (("train_and_eval", "by JAX on CPU devices"), ("eval", "by JAX"), ("export", "by TensorFlow")):
        done = run_launcher(*given, f"--mode={mode}", *(["--replicas=2"] if mode != "export" else []))
        assert done.returncode == 0 and says in done.stdout, done.stdout + done.stderr
