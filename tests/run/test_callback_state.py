"""What a checkpoint holds of callbacks comes back as it was, and nothing of it can be code."""

from __future__ import annotations

import collections
import io
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from launcher.run.actions import callback_state

BFLOAT16 = tf.bfloat16.as_numpy_dtype
VALUES = {
    "number": 3,
    "infinite": float("-inf"),
    "nothing": None,
    "text": "é",
    "tuple": (1, ("a", None)),
    "set": {1, 2},
    "dict": {1: [2.5], ("a", 2): {"b": True}},
    "array": np.arange(6, dtype=np.int8).reshape(2, 3),
    "empty": np.zeros([0, 2], np.float32),
    "scalar": np.float32(0.1),
    "bfloat16": np.array([1.5, -2.0], BFLOAT16),
    "weights": [np.ones([2], np.float64), np.zeros([], np.float16)],
    "function": keras.ops.less,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_plain_value_comes_back(name):
    (record,) = callback_state.unpacked(callback_state.packed([{"value": VALUES[name]}]))
    found, wanted = record["value"], VALUES[name]
    assert type(found) is type(wanted)
    keras.tree.map_structure(np.testing.assert_array_equal, found, wanted)
    assert getattr(found, "dtype", None) == getattr(wanted, "dtype", None)


def test_what_version_0_1_wrote_is_read():
    text = json.dumps([{"sums": {"dict": {" loss": {"array": "0", "scalar": True}}}, "best": None, "seen": [1]}])
    file = io.BytesIO()
    np.savez(file, text=np.frombuffer(text.encode(), np.uint8), **{"0": np.float64(0.5)})
    (record,) = callback_state.unpacked(np.frombuffer(file.getvalue(), np.uint8))
    assert record == {"sums": {" loss": np.float64(0.5)}, "best": None, "seen": [1]}


def test_no_function_but_those_of_keras_comes_from_a_checkpoint():
    text = json.dumps([{"monitor_op": {"function": ["subprocess", "call"]}}])
    file = io.BytesIO()
    np.savez(file, text=np.frombuffer(text.encode(), np.uint8))
    assert callback_state.unpacked(np.frombuffer(file.getvalue(), np.uint8)) == [{"monitor_op": None}]


def changed(callback, first):
    return callback_state.changed(callback, first, set())


def test_only_what_has_changed_is_kept_also_within_a_list():
    callback = keras.callbacks.Callback()
    callback.argument, callback.seen, callback.best, callback.model_of_others = 5, [1], np.zeros(3), keras.Sequential()
    first = callback_state.digests(callback)
    assert changed(callback, first) == {}
    callback.seen.append(2)
    callback.best[1] = 1.0
    callback.made_later, callback.file = "now", open  # the last is no function of Python's
    assert changed(callback, first).keys() == {"seen", "best", "made_later"}


def test_a_variable_that_replicas_share_is_not_read():
    callback = keras.callbacks.Callback()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        callback.metric, callback.weight = keras.metrics.Mean().variables[0], tf.Variable(0.0)
    assert not {"metric", "weight"} & callback_state.digests(callback).keys()


def test_what_was_kept_once_is_kept_although_it_is_as_it_was_made():
    callback = keras.callbacks.Callback()
    callback.wait = 0
    first, names = callback_state.digests(callback), set()
    callback.wait = 2
    callback_state.changed(callback, first, names)
    callback.wait = 0
    assert callback_state.changed(callback, first, names) == {"wait": 0}


def test_containers_and_variables_stay_what_they_are():
    callback = keras.callbacks.Callback()
    callback.lists, callback.recent = collections.defaultdict(list), collections.deque(maxlen=2)
    variable = callback.variable = keras.Variable([0.0, 0.0])
    callback_state.put(callback, {"lists": {"a": [1]}, "recent": [1, 2], "variable": np.array([1.0, 2.0])})
    callback.lists["b"].append(2)
    callback.recent.append(3)
    assert (dict(callback.lists), list(callback.recent)) == ({"a": [1], "b": [2]}, [2, 3])
    assert callback.variable is variable and variable.numpy().tolist() == [1.0, 2.0]
