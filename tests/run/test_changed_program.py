"""A program that has changed is told from the one that left the folder; what is the same, in other words, is not."""

from __future__ import annotations

import shutil
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import launcher
from launcher.errors import UsageError
from launcher.run.start import program_record
from launcher.run.start.value_text import text_of

rng = np.random.default_rng(0)
X = rng.normal(size=(16, 4)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")

LOSS = """
import tensorflow as tf
FACTOR, WEIGHTS, seen, calls = {factor}, [1.0, {second}], [], {{"n": 0}}
def part(value):
    calls["n"] += 1
    return tf.square(value) * {inner}
def make(alpha):
    def loss(y, p):
        '''{words}'''
        seen.append(1)
        return tf.reduce_mean(part(y - p) * FACTOR * alpha * WEIGHTS[1], -1)
    return loss
loss = make({alpha})
class Layer:
    scale, made = {scale}, 0
    def __init__(self, size=1):
        self.size = size
        Layer.made += 1
    def call(self, x):
        return loss(x, x) * self.scale
"""
SAME = {"factor": 2.0, "second": 3.0, "inner": 4.0, "alpha": 5.0, "scale": 6.0, "words": "one"}


def module(**changes):
    """The module anew, as a process or a cell that runs it again has it."""
    made = types.ModuleType("__main__")
    exec(compile(changes.pop("above", "") + LOSS.format(**SAME | changes), "program.py", "exec"), vars(made))
    return made


def test_code_is_the_same_on_other_lines_and_another_with_any_constant_that_it_reaches():
    first, again = module(), module(above="\n\n# moved\n", words="two")
    again.seen.append(1)
    again.calls["n"], again.Layer.made = 3, 3
    for name in ("loss", "Layer"):
        assert text_of(vars(first)[name]) == text_of(vars(again)[name]) != name
        for changed in ("factor", "second", "inner", "alpha"):
            assert text_of(vars(module(**{changed: 7.0}))[name]) != text_of(vars(first)[name]), changed
    assert text_of(module(scale=7.0).Layer) != text_of(first.Layer)
    assert text_of(first.Layer(2)) == text_of(again.Layer(2)) != text_of(again.Layer(3))


SETTINGS = """
import argparse, dataclasses, functools
import keras, tensorflow as tf
class CFG:
    alpha, epochs, steps = {alpha}, {epochs}, 0
class Small(CFG):
    pass
@dataclasses.dataclass
class Data:
    alpha: float
    epochs: int
data, space = Data({alpha}, {epochs}), argparse.Namespace(alpha={alpha}, epochs={epochs})
mapping = {{"alpha": {alpha}, "epochs": {epochs}}}
def by_class(y): return y * CFG.alpha
def by_inherited(y): return y * Small.alpha
def by_dataclass(y): return y * data.alpha
def by_namespace(y): return y * space.alpha
def by_dict(y): return y * mapping["alpha"]
def by_counting(y):
    CFG.steps += 1
    return y * {alpha}
def scaled(function):
    @functools.wraps(function)
    def inside(y): return function(y) * {alpha}
    return inside
@scaled
def by_decorator(y): return y
class by_method(keras.layers.Layer):
    @tf.function
    def call(self, x): return x * {alpha}
"""


def test_of_settings_those_that_code_names_are_told_and_its_decorators():
    def made(alpha=2.0, epochs=3):
        scope = {"__name__": "__main__"}
        exec(compile(SETTINGS.format(alpha=alpha, epochs=epochs), "program.py", "exec"), scope)
        return {name: value for name, value in scope.items() if name.startswith("by_")}

    first, same, other = made(), made(epochs=9), made(alpha=5.0)
    same["by_counting"](1.0)
    for name, value in first.items():
        assert text_of(value) == text_of(same[name]) != text_of(other[name]), name


def test_code_that_refers_deeper_than_python_goes_is_told_by_its_class_at_once():
    calls = "\n".join(f"def f{n}(x): return f{n + 1}(x) + f{n + 2}(x)" for n in range(2000))
    scope: dict[str, types.FunctionType] = {"__name__": "own"}
    exec(compile(f"{calls}\ndef f2000(x): return x\ndef f2001(x): return x", "own.py", "exec"), scope)
    assert text_of(scope["f0"]) == "function"
    assert text_of(scope["f1990"]).startswith("f1990 {code ")


def test_values_are_told_by_what_they_are():
    assert text_of({"b": 1, "a": np.float32(0.1)}) == text_of({"a": 0.1, "b": 1.0}) == "{'a': 0.1, 'b': 1}"
    assert text_of((1, [2])) == text_of([np.int64(1), (2,)])
    assert text_of(tf.constant([1.0])) == text_of(np.ones(1, "float32")) != text_of(np.zeros(1, "float32"))
    assert text_of(keras.layers.Dense(2, name="a")) == text_of(keras.layers.Dense(2, name="b"))
    assert text_of(keras.layers.RandomFlip()) == text_of(keras.layers.RandomFlip())
    assert text_of(keras.optimizers.SGD(0.1)) != text_of(keras.optimizers.SGD(0.2))

    class Refuses:
        def get_config(self):
            raise NotImplementedError

    assert text_of(Refuses()).startswith("Refuses")


def model(*, units=8, activation="relu", rate=0.1, dropout=0.0, penalty=None, loss="mse", optimizer=None):
    layers = [keras.layers.Dense(units, activation), keras.layers.Dropout(dropout)]
    made = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1, kernel_regularizer=penalty)])
    made.compile(optimizer or keras.optimizers.SGD(rate), loss)
    return made


