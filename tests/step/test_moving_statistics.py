"""Which variables a forward pass assigns, and that only those travel and are averaged beside the trained weights."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from graph_walk import collectives
from small_run import GivenTask, build, linear_batches, train

from launcher.checkpoints import CheckpointStore
from launcher.models.normalization import BatchNormalization
from launcher.run.start import starting_point
from launcher.step import statistics

pytestmark = pytest.mark.slow

BATCH, FEATURES = 8, 3


class Counting(keras.layers.Layer):
    """Passes its input through; `assign(variable)` is how it counts, in a number that is not trained."""

    def __init__(self, assign, dtype="float32", **options):
        super().__init__(**options)
        self.assign_one = assign
        self.seen = self.add_weight(name="seen", shape=(), dtype=dtype, initializer="zeros", trainable=False)
        self.unmoved = self.add_weight(name="unmoved", shape=(), initializer="ones", trainable=False)

    def call(self, inputs):
        self.assign_one(self.seen)
        return inputs * self.unmoved


def one_more(variable):
    variable.assign(variable + tf.cast(1, variable.dtype))


def in_a_loop(variable):
    tf.while_loop(lambda i: i < 2, lambda i: (one_more(variable), i + 1)[1:], [tf.constant(0)])


def in_a_branch(variable):
    tf.cond(tf.random.stateless_uniform([], [1, 2]) < 2.0, lambda: one_more(variable), lambda: None)


def in_functions(variable):
    tf.function(lambda: tf.function(lambda: in_a_loop(variable))())()


def only_read(variable):
    tf.function(lambda: tf.while_loop(lambda i: i < variable, lambda i: (i + 1.0,), [tf.constant(0.0)]))()


def frozen(layer):
    layer.trainable = False
    return layer


NORM = {"norm/moving_mean", "norm/moving_variance"}
MODELS = {
    "frozen weights": (lambda x: frozen(keras.layers.Dense(FEATURES))(x), set()),
    "Keras's normalisation": (lambda x: keras.layers.BatchNormalization(name="norm")(x), NORM),
    "frozen normalisation": (lambda x: frozen(keras.layers.BatchNormalization(name="norm"))(x), set()),
    "ours": (lambda x: BatchNormalization(name="norm")(x), NORM),
    "ours, synchronized": (lambda x: BatchNormalization(name="norm", synchronized=True)(x), NORM),
    "ours, frozen": (lambda x: frozen(BatchNormalization(name="norm"))(x), set()),
    "straight": (lambda x: Counting(one_more, name="layer")(x), {"layer/seen"}),
    "a count": (lambda x: Counting(one_more, dtype="int64", name="layer")(x), {"layer/seen"}),
    "loop": (lambda x: Counting(in_a_loop, name="layer")(x), {"layer/seen"}),
    "branch": (lambda x: Counting(in_a_branch, name="layer")(x), {"layer/seen"}),
    "functions": (lambda x: Counting(in_functions, name="layer")(x), {"layer/seen"}),
    "only read": (lambda x: Counting(only_read, name="layer")(x), set()),
    "dropout, whose seed is no statistic": (lambda x: keras.layers.Dropout(0.5)(x), set()),
}


def model_of(first):
    def model():
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, keras.layers.Dense(1, name="head")(first(inputs)))

    return model


def first_output(model, batch, training):
    outputs = tf.cast(model(batch["x"], training=training), tf.float32)[:, 0]
    return -tf.reduce_sum(outputs * batch["weight"]), tf.reduce_sum(batch["weight"]), {}


def task_of(first, loss=first_output):
    return GivenTask(linear_batches(np.random.default_rng(0).normal(size=(4, BATCH, FEATURES))), model_of(first), loss)


BY_DEFAULT = ("frozen normalisation", "ours, synchronized", "a count", "loop", "branch", "functions", "only read")
ON_TWO = ("ours, synchronized", "a count")  # the others are found in a graph, which is that of one replica


@pytest.mark.parametrize(
    ("name", "replicas"),
    repeated_but(
        [(name, 1 + (name in ON_TWO)) for name in BY_DEFAULT],
        [(name, replicas) for name in MODELS for replicas in (1, 2)],
    ),
)
def test_a_statistic_is_what_a_training_forward_pass_assigns(name, replicas):
    first, expected = MODELS[name]
    made = build(task_of(first), replicas)
    untrained = made.model.non_trainable_weights  # the states of seed generators are not among them
    before = {variable.path: variable.numpy() for variable in untrained}
    assert {variable.path for variable in made.trainer.statistics} == expected
    train(made, 2)
    moved = {variable.path for variable in untrained if not np.array_equal(variable.numpy(), before[variable.path])}
    assert moved == expected


def test_what_layers_of_keras_assign_is_known_without_a_trace_and_of_others_nothing_is():
    for name in (
        "frozen weights",
        "Keras's normalisation",
        "frozen normalisation",
        "dropout, whose seed is no statistic",
    ):
        first, expected = MODELS[name]
        found = statistics.of_keras(model_of(first)())
        assert {variable.path for variable in found} == expected, name
    spectral = lambda x: frozen(keras.layers.SpectralNormalization(keras.layers.Dense(FEATURES)))(x)  # noqa: E731
    custom = lambda x: keras.layers.Lambda(lambda x: x)(frozen(keras.layers.Dense(FEATURES))(x))  # noqa: E731
    for first in (MODELS["a count"][0], MODELS["ours"][0], spectral, custom):
        assert statistics.of_keras(model_of(first)()) is None


def test_all_candidates_count_where_the_loss_cannot_be_traced_beforehand():
    made = build(task_of(MODELS["frozen weights"][0]))

    def no_batches():
        raise OSError("the data are elsewhere")

    found = statistics.assigned(made.plan.recipe.task, made.model, no_batches)
    assert [variable.name for variable in found] == ["kernel", "bias"]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_frozen_weights_stay_at_home(microbatches):
    made = build(task_of(lambda x: frozen(keras.layers.Dense(FEATURES, name="wide"))(x)), 2, microbatches)
    found = collectives(
        made.trainer._loop.run.get_concrete_function(made.trainer.batches(made.plan.data), tf.constant(1))
    )
    # The head's three weights and its bias, the loss and the weight of the batch.
    assert sum(one.elements for one in found) == FEATURES + 1 + 2


# ------------------------------------------------------------------------------------------------- averages of the rest


def averaged(first, **recipe):
    return build(task_of(first), ema_decay=0.5, **recipe)


def frozen_and_norm(x):
    return MODELS["ours"][0](frozen(keras.layers.Dense(FEATURES, name="wide"))(x))


def saved(made, state, path):
    store = CheckpointStore(str(path))
    store.save(made.trainer.step, state)
    return store


def test_the_average_has_trained_weights_and_statistics_and_no_frozen_weights():
    names = {name for name in averaged(frozen_and_norm).trainer.state.variables() if name.startswith("ema/")}
    assert names == {f"ema/{path}" for path in ("norm/gamma", "norm/beta", *NORM, "head/kernel", "head/bias")}


def test_a_checkpoint_with_averages_of_frozen_weights_is_gone_on_from(tmp_path):
    made = averaged(frozen_and_norm)
    train(made, 2)
    state = made.trainer.state.snapshot()
    store = saved(made, {**state, "ema/wide/kernel": state["model/wide/kernel"]}, tmp_path)
    again = averaged(frozen_and_norm)
    starting_point.restore(store, again.trainer, same_order=False)
    for name, value in again.trainer.state.snapshot().items():
        np.testing.assert_array_equal(value, state[name], err_msg=name)


def test_the_average_of_a_statistic_that_was_frozen_before_starts_at_the_statistic(tmp_path):
    made = averaged(frozen_and_norm)
    train(made, 2)
    state = made.trainer.state.snapshot()
    store = saved(made, {name: value for name, value in state.items() if name != "ema/norm/moving_mean"}, tmp_path)
    again = averaged(frozen_and_norm)
    starting_point.restore(store, again.trainer, same_order=False)
    found = again.trainer.state.snapshot()
    np.testing.assert_array_equal(found["ema/norm/moving_mean"], state["model/norm/moving_mean"])
    assert not np.array_equal(found["ema/norm/moving_mean"], state["ema/norm/moving_mean"])
