"""What a call of `launcher.fit` finds, and what it leaves behind: folders, random numbers, and how it ends."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from places import PYTHONPATH

import launcher
from launcher.errors import EXIT_DONE, UsageError
from launcher.machine import installation
from launcher.model_dir import lease
from launcher.modes import Request, fit_folders
from launcher.run.actions import base

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = X[:, :1]
QUIET = {"batch_size": 16, "verbose": 0}


def build(rate=0.1):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
    return model


def test_without_a_folder_each_call_is_another_training_and_the_newest_folders_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = launcher.fit(build, (X, Y), **QUIET)
    second = launcher.fit(lambda: build(0.001), (X, Y), **QUIET)
    named = launcher.fit(lambda: build(0.001), (X, Y), **QUIET, model_dir="named")
    assert first.history != second.history == named.history
    newest, latest = Path(second.model_dir), Path("runs/fit/latest")
    assert latest.resolve() == newest.resolve() != Path(first.model_dir).resolve()
    # Its weights are there once, and with its name the training goes on.
    assert len([one for one in newest.rglob("*") if one.name.startswith("state.data")]) == 1
    assert not (newest / "model.keras").exists() and Path("named/model.keras").exists()
    more = launcher.fit(lambda: build(0.001), (X, Y), **QUIET, epochs=2, model_dir=second.model_dir)
    assert more.epoch == [0, 1] and more.history["loss"][:1] == second.history["loss"]

    old = [Path("runs/fit", f"20200101-0000{number:02}-00000000") for number in range(22)]
    mine = {"mine", "20190101-000000-results1"}  # the latter is almost of such a name
    for folder in (*old, *(Path("runs/fit", name) for name in mine)):
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
    with lease.held(str(old[0]), environ={}, say=print):
        fit_folders.tidy()
        assert [one.exists() for one in old] == [True, *[False] * 3, *[True] * 18]  # the first is written to
        assert fit_folders.run(Request(mode="clean")) == EXIT_DONE
        assert {one.name for one in Path("runs/fit").iterdir()} == {old[0].name, "latest", *mine}
        assert latest.resolve() == old[0].resolve()
    fit_folders.run(Request(mode="clean", model_dir="runs/fit"))
    assert {one.name for one in Path("runs/fit").iterdir()} == mine


def test_a_call_that_is_refused_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="does not take this data"):
        launcher.fit(build(), X[:, :3], Y)
    with pytest.raises(UsageError, match="fit: seed = None: must be a whole number"):
        launcher.fit(build(), X, Y, seed=None)
    assert not any(tmp_path.iterdir())


def test_a_job_that_a_scheduler_starts_again_finds_its_folders(monkeypatch):
    def folders(job="7", program="a.py"):
        monkeypatch.setattr(fit_folders, "_calls", itertools.count(1))  # of a process
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setattr("sys.argv", [program])
        return [fit_folders.chosen() for _ in range(2)]

    monkeypatch.setattr("os.isatty", lambda descriptor: False)
    first, others = folders(), [folders("8"), folders(program="b.py")]
    assert first == folders() and len({*first, *itertools.chain(*others)}) == 6
    monkeypatch.setattr("os.isatty", lambda descriptor: True)  # a person's, in an allocation
    assert not {*folders()} & {*folders()}


@tf.function
def noise():
    return tf.random.normal([])


def drawn():
    numbers = np.random.random(), random.random(), tf.random.uniform([]), keras.random.uniform([]), noise()
    return [float(one) for one in numbers]


def test_no_generator_of_the_program_is_touched_and_each_of_a_call_follows_its_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def at_random():
        model = build()
        values = [np.random.normal(size=(2, 1)), [[random.random()]], tf.random.normal([1, 1])]
        model.layers[0].kernel.assign(tf.concat([tf.cast(one, tf.float32) for one in values], 0))
        model.layers[0].bias.assign(keras.random.normal([1]))
        return model

    def fitted(make, **more):
        data = lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(32).batch(16)  # noqa: E731
        history = launcher.fit(make, data, verbose=0, **more)
        return history.history["loss"], json.loads(Path(history.model_dir, "run.json").read_text())["plan"]["seed"]

    model = build()  # whose layers draw
    keras.utils.set_random_seed(7)
    undisturbed = [drawn() for _ in range(3)]
    keras.utils.set_random_seed(7)
    found, seen = [drawn()], [fitted(at_random)]
    found.append(drawn())
    launcher.fit(model, X, Y, **QUIET)
    found.append(drawn())
    np.testing.assert_equal(found, undisturbed)
    seen.append(fitted(at_random))
    assert seen[0] == seen[1] and seen[0][1] == "7"  # first values and order are the seed's alone
    keras.utils.set_random_seed(8)
    assert fitted(at_random)[0] != seen[0][0]
    assert fitted(at_random, seed=7) == seen[0]


class PrunedError(Exception):
    pass


def interrupt():
    signal.raise_signal(signal.SIGINT)


def prune():
    raise PrunedError("pruned")


@pytest.mark.parametrize(("end", "kind"), [(interrupt, KeyboardInterrupt), (prune, PrunedError)])
def test_what_ends_a_training_is_the_programs_and_the_model_has_what_it_has_learnt(end, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def ended(fit):
        keras.utils.set_random_seed(3)
        model = build()
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch and end())
        with pytest.raises(kind) as raised:
            fit(model, X, Y, **QUIET, shuffle=False, epochs=3, callbacks=[callback])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return model, str(raised.value)

    mine, said = ended(launcher.fit)
    if kind is PrunedError:
        other, _ = ended(keras.Model.fit)
        assert said == "pruned" and mine.history.epoch == other.history.epoch
        for found, wanted in zip(mine.optimizer.variables, other.optimizer.variables, strict=True):
            np.testing.assert_array_equal(found.numpy(), wanted.numpy())
        np.testing.assert_allclose(mine.layers[0].kernel, other.layers[0].kernel, atol=1e-6)
        return
    assert 2 <= int(mine.optimizer.iterations) < 6  # the loop goes on until the signal is heard
    folder = said.partition('with model_dir="')[2].rstrip('"')
    assert launcher.fit(mine, X, Y, **QUIET, shuffle=False, epochs=3, model_dir=folder).epoch == [0, 1, 2]


class Broken(keras.layers.Layer):
    def build(self, shape):
        self.weight = self.add_weight(shape=(self.unknown_attribute,))

    def call(self, x):
        return x


def test_a_mistake_in_a_layer_is_told_rather_than_what_follows_from_it(tmp_path):
    model = keras.Sequential([keras.Sequential([keras.layers.Dense(3), Broken()]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match=r"test_fit_alone.py line \d+, in build\(\): .* 'unknown_attribute'"):
        launcher.fit(model, X, Y, model_dir=str(tmp_path))


class Fitting(keras.Sequential):
    def fit(self, *args, **kwargs):
        raise AssertionError("is not called")


def test_what_trained_is_kept_and_what_is_not_called_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()

    Path("program.py").write_text("one\n")
    for words in (["init"], ["add", "."], ["commit", "-m", "first"]):
        git(*words)
    Path("program.py").write_text("another\n")
    model = Fitting([keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    launcher.fit(model, X, Y, **QUIET, model_dir="run")
    record = json.loads(Path("run/run.json").read_text())
    plan = record["plan"]
    assert plan["commit"] == f"{git('rev-parse', 'HEAD')}-dirty" and "+another" in record["diff"]
    assert plan["commit"] in Path("run/report.html").read_text()
    assert record["command"].startswith(f"{installation.python()} ") and f"numpy-{np.__version__}" in record["packages"]
    notes = " ".join(plan[name] for name in plan if name.startswith("note"))
    assert "Fitting has a fit of its own" in notes and "run_eagerly is ignored" in notes


def test_a_line_an_epoch_is_shown_and_its_speed_is_that_of_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(base, "COUNT_AFTER_SECONDS", 0.0)

    def fitted(verbose, **more):
        history = launcher.fit(
            build, (X, Y), (X, Y), batch_size=7, model_dir=str(tmp_path / str(verbose)), verbose=verbose, **more
        )
        return history, capsys.readouterr().out.splitlines()

    history, lines = fitted(1, epochs=9)
    told = [line for line in lines if line.startswith("epoch ")]
    steps = -(-len(X) // 7)
    for epoch, line in enumerate(told):
        numbers = "  ".join(f"{name} {values[epoch]:.4g}" for name, values in history.history.items())
        assert line.startswith(f"epoch {epoch + 1}/9  step {steps * (epoch + 1)}/{steps * 9}  {numbers}")
    assert len(told) == 9 and not any(line.startswith(("evaluation", "step ", "cluster")) for line in lines)
    events = [json.loads(line) for line in (tmp_path / "1" / "metrics.jsonl").read_text().splitlines()]
    trained = [event for event in events if event["split"] == "train"]
    before, seconds = 1, 0.0  # the first step has compiled
    for event in trained:
        assert event["flops_per_second"] == pytest.approx(4 * X.shape[1] * event["examples_per_second"])
        seconds += 7 * (event["step"] - before) / event["examples_per_second"]
        before = event["step"]
    spent = json.loads((tmp_path / "1" / "summary.json").read_text())["seconds"]
    assert 0 < seconds <= spent["train"] + spent["input_wait"] + 1e-6
    assert trained[-1]["step"] - trained[-2]["step"] > 1  # what is left is no event of its own
    monkeypatch.undo()
    _, brief = fitted(2, epochs=2)
    events = map(json.loads, (tmp_path / "2" / "metrics.jsonl").read_text().splitlines())
    assert not any("flops_per_second" in event for event in events), "no fit of seconds pays for a count"
    assert [
        line.split()[0] for line in brief if not line.startswith(("completed", "best", "time", "report", "model."))
    ] == ["epoch"] * 2


MISTAKEN = """
import launcher

def build():
    return undefined

if __name__ == "__main__":
    launcher.fit(build, ([[0.0]], [[0.0]]), batch_size=1, workers=1, model_dir="run")
"""


def test_a_mistake_of_the_program_is_named_by_its_line_where_workers_are_sent_it(run_launcher, tmp_path):
    (tmp_path / "mine.py").write_text(MISTAKEN)
    done = run_launcher(module="mine", cwd=tmp_path, env={"PYTHONPATH": PYTHONPATH})
    assert done.returncode == 64
    assert "mine.py line 5, in build(): NameError: name 'undefined' is not defined" in done.stderr
    assert "Traceback" not in done.stderr