def wired(*, skip=False, factor=2.0, metrics=()):
    inputs = keras.Input((4,))
    first = keras.layers.Dense(4)(inputs)
    second = keras.layers.Dense(4)(first)
    joined = keras.layers.Add()([second, inputs if skip else first]) * factor
    made = keras.Model(inputs, keras.layers.Dense(1)(joined))
    made.compile(keras.optimizers.SGD(0.1), "mse", metrics=[*metrics, Far()])
    return made


class Far(keras.metrics.MeanAbsoluteError):
    def result(self):
        return super().result() * 2.0


def fit(folder, given=None, epochs=1, told=(), **changes):
    call = {"batch_size": 8, "verbose": 0, "model_dir": str(folder), **dict(told)}
    return launcher.fit(given or (lambda: model(**changes)), (X, Y), epochs=epochs, **call)


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, fit(folder).history


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained[0], tmp_path / "run")


COUNTS = "and what it is now counts from here on: "
OTHER = {
    "Dense 1.units: 8 then, 4 now": {"units": 4},
    "Dense 1.activation: relu then, tanh now": {"activation": "tanh"},
    "loss: 'mse' then, 'mae' now": {"loss": "mae"},
    "optimizer 1: SGD then, Adam now": {"optimizer": keras.optimizers.Adam(0.1)},
    "seed: 0 then, 3 now": {"told": {"seed": 3}},
    "global_batch_size: 8 then, 4 now": {"told": {"batch_size": 4}},
    "train.precision: 'float32' then, 'mixed_bfloat16' now": {"told": {"precision": "mixed_bfloat16"}},
}
NOTED = {
    "optimizer 1.learning_rate: 0.1 then, 0.5 now": {"rate": 0.5},
    "Dropout 1.rate: 0 then, 0.5 now": {"dropout": 0.5},
    "Dense 2.kernel_regularizer: None then, L2(l2=0.01) now": {"penalty": "l2"},
    "class_weight: {} then, {0: 2} now": {"told": {"class_weight": {0: 2.0}}},
    "validation data: [0, ''] then, [16, ": {"told": {"validation": (X, Y)}},
    "callbacks: [History()] then, [TerminateOnNaN(": {"told": {"callbacks": [keras.callbacks.TerminateOnNaN()]}},
    "train.clipping: Clipping() then, Clipping(global_norm=1) now": {"told": {"clipping": {"global_norm": 1.0}}},
}


def test_a_program_that_trains_something_else_is_refused_with_both_values_and_nothing_is_touched(folder):
    before = files(folder)
    for said, changes in OTHER.items():
        with pytest.raises(UsageError) as caught:
            fit(folder, **changes)
        assert said in str(caught.value) and "Checkpoints.on_changed_program" in str(caught.value)
    assert files(folder) == before


def test_layers_are_called_as_they_were_and_a_metric_beside_ones_own_is_only_noted(tmp_path, caplog):
    done = fit(tmp_path, wired).history
    for changes in {"skip": True}, {"factor": 3.0}:
        with pytest.raises(UsageError, match=r"model\.calls: .* then, .* now"):
            fit(tmp_path, lambda changes=changes: wired(**changes))
    assert fit(tmp_path, wired).history == done and not caplog.records
    assert fit(tmp_path, lambda: wired(metrics=["mse"])).history == done
    assert "metrics: [Far {code" in caplog.text


