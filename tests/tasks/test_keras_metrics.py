"""What `launcher.fit` reports of losses and metrics is what Keras's `fit` reports, on one replica and on two.

Keras on one device is the oracle. The last batch is short, in training and in validation, so that what fills it up, and
a replica without examples, would show.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from keras import layers, ops
from oracle import eager

import launcher
from launcher.errors import TrainingError, UsageError
from launcher.machine import versions

pytestmark = pytest.mark.slow

_random = np.random.default_rng(0)
X = _random.normal(size=(39, 6)).astype(np.float32)
Y = (X @ _random.normal(size=(6, 1)) + _random.normal(size=(39, 1))).astype(np.float32)
LABEL = (Y[:, 0] > 0).astype(np.int32)
WEIGHT = _random.uniform(0.5, 2.0, 39).astype(np.float32)
HELD_OUT = slice(0, 21)


class Own(keras.metrics.Metric):
    """A metric with one state, from what a batch gives, that takes no weights and is shown as it is."""

    def __init__(self, name, update, initial="zeros", is_variable=False):
        super().__init__(name=name)
        self.state = self.add_variable(shape=(), initializer=initial, name="state")
        self.update, self.is_variable = update, is_variable

    def update_state(self, y_true, y_pred, sample_weight=None):
        assert sample_weight is None
        self.state.assign(self.update(self.state, y_true, y_pred))

    def result(self):
        return self.state if self.is_variable else self.state * 1.0


def hits(state, y_true, y_pred):
    return state + ops.sum(ops.cast(ops.logical_and(y_true > 0, y_pred > 0), "float32"))


def root_mean_square(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


class AddsLoss(layers.Layer):
    """And has metrics of its own, one of its own kind."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")
        self.above = Own("above", lambda state, _, x: state + ops.sum(ops.cast(x > 0, "float32")))

    def call(self, x):
        self.add_loss(0.5 * ops.mean(ops.sum(ops.square(x), -1)))
        self.seen.update_state(x)
        self.above.update_state(None, x)
        return x


class AddsLosses(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(x), -1, keepdims=True))
        return x


class Overrides(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mine = keras.metrics.MeanAbsoluteError(name="mine")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.mine.update_state(y, y_pred)
        return results | {"mine": self.mine.result(), "twice": 2 * self.mine.result()}


class AnswersWhenTested(keras.Model):
    """Has an output and a metric that training has not."""

    def __init__(self):
        super().__init__()
        self.line = layers.Dense(1)
        self.off, self.tested = keras.metrics.MeanAbsoluteError(name="off"), keras.metrics.Mean(name="tested")

    def call(self, x, training=False):
        found = {"line": self.line(x)}
        return found if training else found | {"answer": ops.abs(found["line"])}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred["line"] - y))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.off.update_state(y, y_pred["line"])
        if "answer" in y_pred:
            self.tested.update_state(y_pred["answer"])
            return self.get_metrics_result()
        found = self.get_metrics_result()
        found.pop("tested")
        return found


def answers_when_tested():
    model = AnswersWhenTested()
    model.compile(keras.optimizers.SGD(0.05))
    return model


