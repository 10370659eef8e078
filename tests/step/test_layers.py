"""One walk over a model's layers: what users put into blocks of their own is found wherever layers are asked for."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
from small_run import policies_of

from launcher import main
from launcher.config import gin_bindings
from launcher.step.layers import owners, turn_off_dropout, walk
from launcher.step.regularization import Penalty
from launcher.watch import gradient_taps


class Block(keras.layers.Layer):
    """Holds layers in an attribute, a list in a tuple, a dict, and inside a model."""

    def __init__(self, name="block"):
        super().__init__(name=name)
        self.first = keras.layers.Dense(4, name="first")
        self.act = keras.layers.ReLU(name="act")
        self.pairs = ([keras.layers.Dense(4, name="pair")],)
        self.by_name = {"named": keras.layers.Dense(4, name="named"), "drop": keras.layers.Dropout(0.5, name="drop")}
        self.inner = keras.Sequential([keras.layers.Dense(4, name="deep")], name="inner")

    def build(self, input_shape):
        for layer in (self.first, self.pairs[0][0], self.by_name["named"], self.inner):
            layer.build(input_shape)

    def compute_output_shape(self, input_shape):
        return input_shape

    def call(self, values, training=False):
        values = self.act(self.first(values))
        return self.inner(self.by_name["drop"](self.by_name["named"](self.pairs[0][0](values)), training=training))


def blocks() -> keras.Model:
    """A block as it is, shared by two places, and in a wrapper, with a recurrent layer behind them."""
    keras.utils.clear_session()  # or names count up from those of other tests
    start = keras.Input((3, 4))
    shared = Block("shared")
    values = shared(shared(start))
    values = keras.layers.TimeDistributed(Block("each"), name="steps")(values)
    values = keras.layers.Bidirectional(keras.layers.LSTM(2), name="both")(values)
    return keras.Model(start, keras.layers.Dense(1, name="last")(values), name="net")


INSIDE = ("first", "act", "pair", "named", "drop", "inner", "inner/deep")


def test_every_layer_is_found_once_after_those_around_it():
    found = {
        one.path: "/".join(layer.name for layer in one.around)
        for one in walk(blocks())
        if not isinstance(one.layer, keras.layers.InputLayer)
    }
    assert set(found) == {
        "net",
        *("shared", *(f"shared/{name}" for name in INSIDE)),
        *("steps", "steps/each", *(f"steps/each/{name}" for name in INSIDE)),
        *("both", "both/forward_lstm", "both/forward_lstm/lstm_cell", "both/backward_lstm"),
        "both/backward_lstm/lstm_cell",
        "last",
    }
    assert found["steps/each/inner/deep"] == "net/steps/each/inner"
    assert next(iter(found)) == "net"


def test_every_weight_belongs_to_the_innermost_layer_around_it():
    model = blocks()
    found = {variable.path: owners(model)[id(variable)].path for variable in model.trainable_variables}
    assert found == {path: path.rpartition("/")[0] for path in found}


def test_a_weight_that_two_layers_share_belongs_to_the_first():
    class Tied(keras.layers.Layer):
        def __init__(self, embedding):
            super().__init__()
            self.table = embedding.embeddings

        def call(self, values):
            return keras.ops.matmul(values, keras.ops.transpose(self.table))

    start = keras.Input((3,), dtype="int32")
    embedding = keras.layers.Embedding(5, 2, name="words")
    values = embedding(start)
    model = keras.Model(start, Tied(embedding)(values))
    assert [one.path for one in owners(model).values()] == ["words"]
    found = Penalty(l2={"Embedding": 0.5})(model)
    np.testing.assert_allclose(found, 0.5 * np.sum(embedding.embeddings.numpy() ** 2), rtol=1e-6)


def test_policies_taps_and_dropout_find_the_same_layers():
    model = blocks()
    inside = {f"shared/{name}" for name in INSIDE}
    assert inside <= set(policies_of(model))
    assert inside - {"shared/inner"} <= set(gradient_taps.named_leaves(model))
    turn_off_dropout(model)
    rates = [one.layer.rate for one in walk(model) if isinstance(one.layer, keras.layers.Dropout)]
    assert rates == [0.0, 0.0]


def test_a_penalty_counts_each_kernel_once_by_the_innermost_type_that_is_named():
    model = blocks()
    squares = {
        path: np.sum(variable.numpy() ** 2)
        for variable in model.trainable_variables
        if (path := variable.path).endswith("/kernel")
    }
    dense = sum(value for path, value in squares.items() if "lstm" not in path)
    cells = sum(value for path, value in squares.items() if "lstm" in path)
    last = squares["last/kernel"]
    np.testing.assert_allclose(Penalty(l2={"Dense": 0.1})(model), 0.1 * dense, rtol=1e-6)
    np.testing.assert_allclose(Penalty(l2={"Block": 0.1})(model), 0.1 * (dense - last), rtol=1e-6)
    both = Penalty(l2={"Block": 0.1, "Dense": 0.2, "LSTM": 0.3})
    np.testing.assert_allclose(both(model), 0.2 * dense + 0.3 * cells, rtol=1e-6)
    Penalty(l2={"Dense": 1.0, "LSTM": 1.0, "LSTMCell": 1.0, "Block": 1.0}).check(model)


MODULE = """
import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.data.pipeline import ArrayExamples, RandomAccessData
from launcher.models.normalization import BatchNormalization


