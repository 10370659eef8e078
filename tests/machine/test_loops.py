"""Loops whose turns are counted before their gradients are made."""

from __future__ import annotations

import keras
import tensorflow as tf

from launcher.machine import loops


def test_a_loop_of_constant_bounds_is_counted_whatever_device_it_is_meant_for():
    @tf.function
    def step(x):
        with tf.device("/job:worker/replica:0/task:1/device:CPU:0"):
            found = keras.ops.fori_loop(0, 3, lambda index, one: one * one, x)
        loops.count_turns(tf.compat.v1.get_default_graph())
        return found

    graph = step.get_concrete_function(tf.TensorSpec([])).graph
    (loop,) = (one for one in graph.get_operations() if "While" in one.type)
    assert tf.get_static_value(loop.inputs[1]) == 3
