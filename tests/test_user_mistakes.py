"""What a new user writes wrong in a task: one line that says where and what to do, and the documented exit code.

Each mistake is made in the wine.py and wine.gin of docs/own_task.md.
"""

from __future__ import annotations

import functools
import re
import runpy
import subprocess
import sys

import gin
import pytest
from cases import repeated_but
from places import PYTHONPATH
from test_documentation import code_block

from launcher import main as entry
from launcher.errors import user_code
from launcher.step import gradients

pytestmark = pytest.mark.slow

MODULE, RECIPE = code_block("class Wine"), code_block("train.task = @Wine()")
SUMS = 'return tf.reduce_sum(losses * weight), tf.reduce_sum(weight), {"accuracy": tf.reduce_sum(right * weight)}'
DATA = "        return RandomAccessData(\n"
STANDARDISED = '.astype("float32")\n'


def line_of(text: str) -> int:
    """The line of wine.py that a text stands in."""
    return MODULE[: MODULE.index(text)].count("\n") + 1


IN_LOSS = f"wine.py line {line_of('def loss')}: "
LOGITS, LOSSES, RETURN = line_of("logits, weight ="), line_of("losses ="), line_of(SUMS)


@pytest.fixture
def wine(tmp_path, monkeypatch, capsys):
    """wine(changes, *flags): writes both files with texts replaced and runs them: (exit code, stderr, stdout)."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)

    def run(changes, *flags):
        texts = {"wine.py": MODULE, "wine.gin": RECIPE}
        for old, new in changes.items():
            assert any(old in text for text in texts.values()), old
            texts = {name: text.replace(old, new) for name, text in texts.items()}
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        sys.modules.pop("wine", None)
        sys.path_importer_cache.clear()
        where = [] if any(flag.startswith("--replicas") for flag in flags) else ["--strategy=one_device"]
        with gin.config.interactive_mode():  # the class is registered again by each test
            code = entry.main(["launcher", "--gin_file=wine.gin", "--model_dir=out", *where, *flags])
        return code, *reversed(capsys.readouterr())

    return run


BEFORE_ANYTHING_IS_WRITTEN = {
    "weight 1 beside means": (
        {SUMS: "return tf.reduce_mean(losses), 1.0, {'accuracy': tf.reduce_mean(right)}"},
        IN_LOSS + "loss() returned weight 1 for 32 examples: return sums, not means",
    ),
    "one number": (
        {SUMS: "return tf.reduce_mean(losses)"},
        IN_LOSS + "loss() must return (sum of losses, sum of weights, {metric: sum}), got float32 of shape ()",
    ),
    "nothing": ({SUMS: "pass"}, "{metric: sum}), got None"),
    "no metrics": ({SUMS: "return losses, weight"}, "got (float32 of shape (32,), float32 of shape (32,))"),
    "losses of each example": (
        {SUMS: "return losses, tf.reduce_sum(weight), {}"},
        IN_LOSS + "the loss that loss() returned must be a float32 scalar (a sum over the batch), got float32 of shape "
        "(32,); add it up with tf.reduce_sum",
    ),
    "a loss in float16": (
        {SUMS: "return tf.cast(tf.reduce_sum(losses), tf.float16), tf.reduce_sum(weight), {}"},
        "got float16 of shape (); cast it with tf.cast(..., tf.float32)",
    ),
    "a metric that is a string": (
        {SUMS: "return tf.reduce_sum(losses), tf.reduce_sum(weight), {'a': 'b'}"},
        "got string",
    ),
    "an input of another shape": (
        {"keras.Input((13,))": "keras.Input((12,))"},
        f"wine.py line {LOGITS}, in loss(): ValueError: Input 0 ",  # Keras has said it in several ways
    ),
    "an unknown key": (
        {'batch["features"]': 'batch["feature"]'},
        f"wine.py line {LOGITS}, in loss(): KeyError: 'feature'; batch has cultivar, features, weight; did you mean "
        "'features'?",
    ),
    "an unknown key in augment": (
        {DATA: DATA + "            augment=lambda batch, seeds: {**batch, 'features': batch['feature']},\n"},
        "in <lambda>: KeyError: 'feature'; batch has cultivar, features; did you mean 'features'?",
    ),
    "NumPy of a symbolic tensor": (
        {SUMS: "return float(losses.numpy().sum()), tf.reduce_sum(weight), {}"},
        f"wine.py line {RETURN}, in loss(): AttributeError: 'SymbolicTensor' object has no attribute 'numpy'; this "
        "function is made into a graph and sees no values: use TensorFlow's operations, not .numpy()",
    ),
    "labels that are no integers": (
        {'cultivar[kept].astype("int32")': 'cultivar[kept].astype("float32")'},
        f"wine.py line {LOSSES}, in loss(): TypeError: Value passed to parameter 'labels' has DataType float32",
    ),
    "a misspelt name of the contract": (
        {"    def model(self):": "    def finish_metric(self, means):\n        return means\n\n    def model(self):"},
        "nothing asks for 'finish_metric'; did you mean 'finish_metrics'? Else call it '_finish_metric'",
    ),
    "loss() without training": (
        {"batch, training)": "batch)", ", training=training": ""},
        IN_LOSS + "loss() is called as loss(model, batch, training), and takes (model, batch)",
    ),
    "a layer's unknown activation": (
        {'"relu"': '"reluu"'},
        "in model(): ValueError: Could not interpret activation function identifier: reluu",
    ),
    "a model that is not returned": ({"return keras.Seq": "keras.Seq"}, "model() must return a keras.Model (Keras 3)"),
    "a model without a shape": ({"keras.Input((13,)), ": ""}, "call model.build(shape) in model()"),
    "an error in data()": (
        {"return_X_y=True": "return_X=True"},
        "in data(): TypeError: got an unexpected keyword argument 'return_X'",
    ),
    "data that is not returned": (
        {DATA: "        RandomAccessData(\n"},
        "it returned None; does it end with a return?",
    ),
    "data that is yielded": ({DATA: "        yield RandomAccessData(\n"}, "it returned builtins.generator"),
    "a tf.data.Dataset": (
        {DATA: "        return tf.data.Dataset.range(3)\n" + DATA},
        "it returned a tf.data.Dataset, whose order cannot be tied to the seed and the step",
    ),
    "arrays that are not wrapped": (
        {"train=ArrayExamples({": "train=({"},
        "RandomAccessData: train must be examples, got dict; wrap it",
    ),
    "labels that are strings": (
        {'cultivar[kept].astype("int32")': "cultivar[kept].astype(str)"},
        f"wine.py line {LOSSES}, in loss(): TypeError: Value passed to parameter 'labels' has DataType string",
    ),
    "an error in __init__": ({"= units\n": "= unit\n"}, "in __init__(): NameError: name 'unit' is not defined"),
    "an error in the optimizer's builder": (
        {
            "@gin.configurable\n": "@gin.configurable\ndef builder():\n    return keras.optimizers.Adam(lr=1)\n\n\n"
            "@gin.configurable\n",
            "@adam\n": "@builder\n",
            "adam.learning_rate = 0.01\n": "",
        },
        "wine.py line 11, in builder(): ValueError: Argument(s) not recognized: {'lr': 1}",
    ),
    "a missing colon": (
        {"def model(self):": "def model(self)"},
        "import wine failed: wine.py line 24: SyntaxError: expected",
    ),
    "a module that is not there": (
        {"import gin\n": "import gin\nimport sklaern\n"},
        "wine.gin line 2: import wine failed: wine.py line 2: ModuleNotFoundError: No module named 'sklaern'",
    ),
    "no import in the recipe": (
        {"import wine\n": "", "Wine": "Wein"},
        "nothing is named 'Wein': wine.py defines it; add 'import wine' to the gin file\n",
    ),
    "no @gin.configurable": (
        {"@gin.configurable\n": "", "Wine": "Wein"},
        "nothing is named 'Wein': wine.py defines it, without @gin.configurable; put that above it\n",
    ),
    "steps and epochs in one file": (
        {"train.steps = 200": "train.steps = 200\ntrain.epochs = 3"},
        "wine.gin line 5: train.steps = 200 and wine.gin line 6: train.epochs = 3 say the same thing: take one away",
    ),
}


# That what is returned is no tuple of sums, and what is data no examples, other cases say.
SAID_BY_OTHERS = ("nothing", "no metrics", "labels that are strings", "data that is yielded")


@pytest.mark.parametrize(
    "mistake",
    repeated_but([one for one in BEFORE_ANYTHING_IS_WRITTEN if one not in SAID_BY_OTHERS], BEFORE_ANYTHING_IS_WRITTEN),
)
def test_a_mistake_is_told_in_one_line_before_anything_is_written(mistake, wine, tmp_path):
    changes, said = BEFORE_ANYTHING_IS_WRITTEN[mistake]
    code, told, _ = wine(changes)
    assert (code, told.count("\n")) == (64, 1), told
    assert told.startswith("error: ")
    assert said in told
    # Not even that where the mistake shows before the run has found its place in the folder.
    assert {path.name for path in tmp_path.glob("out/*")} <= {"attempts.jsonl", "summary.json", "report.html"}


ELSEWHERE = {
    "two replicas": ["--replicas=2"],
    "two replicas of two microbatches": ["--replicas=2", "--gin_param=train.microbatches=2"],
    "XLA": ["--gin_param=train.jit_compile=True"],
    "microbatches under XLA": ["--gin_param=train.microbatches=2", "--gin_param=train.jit_compile=True"],
}
NESTED = [
    pytest.param(name, marks=[] if name == "two replicas of two microbatches" else [pytest.mark.nightly])
    for name in ELSEWHERE
]


@pytest.mark.parametrize("where", NESTED)
@pytest.mark.parametrize(
    "mistake",
    repeated_but(["an unknown key"], ["weight 1 beside means", "an unknown key", "an input of another shape"]),
)
def test_the_line_is_as_short_in_graphs_within_graphs(mistake, where, wine):
    changes, said = BEFORE_ANYTHING_IS_WRITTEN[mistake]
    code, told, _ = wine(changes, *ELSEWHERE[where])
    assert code == 64
    assert said.partition(" for ")[0] in told
    assert told.count("\n") == 1


MEANS = [([], 1), (["--replicas=2", "--gin_param=train.microbatches=2"], 4)]


@pytest.mark.parametrize(("flags", "weight"), repeated_but(MEANS[1:], MEANS))
def test_a_mean_that_only_the_first_step_shows_is_refused_after_it(flags, weight, wine):
    code, told, _ = wine({SUMS: SUMS.replace("sum", "mean")}, *flags)
    assert code == 64
    assert told.startswith(f"error: {IN_LOSS}loss() returned weight {weight} for 32 examples: return sums, not means")


WEIGHTS = {
    "small": "[0.25] * 142",
    "adding up to 1": "[1 / 32] * 142",
    "large": "[1e6] * 142",
    "mostly 0": "[index % 32 == 0 for index in range(142)]",
}


@pytest.mark.parametrize("weights", repeated_but(["adding up to 1"], WEIGHTS))
def test_weights_of_the_users_own_are_no_means(weights, wine):
    own = f'"weight": {WEIGHTS[weights]}, "features": features[kept]'
    code, told, _ = wine({'"features": features[kept]': own}, "--gin_param=train.steps = 2")
    assert (code, told) == (0, "")


@pytest.mark.parametrize("flags", repeated_but([["--replicas=2"]], [[], ["--replicas=2"]]))
def test_a_label_without_an_output_is_told_in_one_line(flags, wine):
    code, told, _ = wine({"Dense(3, ": "Dense(2, "}, *flags)
    assert code == 64
    assert f"wine.py line {LOSSES}, in loss(): InvalidArgumentError: Received a label value of 2 which is out" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("flags", repeated_but([["--replicas=2"]], [[], ["--replicas=2"]]))
def test_a_number_in_the_data_that_is_not_finite_is_named_by_its_example(flags, wine):
    spoiled = STANDARDISED + "        features[17, 3] = float('nan')  # the 14th of those kept for training\n"
    code, _, told = wine({STANDARDISED: spoiled}, "--gin_param=train.steps = 6", *flags)
    assert code == 0
    (note,) = re.findall("step . skipped: .*", told)
    assert "'features' of training example 13 is not finite" in note
    assert "loss scale" not in note


def test_a_loss_that_the_model_makes_infinite_is_not_blamed_on_the_data(wine):
    code, error, told = wine({"losses * weight": "losses * weight / 0.0"}, "--gin_param=train.steps = 2")
    assert code == 70
    assert "all 2 steps were skipped" in error
    assert "step 1 skipped: the loss was not finite; its batch holds no such number" in told


def test_an_error_of_ours_keeps_its_traceback(wine, monkeypatch):
    # Called from our step with what it does not take: a lambda would be a frame of this file, which is a user's.
    monkeypatch.setattr(
        "launcher.step.train_step.gradients.unscale_and_check",
        functools.partial(gradients.unscale_and_check, nonesuch=1),
    )
    code, told, _ = wine({})
    assert code == 70
    assert told.startswith("Traceback (most recent call last):")


def test_the_whole_traceback_of_a_mistake_is_there_for_the_asking(wine, monkeypatch):
    monkeypatch.setenv(user_code.TRACEBACK, "1")
    code, told, _ = wine({'"relu"': '"reluu"'})
    assert code == 64
    assert told.startswith("Traceback (most recent call last):")
    assert "\nerror: wine.py line " in told


@pytest.mark.parametrize(
    ("params", "steps"),
    [
        (["train.epochs = 1"], "4, 0.9 epochs"),
        (["train.epochs = 1", "train.steps = None"], "4, 0.9 epochs"),
        (["train.epochs = None"], "200, 45.1 epochs"),
        (["train.steps = 7"], "7, 1.6 epochs"),
    ],
)
def test_of_steps_and_epochs_the_one_bound_last_counts(params, steps, wine):
    code, _, told = wine({}, "--dry_run", *(f"--gin_param={param}" for param in params))
    assert code == 0
    assert re.search(f"steps +{steps}", told)


@pytest.fixture
def far_away(tmp_path):
    """A folder with the page's files in it, of a training that is short, and a helper that wine.py imports."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "cellar.py").write_text("UNITS = 8\n")
    module = MODULE.replace("import gin\n", "import gin\nfrom cellar import UNITS\n", 1)
    (folder / "wine.py").write_text(module.replace("units: int = 32", "units: int = UNITS"))
    (folder / "wine.gin").write_text(RECIPE.replace("steps = 200", "steps = 4"))
    (tmp_path / "elsewhere").mkdir()
    return folder / "wine.gin", tmp_path / "elsewhere"


