"""`--engine=pjrt`: the same runs, with their steps on JAX's devices; TensorFlow's engine is the oracle."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy as np
import one_bad_row
import psutil
import pytest
import text_run
from cases import repeated_but
from places import PYTHONPATH, SMALL_DIGITS

from launcher.checkpoints import CheckpointStore

pytestmark = pytest.mark.slow

PJRT = "--engine=pjrt"
# All that a step has besides gradients: clipping, accumulation, averages, weight decay, moving statistics of none.
EVERYTHING = (
    "train.microbatches = 2",
    "train.ema_decay = 0.9",
    "train.optimizer = @adamw",
    "adamw.learning_rate = 0.01",
    "Clipping.global_norm = 0.5",
    "train.log_every = 1",
    "Checkpoints.save_model = 'none'",
)
BAD_ROW = """
import one_bad_row
train.task = @one_bad_row.task()
train.optimizer = @adamw
adamw.learning_rate = 0.01
train.precision = 'mixed_float16'
train.global_batch_size = 8
train.steps = 12
train.log_every = 1
Checkpoints.save_model = 'none'
"""


def flags(model_dir: Path, steps: int, *bindings: str, recipe: str = SMALL_DIGITS) -> list[str]:
    return [f"--gin_file={recipe}", f"--model_dir={model_dir}"] + [
        f"--gin_param={text}" for text in (f"train.steps = {steps}", *bindings)
    ]


def state(model_dir: Path) -> dict[str, np.ndarray]:
    """Of the newest checkpoint: weights, slots, averages and counters."""
    store = CheckpointStore(str(model_dir / "checkpoints"))
    return {name: value for name, value in store.read(store.latest()).items() if not name.startswith("host/")}


def logged(model_dir: Path, name: str = "loss") -> list[float]:
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [event[name] for line in lines if (event := json.loads(line))["split"] == "train"]


def assert_close(found: Path, expected: Path) -> None:
    mine, wanted = state(found), state(expected)
    assert mine.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(mine[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def assert_same_bits(found: Path, expected: Path) -> None:
    mine, wanted = state(found), state(expected)
    assert mine.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(mine[name], value, err_msg=name)


def test_checkpoints_cross_between_engines_and_numbers_of_devices(run_launcher, tmp_path):
    crossed, undisturbed = tmp_path / "crossed", tmp_path / "undisturbed"
    assert run_launcher(*flags(undisturbed, 24, *EVERYTHING)).returncode == 0
    for steps, on in (  # the other way, from TensorFlow's engine to JAX's, goes an evaluation below
        (10, (PJRT, "--replicas=8")),
        (16, (PJRT, "--replicas=2")),
        (24, ("--replicas=2",)),
    ):
        done = run_launcher(*flags(crossed, steps, "train.epochs = None", *EVERYTHING), *on)
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(logged(crossed), logged(undisturbed), rtol=1e-5)
    assert_close(crossed, undisturbed)


@pytest.mark.nightly  # its training: above; its evaluations: below
def test_model_and_evaluation_are_those_of_tensorflow(run_launcher, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    bindings = ("train.evaluate_every = 3", "train.evaluate_ema = True", *EVERYTHING[:-1])
    assert run_launcher(*flags(theirs, 9, *bindings)).returncode == 0
    done = run_launcher(*flags(ours, 9, *bindings), PJRT, "--replicas=2", "--mode=train_and_eval")
    assert done.returncode == 0, done.stderr
    assert "model.keras holds the model" in done.stdout
    found, wanted = (
        [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()] for one in (ours, theirs)
    )
    assert [(one["step"], one["split"]) for one in found] == [(one["step"], one["split"]) for one in wanted]
    for mine, expected in zip(found, wanted, strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert mine["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)


MEASURED = """
import keras
import numpy as np
import tensorflow as tf
import launcher

@keras.saving.register_keras_serializable()
class Spoken(keras.layers.Layer):
    def call(self, x, training=False):
        return x if training or not SPEAKS else x + tf.cast(tf.strings.length(tf.strings.as_string(x)), tf.float32)

def build():
    layers = [keras.Input((4,)), keras.layers.Dense(8, "gelu", kernel_regularizer=keras.regularizers.L2(0.1))]
    model = keras.Sequential([*layers, Spoken(name="spoken"), keras.layers.Dense(1, "sigmoid")])
    model.compile("adam", "binary_crossentropy", metrics=["mae", keras.metrics.AUC()], weighted_metrics=["accuracy"])
    return model