class Block(keras.layers.Layer):
    def __init__(self, group_size):
        super().__init__()
        self.dense = keras.layers.Dense(3, kernel_initializer=keras.initializers.Constant(0.5))
        self.parts = [BatchNormalization(group_size=group_size, name="inner_norm")]

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.parts[0].build((None, 3))

    def call(self, values, training=False):
        return self.parts[0](self.dense(values), training=training)


@gin.configurable
class Nested:
    def __init__(self, group_size: int = 4):
        self.group_size = group_size

    def data(self):
        examples = ArrayExamples({"x": np.ones([8, 2], "float32")})
        return RandomAccessData(train=examples, evaluation=examples)

    def model(self):
        last = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.25))
        return keras.Sequential([keras.Input((2,)), Block(self.group_size), last])

    def loss(self, model, batch, training):
        outputs, weight = model(batch["x"], training=training), tf.reduce_sum(batch["weight"])
        return 0.0 * tf.reduce_sum(outputs), weight, {}
"""

BINDINGS = ("train.task = @Nested()", "train.optimizer = @momentum", "train.steps = 1", "train.global_batch_size = 8")


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """launch(*bindings): trains the module's task in this process; the exit code and all it printed."""
    (tmp_path / "nested_layers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*bindings: str) -> tuple[int, str]:
        gin_bindings.reset()
        (tmp_path / "nested.gin").write_text("\n".join(["import nested_layers", *BINDINGS, *bindings]))
        code = main.main(["launcher", "--gin_file=nested.gin", "--model_dir=out"])
        return code, "".join(capsys.readouterr())

    return run


def test_the_reported_loss_has_the_penalty_of_a_users_block(launch, tmp_path):
    code, printed = launch("train.penalty = @penalty()", "penalty.l2 = {'Dense': 0.5}", "momentum.learning_rate = 0.1")
    assert code == 0, printed
    expected = 0.5 * (2 * 3 * 0.5**2 + 3 * 0.25**2)
    first = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[0])
    np.testing.assert_allclose(first["loss"], expected, rtol=1e-6)


def test_an_impossible_group_inside_a_users_block_is_one_message(launch):
    code, printed = launch("Nested.group_size = 5", "momentum.learning_rate = 0.1")
    assert code == 64
    assert "layer 'inner_norm' takes its statistics over groups of 5 examples, which does not divide the 8" in printed
    assert "Traceback" not in printed