VERIFIED = ("replicas = 2", "workers = ()", "microbatches = ()", "steps = 1")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            ["--mode=verify", *(f"--gin_param=verify.{one}" for one in VERIFIED)],
            id="verify",
            marks=pytest.mark.nightly,
        ),
        pytest.param(["--workers=1"], id="launch"),
    ],
)
def test_a_module_beside_the_recipe_is_found_from_another_folder(flags, far_away, run_launcher):
    recipe, elsewhere = far_away
    module = "launcher.launch" if "--workers=1" in flags else "launcher.main"
    finished = run_launcher(f"--gin_file={recipe}", *flags, cwd=elsewhere, module=module)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.nightly  # of one process: above; workers that end together: test_own_files.py
@pytest.mark.heavy
def test_both_workers_refuse_a_mistake_in_the_same_line(wine, run_workers, tmp_path):
    (tmp_path / "wine.py").write_text(MODULE.replace(SUMS, SUMS.replace("sum", "mean")))
    (tmp_path / "wine.gin").write_text(RECIPE)
    workers = run_workers(2, "--gin_file=wine.gin")
    for worker in workers:
        assert worker.returncode == 64, worker.stderr
        assert f"error: {IN_LOSS}loss() returned weight 2 for 32 examples: return sums" in worker.stderr
        assert "Traceback" not in worker.stderr


