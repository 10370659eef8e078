"""AutoGraph is kept away from Launcher's own functions, and serves those that users bring."""

import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from places import ROOT
from small_run import GivenTask, build, linear_batches, linear_model, train

from launcher.errors import UsageError, user_code
from launcher.machine.no_autograph import call_converted, no_autograph

pytestmark = pytest.mark.slow


def positive(value):
    if value > 0:
        return tf.constant(1.0)
    return tf.constant(-1.0)


def test_a_function_runs_as_it_is_written():
    tensor = tf.constant(2.0)
    assert tf.function(positive)(tensor) == 1.0
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(no_autograph(positive))(tensor)
    assert no_autograph(positive)(2.0) == 1.0
    assert no_autograph(positive).__name__ == "positive"


def test_an_error_of_ours_leaves_a_converted_function_as_it_is():
    def refuses(value):
        if value > 0:
            raise UsageError("told in one line")
        return value

    with pytest.raises(UsageError) as raised:
        tf.function(refuses)(2)
    assert str(raised.value) == "told in one line"


def test_what_users_bring_is_converted_where_its_caller_is_not():
    @no_autograph
    def ours(tensor):
        return call_converted(positive, tensor), call_converted(no_autograph(lambda value: value + 1.0), tensor)

    for traced in (tf.function(ours, autograph=False), tf.function(ours)):
        found, more = traced(tf.constant(-2.0))
        assert (found, more) == (-1.0, -1.0)
    with pytest.raises(KeyError) as error:
        call_converted(lambda: {"a": 1}["b"])
    assert "test_no_autograph.py line " in str(user_code.mistake(error.value))


COUNTED = """
import atexit, pathlib, sys

def note():
    found = [name for name in sys.modules if name.startswith("__autograph_generated_file")]
    pathlib.Path("converted.txt").write_text(str(len(found)))

atexit.register(note)
"""


KERAS_PROGRAM = """
import counted, keras, launcher, numpy as np

def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

launcher.fit(build, (np.ones([5, 2], "float32"), np.ones([5, 1], "float32")), batch_size=2, model_dir="run")
"""


@pytest.mark.parametrize("recipe", ["counted.gin", "program.py"])
def test_a_run_of_a_built_in_task_or_of_a_keras_model_with_a_short_batch_converts_nothing(
    run_launcher, tmp_path, recipe
):
    (tmp_path / "counted.py").write_text(COUNTED)
    (tmp_path / "counted.gin").write_text(
        f"import counted\ninclude '{ROOT}/tests/support/small_digits.gin'\ntrain.steps = 2\n"
    )
    (tmp_path / "program.py").write_text(KERAS_PROGRAM)
    finished = run_launcher(f"--gin_file={recipe}", "--model_dir=run", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    # Not even the call of what users may have brought.
    assert (tmp_path / "converted.txt").read_text() == "0"


@pytest.mark.parametrize(("replicas", "microbatches"), repeated_but([(2, 2)], [(1, 1), (2, 2)]))
def test_a_loss_that_users_bring_may_branch_on_tensors(replicas, microbatches):
    def branching(model, batch, training):
        outputs = model(batch["x"], training=training)
        if tf.reduce_sum(batch["x"]) > 0.0:
            loss = tf.reduce_sum(outputs)
        else:
            loss = -3.0 * tf.reduce_sum(outputs)
        return loss, tf.reduce_sum(batch["weight"]), {}

    def selecting(model, batch, training):
        total = tf.reduce_sum(model(batch["x"], training=training))
        loss = tf.where(tf.reduce_sum(batch["x"]) > 0.0, total, -3.0 * total)
        return loss, tf.reduce_sum(batch["weight"]), {}

    batches = linear_batches(np.ones((3, 4, 2)) * np.array([1.0, -1.0, -1.0])[:, None, None])
    weights = []
    for loss in (branching, selecting):
        made = build(GivenTask(batches, lambda: linear_model(2), loss), replicas, microbatches)
        train(made)
        weights.append([weight.numpy() for weight in made.model.weights])
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.any(ours != 0)