class TwoOutputs(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return results | {"ratio": results["a_loss"] / results["b_loss"]}


class ReturnsOfBatch(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"error": ops.mean(ops.abs(y - y_pred))}


def regression(kind=keras.Model, adds_loss=None, **compiled):
    inputs = keras.Input((6,))
    penalty = None if adds_loss is AddsLosses else keras.regularizers.L2(1e-2)  # then all that is added has rows
    hidden = layers.Dense(5, activation="tanh", kernel_regularizer=penalty)(inputs)
    model = kind(inputs, layers.Dense(1)(adds_loss()(hidden) if adds_loss else hidden))
    model.compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse"} | compiled)
    return model


ALONG_BATCH = [
    getattr(keras.metrics, name)
    for name in ("CosineSimilarity", "PearsonCorrelation", "ConcordanceCorrelation")
    if hasattr(keras.metrics, name)
]


def of_own_metrics():
    return regression(
        metrics=[
            Own("hits", hits),
            Own("hits_variable", hits, is_variable=True),
            Own("largest", lambda state, y, found: ops.maximum(state, ops.max(ops.abs(y - found)))),
            Own("smallest", lambda state, y, found: ops.minimum(state, ops.min(found)), keras.initializers.Constant(9)),
            Own("batches", lambda state, y, found: state + 1),
            root_mean_square,
            keras.metrics.R2Score(),
            keras.losses.MeanAbsoluteError(name="off"),  # one number a batch, too, which Keras would scale
            *(along(axis=0) for along in ALONG_BATCH),
        ],
        loss=lambda y, found: ops.mean(ops.square(y - found)),  # one number a batch
    )


def of_two_outputs():
    inputs = keras.Input((6,))
    model = TwoOutputs(inputs, {name: layers.Dense(1, name=name)(inputs) for name in "ab"})
    model.compile(keras.optimizers.SGD(0.05), {"a": "mse", "b": "mae"}, metrics={"a": [root_mean_square]})
    return model


def of_two_classes():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def held_out(*arrays):
    return tuple(array[HELD_OUT] for array in arrays)


CASES = {
    "metrics of one's own": (of_own_metrics, (X, Y), held_out(X, Y), {}),
    "add_loss": (lambda: regression(adds_loss=AddsLoss, metrics=[root_mean_square]), (X, Y), held_out(X, Y), {}),
    "add_loss alone": (lambda: regression(adds_loss=AddsLoss, loss=None), (X, Y), held_out(X, Y), {}),
    "add_loss of each example": (lambda: regression(adds_loss=AddsLosses), (X, Y), held_out(X, Y), {}),
    "weights in validation": (
        lambda: regression(weighted_metrics=["mae"]),
        (X, Y),
        held_out(X, Y, WEIGHT),
        {},
    ),
    "weights in training": (lambda: regression(weighted_metrics=["mae"]), (X, Y, WEIGHT), held_out(X, Y), {}),
    "class weights": (
        of_two_classes,
        (X, LABEL),
        held_out(X, LABEL, WEIGHT),
        {"class_weight": {0: 3.0, 1: 0.5}},
    ),
    "compute_metrics, of what tests have": (answers_when_tested, (X, Y), held_out(X, Y), {}),
    "compute_metrics": (lambda: regression(Overrides, metrics=["mae"]), (X, Y), held_out(X, Y), {}),
}


def of_keras(build, train, validation, **arguments):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    x, y, *weight = train
    settings = {"validation_data": validation, "epochs": 2, "batch_size": 16, "shuffle": False, "verbose": 0}
    return eager(build()).fit(x, y, sample_weight=weight[0] if weight else None, **settings | arguments).history


def strategy_of(replicas):
    if replicas == 1:
        return tf.distribute.OneDeviceStrategy("CPU:0")
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


def of_launcher(build, train, validation, folder, replicas=2, **arguments):
    settings = {"epochs": 2, "batch_size": 16, "shuffle": False, "strategy": strategy_of(replicas)}
    return launcher.fit(build, train, validation, model_dir=str(folder), **settings | arguments).history


# The last two, two workers report in test_keras_metrics_workers.py.
SAID_BY_OTHERS = ("add_loss", "add_loss alone", "weights in training", "metrics of one's own", "class weights")


@pytest.mark.parametrize(
    ("name", "replicas"),
    repeated_but(
        [("add_loss", 1), *((name, 2) for name in CASES if name not in SAID_BY_OTHERS)],
        [(name, replicas) for name in CASES for replicas in (1, 2)],
    ),
)
def test_it_reports_what_keras_does(name, replicas, tmp_path):
    build, train, validation, arguments = CASES[name]
    expected = of_keras(build, train, validation, **arguments)
    found = of_launcher(build, train, validation, tmp_path, replicas, **arguments)
    assert found.keys() == expected.keys()
    if "hits_variable" in expected:  # of which Keras shows, after an epoch, what it is worth after the validation
        expected["hits_variable"] = expected["hits"]
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
def test_add_loss_beside_batch_normalization_sees_the_real_rows_of_a_validation(replicas, tmp_path):
    def build():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(1)(AddsLoss()(layers.BatchNormalization()(inputs))))
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    train = X[:32], Y[:32]  # whole batches
    expected = of_keras(build, train, held_out(X, Y))["val_loss"]
    found = of_launcher(build, train, held_out(X, Y), tmp_path, replicas)["val_loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_loss_of_each_example_is_a_sum_of_the_whole_batch_also_under_xla_and_has_no_microbatches(tmp_path):
    build, train, validation, _ = CASES["add_loss of each example"]
    expected = of_keras(build, train, validation)
    found = of_launcher(build, train, validation, tmp_path / "xla", 1, jit_compile=True)
    np.testing.assert_allclose(found["val_loss"], expected["val_loss"], rtol=1e-5)
    with pytest.raises(launcher.errors.UsageError, match="value for each example"):
        of_launcher(build, train, validation, tmp_path / "parts", 1, microbatches=2)


def test_xla_counts_nothing_that_fills_up_a_batch(tmp_path):
    build, train, validation, arguments = CASES["class weights"]
    expected = of_keras(build, train, validation, **arguments)
    found = of_launcher(build, train, validation, tmp_path, jit_compile=True, **arguments)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-5, err_msg=key)


