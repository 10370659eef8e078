"""Each host of a TPU makes the batches of its own replicas, beside the step and not in it."""

from __future__ import annotations

import re

import made_up_tpu
import numpy as np
import pytest
import replicated
import tensorflow as tf

from launcher.data.pipeline import RandomAccessData
from launcher.data.text.rows import MappedExamples
from launcher.errors import UsageError
from launcher.runtime.tensorflow import TfRuntime

BINDINGS = ["mlp.units = 8", "train.precision = 'float32'", "train.global_batch_size = 32"]


def nodes_of(function):
    graph = function.graph.as_graph_def()
    return [*graph.node, *(node for called in graph.library.function for node in called.node_def)]


@pytest.fixture(scope="module")
def traced():
    """(training function of 32 replicas, the stand-in for its data)"""
    resolved = made_up_tpu.resolve("mlp_fashion.gin", BINDINGS, 32)
    with made_up_tpu.strategy(32) as strategy:
        made = made_up_tpu.build(strategy, resolved)
        data = made_up_tpu.training_shapes(resolved)
        return made_up_tpu.training(made, data), data


def test_every_host_is_asked_for_the_batches_of_its_own_replicas(traced):
    _, data = traced
    asked = data.asked[-8:]
    assert [(shard.first_replica, shard.local_replicas) for shard in asked] == [(4 * host, 4) for host in range(8)]
    assert {(shard.num_replicas, shard.global_batch_size) for shard in asked} == {(32, 32)}


def test_a_pipeline_stands_on_the_host_that_it_feeds(traced):
    function, _ = traced
    pipelines = [node.device for node in nodes_of(function) if node.op == "AnonymousMultiDeviceIteratorV3"]
    hosts = [f"/job:worker/replica:0/task:{host}/device:CPU:0" for host in range(8)]
    assert sorted(pipelines) == hosts
    fed = [node.device for node in nodes_of(function) if node.op == "AnonymousIteratorV3"]
    assert sorted(fed) == sorted(made_up_tpu.device_names(32)), "and each core takes what is its own"


def test_clocks_and_iterators_are_the_hosts_in_the_loop_over_the_steps(traced):
    function, _ = traced
    assert {"Timestamp", "IteratorGetNext", "While"} <= {node.op for node in nodes_of(function)}
    inside = {one.op for one in replicated.operations(function)}
    assert not any(re.search("Iterator|Dataset|Timestamp|TensorList", op) for op in inside)


def test_data_that_python_reads_is_refused_where_other_hosts_would_read_it():
    rows = MappedExamples({"x": np.zeros([8, 3], np.int32)})
    data = RandomAccessData(train=rows, evaluation=rows)
    strategy = tf.distribute.TPUStrategy(made_up_tpu.MadeUpTpu(8))
    for make in (data.train_batches, data.eval_batches):
        with pytest.raises(UsageError, match="memory_limit_bytes of text_corpus or text_pairs to 96"):
            TfRuntime(strategy).batches(make, global_batch_size=8)
    at_home = TfRuntime(tf.distribute.OneDeviceStrategy("CPU:0")).batches(data.train_batches, global_batch_size=8)
    assert next(iter(at_home))["x"].shape == (8, 3)