x = np.random.default_rng(0).normal(size=(45, 4)).astype(np.float32)
y, weight = (x[:, :1] > 0).astype(np.float32), np.abs(x[:, 0]) + 0.5
launcher.fit(build, (x, y), validation_data=(x, y, weight), epochs=1, batch_size=12, evaluate_every=2)
"""
OF_PROGRAM = ("Checkpoints.save_model = 'none'",)


def evaluations(model_dir: Path) -> list[dict[str, float]]:
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["split"] == "eval"]


def given_of(which: str, folder: Path) -> list[str]:
    """The flags of a recipe with an evaluation whose last batch is short."""
    if which == "program":
        (folder / "program.py").write_text(f"SPEAKS = False\n{MEASURED}")
        return flags(folder / "run", 3, *OF_PROGRAM, recipe=str(folder / "program.py"))[:-2]
    bindings = ("train.steps_per_loop = 1", "Checkpoints.save_model = 'none'")
    if which == "lm_cpu.gin":
        small = (
            "language_model.layers = 1",
            "train.eval_batch_size = 6",
            "text_corpus.length = 64",
            "language_modelling.temperature = 0",
        )
        text_run.write_corpus(folder)
        bindings += (*small, *text_run.corpus_bindings(folder), "train.ema_decay = 0.5", "train.evaluate_ema = True")
    if which == "transformer_cpu.gin":
        text_run.write_pairs(folder)
        bindings += (*text_run.pair_bindings(folder), "translation.decode_examples = None", "translation.beam_size = 2")
    return flags(folder / "run", 3, "train.epochs = None", *bindings, recipe=which)


# Evaluations on so many workers, and predictions of so many records. Seven are no whole batch, one is another shape.
EACH_OF_A_KIND = [("lm_cpu.gin", (1,), (7,))]
ALL_OF_A_KIND = [
    (which, (1, 2), (7, 1)) for which in ("resnet_cpu.gin", "lm_cpu.gin", "transformer_cpu.gin", "program")
]


@pytest.mark.parametrize(
    ("which", "workers", "counts"), repeated_but(EACH_OF_A_KIND, [*EACH_OF_A_KIND, *ALL_OF_A_KIND])
)
def test_devices_evaluate_and_decode_as_tensorflow_does(run_launcher, tmp_path, which, workers, counts):
    given = given_of(which, tmp_path)
    done = run_launcher(*given)
    assert done.returncode == 0, done.stderr
    (*_, wanted), already = evaluations(tmp_path / "run"), len(evaluations(tmp_path / "run"))
    for number in workers:
        on, module = ((), "launcher.main") if number == 1 else ((f"--workers={number}",), "launcher.launch")
        compiled = tmp_path / f"compiled_{number}"
        env = {"JAX_COMPILATION_CACHE_DIR": str(compiled), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        how = {"module": module, "env": env}
        shard = () if which == "resnet_cpu.gin" else ("--gin_param=train.shard = 'all'",)
        done = run_launcher(*given, "--mode=eval", PJRT, f"--replicas={2 // number}", *on, *shard, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "runs in TensorFlow" not in done.stdout
        assert list(compiled.glob("jit_step-*")), "JAX has run it"
    found = evaluations(tmp_path / "run")[already:]
    assert len(found) == len(workers)
    for event in found:
        assert event.keys() == wanted.keys()
        for name in event.keys() - {"time", "split"}:
            assert event[name] == pytest.approx(wanted[name], rel=2e-6), name
    for count in counts:
        answers = [predicted(run_launcher, tmp_path, which, given, count, more) for more in ((), (PJRT, *shard))]
        if isinstance(answers[0], np.ndarray):
            np.testing.assert_allclose(answers[1], answers[0], rtol=1e-5, atol=1e-6)
        else:
            assert answers[1] == answers[0]


def predicted(run_launcher, folder: Path, which: str, given: list[str], count: int, more: tuple[str, ...]):
    """What `--mode=predict` answers to so many records: lines, or an array."""
    if which in ("lm_cpu.gin", "transformer_cpu.gin"):
        written, answers = folder / "records.txt", folder / "answers.txt"
        written.write_text("".join(f"{'abcdefg'[: number + 1]} one two\n" for number in range(count)))
    else:
        written, answers = folder / "records.npy", folder / "answers.npy"
        shape = (count, 4) if which == "program" else (count, 8, 8, 1)
        np.save(written, np.random.default_rng(0).normal(size=shape).astype(np.float32))
    replicas = 2 if PJRT in more and count > 1 else 1
    done = run_launcher(
        *given, "--mode=predict", f"--input={written}", f"--output={answers}", f"--replicas={replicas}", *more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return np.load(answers) if answers.suffix == ".npy" else answers.read_text()


def test_an_evaluation_that_jax_cannot_run_is_tensorflows_and_one_line_says_so(run_launcher, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"SPEAKS = True\n{MEASURED}")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, on in ((ours, (PJRT, "--replicas=2")), (theirs, ())):
        done = run_launcher(f"--gin_file={program}", f"--model_dir={folder}", f"--gin_param={OF_PROGRAM[0]}", *on)
        assert done.returncode == 0, done.stderr
        (*lines,) = [line for line in done.stdout.splitlines() if "evaluation runs in TensorFlow" in line]
        assert len(lines) == (1 if on else 0), done.stdout
        assert all("'spoken' of type Spoken" in line for line in lines)
    assert len(evaluations(ours)) == len(evaluations(theirs)) == 2
    for mine, expected in zip(evaluations(ours), evaluations(theirs), strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_an_overflow_on_one_device_skips_the_step_on_all(run_launcher, tmp_path):
    recipe = tmp_path / "bad_row.gin"
    recipe.write_text(BAD_ROW)
    env = {"PYTHONPATH": PYTHONPATH}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, on in ((ours, (PJRT, "--replicas=4")), (theirs, ())):
        done = run_launcher(f"--gin_file={recipe}", f"--model_dir={folder}", "--mode=train", *on, env=env)
        assert done.returncode == 0, done.stderr
    skipped = logged(ours, "skipped_steps")
    assert skipped[one_bad_row.BAD_STEP - 1] == skipped[one_bad_row.BAD_STEP - 2] + 1
    assert skipped[-1] < len(skipped) // 2
    assert skipped == logged(theirs, "skipped_steps")
    assert logged(ours, "loss_scale") == logged(theirs, "loss_scale")
    mine, expected = state(ours), state(theirs)
    for name, value in expected.items():
        if name.startswith(("counters/", "loss_scale/")):
            np.testing.assert_array_equal(mine[name], value, err_msg=name)
        assert np.isfinite(mine[name]).all(), name


@pytest.mark.nightly  # so it is for one of two processes, below
@pytest.mark.parametrize("shared_out", ["none", "optimizer", "all"])
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(start_launcher, run_launcher, tmp_path, shared_out):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    often = ("train.checkpoint_every = 5", "train.steps_per_loop = 1", f"train.shard = '{shared_out}'")
    given = (*often, "mlp.units = 64", *EVERYTHING)
    assert run_launcher(*flags(undisturbed, 60, *given), PJRT, "--replicas=2").returncode == 0
    first = start_launcher(*flags(killed, 60, *given), PJRT, "--replicas=2")
    first.wait_until(lambda: len(CheckpointStore(str(killed / "checkpoints")).steps()) >= 2)
    first.send(signal.SIGKILL)
    assert first.wait().returncode == -signal.SIGKILL
    second = run_launcher(*flags(killed, 60, *given), PJRT, "--replicas=2")
    assert second.returncode == 0, second.stderr
    assert re.search(r"restored step \d+ from", second.stdout)
    assert_same_bits(killed, undisturbed)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "more", [pytest.param((), marks=pytest.mark.nightly), ("train.shard = 'all'", "mlp.units = 64")]
)
def test_two_processes_train_as_one_and_come_back_when_one_is_killed(run_launcher, tmp_path, more):
    together, undisturbed, killed = (tmp_path / name for name in ("together", "undisturbed", "killed"))
    given = ("train.checkpoint_every = 5", "train.steps_per_loop = 1", "train.epochs = None", *EVERYTHING, *more)
    assert run_launcher(*flags(together, 24, *given, "train.shard = 'none'"), PJRT, "--replicas=4").returncode == 0
    drill = ("--drill=kill", "--drill_worker=1", "--drill_step=12", f"--drill_reference={undisturbed}")
    dumped = {"XLA_FLAGS": f"--xla_dump_to={tmp_path / 'xla'} --xla_dump_hlo_as_text"}
    for folder, also, env in ((undisturbed, (), dumped), (killed, drill, None)):
        job_flags = (*flags(folder, 24, *given), "--workers=2", PJRT, "--replicas=2", *also)
        done = run_launcher(*job_flags, module="launcher.launch", env=env)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 1 was killed by SIGKILL" in done.stdout + done.stderr
    assert "restarting all workers" in done.stdout + done.stderr
    record = json.loads((killed / "drill.json").read_text())
    assert (record["passed"], record["orphans"]) == (True, 0)
    np.testing.assert_allclose(logged(undisturbed), logged(together), rtol=1e-5)
    assert logged(killed) == logged(undisturbed)
    assert_same_bits(killed, undisturbed)
    store = CheckpointStore(str(killed / "checkpoints"))
    files = list((killed / "checkpoints" / f"step_{store.latest():08d}").glob("state.data-*"))
    assert len(files) == (2 if more else 1), "each worker writes its own parts"
    compiled = "".join(file.read_text() for file in (tmp_path / "xla").glob("*after_optimizations.txt"))
    assert re.search(r" all-reduce(-start)?\(", compiled)
    assert compiled.count("reduce-scatter") == 0  # Gloo's is suspected, see `Program`


@pytest.mark.heavy
@pytest.mark.parametrize("sent", repeated_but([signal.SIGTERM], [signal.SIGKILL, signal.SIGTERM]))
def test_workers_end_together_where_one_is_killed_or_asked_to_stop(start_launcher, free_ports, tmp_path, sent):
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = []
    for index in range(2):
        config = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
        given = ("train.checkpoint_every = 5", "train.steps_per_loop = 1")
        all_flags = flags(tmp_path / "run", 100_000, *given)
        workers.append(start_launcher(*all_flags, PJRT, "--mode=train", env={"TF_CONFIG": json.dumps(config)}))
    store = CheckpointStore(str(tmp_path / "run" / "checkpoints"))
    workers[0].wait_until(lambda: len(store.steps()) >= 2, 120)
    workers[1].send(sent)
    code, said = (75, "error: another worker went away") if sent == signal.SIGKILL else (42, "asked to stop: step")
    left = workers[0].wait(60)
    assert left.returncode == code, left.stderr
    assert said in left.stderr
    assert "Traceback" not in left.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_code"] == code
    assert workers[1].wait(60).returncode == (42 if sent == signal.SIGTERM else -sent)


LONG_EVALUATION = """
import keras
import numpy as np
import launcher

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