@pytest.mark.skipif(
    versions.of(keras.__version__) < (3, 13), reason="its results are Python's numbers, which this program divides by 0"
)
def test_the_losses_of_single_outputs_stand_beside_metrics_that_take_whole_batches(tmp_path):
    arguments = (X[:32], {"a": Y[:32], "b": Y[:32]})
    expected = of_keras(of_two_outputs, arguments, None)
    found = of_launcher(of_two_outputs, arguments, None, tmp_path)
    for key in ("a_loss", "b_loss", "a_root_mean_square", "loss"):
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, err_msg=key)


def test_a_number_of_one_batch_is_shown_as_the_mean_over_all_examples(tmp_path):
    def build():
        return regression(ReturnsOfBatch, metrics=["mae"])

    found = of_launcher(build, (X, Y), held_out(X, Y), tmp_path)
    for key in ("", "val_"):
        np.testing.assert_allclose(found[f"{key}error"], found[f"{key}mae"], rtol=1e-5)


@pytest.mark.parametrize(
    ("metric", "arguments", "message"),
    [
        (Own("last", lambda state, y, found: ops.mean(found)), {}, "metric 'last' keeps 'state', which is no sum, max"),
        (
            root_mean_square,
            {"microbatches": 2},
            "'root_mean_square' does not add up over the rows of a batch.*it is 2",
        ),
        (
            keras.metrics.CosineSimilarity(axis=0),
            {"microbatches": 2},
            "'cosine_similarity' does not add up over the rows",
        ),
        (root_mean_square, {"jit_compile": True}, "'root_mean_square' counts rows of weight 0"),
        (ReturnsOfBatch, {"jit_compile": True}, "'error' counts rows of weight 0"),
        (keras.metrics.R2Score(), {"jit_compile": True}, "'r2_score' counts rows of weight 0"),
        (keras.metrics.MeanAbsoluteError(name="fine"), {"microbatches": 2, "jit_compile": True}, None),
    ],
)
def test_a_metric_that_cannot_be_right_is_refused_by_name(metric, arguments, message, tmp_path):
    def train():
        copy = Own(metric.name, metric.update) if isinstance(metric, Own) else metric
        kind, metrics = (metric, []) if metric is ReturnsOfBatch else (keras.Model, [copy])
        return of_launcher(lambda: regression(kind, metrics=metrics), (X, Y), None, tmp_path / "run", **arguments)

    if message is None:
        np.testing.assert_allclose(train()["fine"], of_keras(lambda: regression(metrics=["mae"]), (X, Y), None)["mae"])
        return
    with pytest.raises(UsageError, match=message):
        train()
    assert not (tmp_path / "run").exists()


def test_a_run_whose_every_step_was_skipped_has_failed(tmp_path):
    missing = np.full_like(X, np.nan)
    for _ in range(2):  # also when the same call is made again
        with pytest.raises(TrainingError, match="all 6 steps were skipped"):
            of_launcher(regression, (missing, Y), None, tmp_path, replicas=1)


def test_a_program_that_python_runs_sets_devices_up_before_its_functions_make_data(run_launcher, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import keras, numpy, tensorflow as tf, launcher\n"
        "def data():\n"
        "    x = numpy.ones((16, 4), 'float32')\n"
        "    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(16).batch(8)\n"
        "def build():\n"
        "    model = keras.Sequential([keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model\n"
        "for folder in ('a', 'b'):\n"
        "    model = launcher.fit(build, data, data, replicas=2, model_dir=folder).model\n"
        "    print('replicas', model.distribute_strategy.num_replicas_in_sync)\n"
    )
    done = run_launcher(module="program", cwd=tmp_path)
    assert done.stdout.count("replicas 2") == 2, done.stderr