PROGRAM = """\
import keras, launcher, numpy, tensorflow as tf
from launcher import errors
x = numpy.ones((8, 4), "float32"); y = numpy.arange(8) % 2
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
def none(): model = build()
"""
PROGRAMS = {
    'launcher.fit(build, (x, y.astype("U3")))': (64, "y is text (<U3): give labels as numbers"),
    "launcher.fit(build, data.map(lambda x, y: (x, tf.as_string(y))))": (64, "y is text (string): give labels as"),
    "launcher.fit(build(), x.astype(str), y)": (64, "x is text (<U32): give numbers, or a model that begins with Text"),
    "launcher.fit(build, x, y[:5])": (64, "got {'x': 8, 'y': 5}; what is validated on is given as validation=(x_val"),
    "launcher.fit(build, x, y=y[:5])": (64, "must be of one length, got {'x': 8, 'y': 5}"),
    "launcher.fit(build(), x, y, 32)": (64, "fit: say by its name what 32 is, such as batch_size"),
    "launcher.fit(build, (x, y), epoch=3)": (64, "there is no argument 'epoch'; did you mean 'epochs'?"),
    "launcher.fit(build)": (64, "expected training data as arrays, (x, y) or a tf.data.Dataset, got NoneType"),
    "launcher.fit(build, 'data.csv')": (64, "or a tf.data.Dataset, got str"),
    "launcher.fit(build, (x[:0], y[:0]))": (64, "a data set needs at least one example"),
    "launcher.fit(build, [x, y])": (64, "without any y (data is one tuple, (x, y))"),
    "launcher.fit(build, {'x': x, 'y': y})": (64, "does not take this data, in which x/x is float32 [None, 4]"),
    "launcher.fit(build, (x.astype(object), y))": (64, "expected an array, a data frame or a tensor"),
    "launcher.fit(build, (x, y), validation=(x, y[:3]))": (
        64,
        "validation data: x, y and sample_weight must be of one",
    ),
    "launcher.fit(build, (x, y), validation=(x[:, :2], y))": (64, "in which x is float32 [None, 2]"),
    "launcher.fit(build, (x, y), train=(x, y))": (64, "fit: what to train on is given twice: leave train= out"),
    "launcher.fit(build, (x, y), evaluate_every='epoch')": (64, "train.evaluate_every = 'epoch': must be 0 or more"),
    "launcher.fit(build, (x[:, :3], y))": (64, "does not take this data, in which x is float32 [None, 3]"),
    "launcher.fit(build, (x * numpy.nan, y))": (70, "all 1 steps were skipped"),
    "launcher.fit(build, (x, y), optimizer='adam')": (64, "train.optimizer = 'adam': expected a reference"),
    "launcher.fit(build, (x, y), metrics=['mae'])": (64, "there is no argument 'metrics'; did you mean 'best_metric'"),
    "launcher.fit(build, (x, y), loss='mse')": (64, "there is no argument 'loss'; known: attention"),
    "launcher.fit(build, (x, y), sample_weight=x[:3, 0])": (64, "must be of one length, got {'x/0': 8, 'x/1': 8,"),
    "launcher.fit(build, (x, y), initial_epoch=5, epochs=2)": (64, "no epoch lies between them"),
    "launcher.fit(build, (x, y), validation_data=x)": (64, "without any y (data is one tuple, (x, y))"),
    "launcher.fit(build, data.repeat())": (64, "the training dataset is endless: say how many batches"),
    "launcher.fit(build, data.take(0))": (64, "error: the training dataset is empty"),
    "launcher.fit(build, iter([(x, y)]))": (64, "does not say how many batches it has: say so with steps_per_epoch"),
    "launcher.fit(build, (x, y), model_dir='/proc/run')": (64, "lease.json cannot be written there"),
    "launcher.fit(build, (x, y), batch_size=0)": (64, "fit: batch_size = 0: must be a whole number above 0"),
    "launcher.fit(build, (x, y), batch_size='8')": (64, "fit: batch_size = '8': must be a whole number above 0"),
    "launcher.fit(build, (x, y), epochs='3')": (64, "fit: epochs = '3': must be a number above 0"),
    "launcher.fit(build, (x, y), epochs=-1)": (64, "train.epochs = -1: must be more than 0"),
    "launcher.fit(build, (x, y), strategy=3)": (64, "fit: strategy = 3: must be a name or a tf.distribute.Strategy"),
    "launcher.fit(build, (x, y), strategy='mirorred')": (64, "strategy 'mirorred' is not one of auto, one_device"),
    "launcher.fit(build, (x, y), replicas=0)": (64, "--replicas=0: must be 1 or more"),
    "launcher.fit(build, (x, y), workers=0)": (64, "workers=0 must be a whole number, 1 or more"),
    "launcher.fit(build, (x, y), model_dir=3)": (64, "fit: model_dir = 3: must be the path of a folder"),
    "launcher.fit(build, (x, y), model_dir='')": (64, "fit: model_dir = '': must be the path of a folder"),
    "launcher.fit(build, (x, y), class_weight=[1, 2])": (64, "fit: class_weight = [1, 2]: must be a dict such as"),
    "launcher.fit(build, (x, y), clipping=1.0)": (64, "fit: clipping = 1.0: must be a dict of settings"),
    "launcher.fit(build, (x, y), clipping={'norm': 1})": (64, "unexpected keyword argument 'norm'"),
    "launcher.fit(build, (x, y), precision='fp16')": (64, "expected 'auto' or one of float32, mixed_float16"),
    "launcher.fit(build, (x, y), verbose=7)": (64, "verbose = 7: must be 0 (show nothing), 1, 2 or 'auto'"),
    "launcher.fit(build, (x, y), steps_per_epoch=0)": (64, "fit: steps_per_epoch = 0: must be a whole number above 0"),
    "launcher.fit(build, (x, y), shuffle='yes')": (64, "fit: shuffle = 'yes': must be True or False"),
    "launcher.fit(build, (x, y), jit_compile='yes')": (64, "fit: jit_compile = 'yes': expected bool, got str"),
    "launcher.fit(build, (x, y), validation_split=2)": (64, "validation_split = 2 of 8 examples: must leave some"),
    "launcher.fit(build, (x, y), callbacks='early')": (64, "callbacks: 'early' is not a keras.callbacks.Callback"),
    "launcher.fit(build, (x, y), seed='a')": (64, "fit: seed = 'a': must be a whole number"),
    "launcher.fit(build, (x, y), log_every=0)": (64, "train.log_every = 0: must be 1 or more"),
    "launcher.fit(build, (x, y + 5))": (64, "and the model has outputs for 0 to 1: give it more outputs"),
    "launcher.fit(keras.Sequential, (x, y))": (64, "the model is not compiled; call model.compile"),
    "launcher.fti(build, (x, y))": (1, "module 'launcher' has no attribute 'fti'"),
    "launcher.fit(none, (x, y))": (64, "must return a keras.Model, returned NoneType"),
    "launcher.fit(none.nonesuch, (x, y))": (1, "AttributeError: 'function' object has no attribute 'nonesuch'"),
    "launcher.fit(lambda: 1 / 0, (x, y))": (64, "in <lambda>: ZeroDivisionError: division by zero"),
    "launcher.fit(build, x, y, strategy=tf.distribute.MirroredStrategy(['GPU:6', 'GPU:7']))": (
        64,
        "the MirroredStrategy that was given is of GPU:6, GPU:7; TensorFlow finds CPU:0",
    ),
    "launcher.fit(build, x, y, strategy=tf.distribute.OneDeviceStrategy('GPU:3'))": (64, "is of GPU:3; TensorFlow"),
    "launcher.fit(build, x, y, model_dir='gs://bucket/run')": (64, "--model_dir=gs://bucket/run: a run needs a file"),
    "launcher.load('nonesuch')": (64, "launcher.load: there is no folder"),
    "raise errors.TrainingError('not finite')": (70, "error: not finite"),
    "raise errors.PeerError('worker 1 is gone')": (75, "error: worker 1 is gone"),
    "raise errors.Preempted('saved')": (42, "error: saved"),
    "raise errors.Interrupted('saved')": (42, "error: saved"),
    "raise ValueError('my own')": (1, "ValueError: my own"),
}