x = np.ones((2_000_000, 4), np.float32)
launcher.fit(build, (x[:16], x[:16, :1]), validation_data=(x, x[:, :1]), epochs=1, batch_size=4)
"""


@pytest.mark.nightly  # in a training it is, above
@pytest.mark.heavy
def test_a_worker_that_is_killed_in_an_evaluation_ends_the_others_at_once(start_launcher, free_ports, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LONG_EVALUATION)
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = []
    for index in range(2):
        config = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
        given = (f"--gin_file={program}", f"--model_dir={tmp_path / 'run'}", PJRT, "--replicas=2")
        workers.append(start_launcher(*given, env={"TF_CONFIG": json.dumps(config)}))
    workers[0].wait_until(lambda: "evaluating" in workers[0].stdout, 120)
    spent = psutil.Process(workers[0].process.pid).cpu_times  # what it compiles first takes less
    until = spent().user + 4
    workers[0].wait_until(lambda: spent().user > until, 120)
    workers[1].send(signal.SIGKILL)
    left = workers[0].wait(60)
    assert left.returncode == 75, left.stderr
    assert "another worker went away in the middle of an evaluation" in left.stderr
    assert "Traceback" not in left.stderr


PROGRAM = """
import keras
import numpy as np
import tensorflow as tf
import launcher