def test_what_a_callback_has_ended_goes_on_where_that_callback_is_gone_or_another(tmp_path):
    def epochs(patience, *others):
        stops = [keras.callbacks.EarlyStopping("loss", min_delta=9.0, patience=patience)] if patience else []
        return len(fit(tmp_path, epochs=5, told={"callbacks": [*others, *stops]}).epoch)

    assert [epochs(1), epochs(1), epochs(1, keras.callbacks.TerminateOnNaN()), epochs(2), epochs(0)] == [2, 2, 2, 3, 5]


def test_a_finished_run_returns_its_history_and_says_what_has_changed_since(trained, folder, caplog):
    before = files(folder)
    assert fit(folder).history == trained[1] and not caplog.records
    for said, changes in NOTED.items():
        caplog.clear()
        assert fit(folder, **changes).history == trained[1]
        (one,) = caplog.records
        assert one.getMessage().startswith(f"the program is not what it was at step 2, {COUNTS}{said}")
        assert one.getMessage().endswith("; already trained to step 2 of 2")
    never = {"microbatches": 2, "log_every": 3, "steps_per_loop": 1, "checkpoint_every": 1, "validation_freq": 2}
    caplog.clear()
    fit(folder, told=never)
    assert not caplog.records
    assert files(folder) == before


def test_more_epochs_go_on_at_the_rate_of_the_program_as_in_keras(tmp_path):
    order = {"shuffle": False, "batch_size": 8, "verbose": 0}
    fit(tmp_path, told=order)
    found = fit(tmp_path, epochs=2, rate=0.5, told=order).model
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    expected = model()
    expected.fit(X, Y, **order)
    expected.optimizer.learning_rate = 0.5
    expected.fit(X, Y, **order)
    assert float(found.optimizer.learning_rate) == 0.5
    for mine, theirs in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_on_changed_program_goes_on_or_begins_anew_beside_what_was_there(folder, caplog):
    kept = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    goes_on = fit(folder, epochs=2, activation="tanh", told={"checkpoints": {"on_changed_program": "continue"}})
    assert len(goes_on.epoch) == 2 and "Dense 1.activation: relu then, tanh now" in caplog.text
    assert fit(folder, epochs=2, activation="tanh").history == goes_on.history
    fresh = fit(folder, units=4, told={"checkpoints": {"on_changed_program": "fresh"}})
    assert len(fresh.epoch) == 1 and f"is in {folder}/before_1" in caplog.text
    assert fresh.model.layers[0].units == 4
    assert {str(path) for path in kept} <= {
        str(path.relative_to(folder / "before_1")) for path in (folder / "before_1").rglob("*")
    }
    assert fit(folder, units=4).history == fresh.history


def test_a_model_that_is_given_is_the_same_in_any_process_and_must_come_with_the_same_weights(tmp_path, monkeypatch):
    def given(value=None):
        keras.utils.set_random_seed(1)
        made = model()
        if value is not None:
            made.set_weights([np.full_like(one, value) for one in made.get_weights()])
        return made

    run = tmp_path / "run"
    first = fit(run, given())
    assert fit(run, given(), epochs=2).history["loss"][:1] == first.history["loss"]
    longer = fit(run, given(0.5), epochs=3)  # a cell that is run again draws other weights, which are not looked at
    assert len(longer.epoch) == 3
    assert fit(run, longer.model, epochs=3).history == longer.history
    monkeypatch.setattr(program_record, "_used", set())  # as in another process
    with pytest.raises(UsageError, match=r"first_weights: .* then, .* now"):
        fit(run, given(0.5), epochs=3)


def test_a_cell_that_is_run_again_goes_on_where_names_are_made_of_counted_ones(tmp_path):
    def cell(epochs):
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(4)(inputs)
        hidden = keras.layers.Bidirectional(keras.layers.SimpleRNN(2, unroll=True))(
            keras.layers.Reshape((1, 4))(hidden)
        )
        made = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        made.compile("sgd", "mse")
        return fit(tmp_path, made, epochs=epochs)

    assert cell(1).history["loss"] == cell(2).history["loss"][:1]