def test_a_program_ends_on_a_mistake_with_one_message_and_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for line, (code, said) in PROGRAMS.items():
        (tmp_path / "program.py").write_text(f"{PROGRAM}launcher.fit\n{line}\n")
        found = 1
        try:
            runpy.run_path("program.py", run_name="__main__")
        except BaseException as error:
            try:
                sys.excepthook(type(error), error, error.__traceback__)
            except SystemExit as end:
                found = end.code
        told = capsys.readouterr().err
        assert (found, said in told) == (code, True), (line, told)
        assert ("Traceback" in told, told.count("\n") == 1) == (code == 1, code != 1), told


def test_python_ends_such_a_program_so_after_what_runs_at_its_end(tmp_path):
    program = """
import atexit
from launcher.errors import UsageError, excepthook
atexit.register(print, "at the end")
excepthook.install()
raise UsageError("why")
"""
    command, env = [sys.executable, "-c", program], {"PYTHONPATH": PYTHONPATH}
    ended = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (64, "at the end\n", "error: why\n")


def test_a_flag_of_the_supervisor_is_told_with_the_line_that_starts_it(capsys):
    assert entry.main(["launcher", "--workers=2", "--gin_file=digits_cpu.gin", "--gin_param=train.steps = 3"]) == 64
    line = "-m launcher.launch --workers=2 --gin_file=digits_cpu.gin '--gin_param=train.steps = 3'\n"
    assert capsys.readouterr().err.endswith(line)