@keras.saving.register_keras_serializable()
class Spoken(keras.layers.Layer):
    def call(self, x):
        return x + tf.cast(tf.strings.length(tf.strings.as_string(x)), tf.float32)

def build():
    spoken = Spoken(name="spoken", dtype="float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), spoken, keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model

x = np.ones((32, 4), np.float32)
launcher.fit(build, (x, x[:, :2]), epochs=2, batch_size=8)
"""


def test_what_jax_cannot_run_is_one_message_with_the_layers_name(run_launcher, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_launcher(f"--gin_file={program}", f"--model_dir={tmp_path / 'run'}", PJRT)
    assert done.returncode == 64, done.stderr
    assert "'spoken' of type Spoken" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((PJRT, "--strategy=mirrored"), "--strategy=mirrored"),
        ((PJRT, "--tpu=local"), "--tpu=local"),
        ((PJRT, "--restore_from_chief"), "--restore_from_chief"),
        ((PJRT, "--replicas=3", "--gin_param=train.global_batch_size = 64"), "train.global_batch_size = 64"),
    ],
)
def test_what_does_not_go_with_the_engine_is_one_message(run_launcher, tmp_path, given, said):
    done = run_launcher(*flags(tmp_path / "run", 3), *given)
    assert done.returncode == 64, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mode", repeated_but(["train"], ["train", "verify"]))
def test_without_jax_it_is_one_message(run_launcher, tmp_path, mode):
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "jax.py").write_text("raise ModuleNotFoundError('No module named jax', name='jax')")
    given = (*flags(tmp_path / "run", 3), PJRT, f"--mode={mode}")
    done = run_launcher(*given, env={"PYTHONPATH": f"{absent}:{PYTHONPATH}"}, fresh=True)
    assert done.returncode == 64, done.stderr
    assert "--engine=pjrt needs JAX" in done.stderr
    assert "Traceback" not in done.stderr
