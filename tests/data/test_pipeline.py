from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from assembled import TOPOLOGIES, assert_same, global_batches, joined, shards
from cases import repeated_but
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.data.philox import uniform
from launcher.data.pipeline import ArrayExamples, RandomAccessData, Shard, held
from launcher.errors import UsageError
from launcher.runtime import batches as runtime_batches
from launcher.runtime.tensorflow import TfRuntime
from launcher.runtime.traits import traits_of

pytestmark = pytest.mark.slow

SIZE, BATCH, STEPS = 50, 12, 15  # 3.6 epochs


def _jitter(batch, seeds):
    return {**batch, "x": batch["x"] + uniform(seeds, 1, purpose=7)}


def _examples(count: int) -> ArrayExamples:
    return ArrayExamples({"x": np.arange(count, dtype=np.float32)[:, None] * 10, "id": np.arange(count)})


def _data(size: int = SIZE, evaluation: int = SIZE) -> RandomAccessData:
    return RandomAccessData(train=_examples(size), evaluation=_examples(evaluation), augment=_jitter)


@pytest.fixture(scope="module")
def undisturbed():
    """The batches of a run on one replica."""
    return global_batches(_data().train_batches, hosts=1, replicas=1, batch=BATCH, steps=STEPS)


def test_training_sees_every_example_once_an_epoch(undisturbed):
    stream = joined(undisturbed, "id")
    for start in range(0, len(stream) - SIZE, SIZE):
        np.testing.assert_array_equal(np.sort(stream[start : start + SIZE]), np.arange(SIZE))
    assert (stream[:SIZE] != stream[SIZE : 2 * SIZE]).any()
    assert set(joined(undisturbed, "weight")) == {1.0}


@pytest.mark.parametrize(("hosts", "replicas"), repeated_but([(2, 2)], TOPOLOGIES))
def test_every_topology_sees_the_same_global_batches_and_augmentations(undisturbed, hosts, replicas):
    batches = global_batches(_data().train_batches, hosts=hosts, replicas=replicas, batch=BATCH, steps=STEPS)
    assert_same(batches, undisturbed)


@pytest.mark.parametrize("start_step", repeated_but([11], [1, 4, 11]))
def test_a_resumed_run_sees_the_rest_of_an_undisturbed_one(undisturbed, start_step):
    resumed = global_batches(
        _data().train_batches, hosts=2, replicas=2, batch=BATCH, steps=STEPS - start_step, start_step=start_step
    )
    assert_same(resumed, undisturbed[start_step:])


def test_another_seed_gives_another_order(undisturbed):
    (other,) = global_batches(_data().train_batches, hosts=1, replicas=1, batch=BATCH, steps=1, seed=6)
    assert (other["id"] != undisturbed[0]["id"]).any()


def test_an_example_is_augmented_anew_every_epoch(undisturbed):
    ids, values = joined(undisturbed, "id"), joined(undisturbed, "x")[:, 0]
    noise = values - 10 * ids
    assert noise.min() >= 0 and noise.max() <= 1  # each by its own numbers
    assert len(set(noise[ids == 7])) == np.sum(ids == 7) >= 3


def test_a_batch_larger_than_the_data_set_spans_epochs():
    (batch,) = global_batches(_data(size=3).train_batches, hosts=1, replicas=2, batch=12, steps=1)
    for epoch in batch["id"].reshape(4, 3):
        assert sorted(epoch) == [0, 1, 2]


@given(size=st.integers(1, 30), hosts=st.integers(1, 3), replicas=st.integers(1, 3), per_replica=st.integers(1, 4))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_evaluation_counts_every_example_once_and_pads_with_weight_0(size, hosts, replicas, per_replica):
    topology = {"hosts": hosts, "replicas": replicas, "batch": hosts * replicas * per_replica}
    steps = -(-size // topology["batch"])
    data = _data(evaluation=size)
    for shard in shards(**topology):
        # Every replica gets one batch a step, with or without real examples in it.
        assert len(list(data.eval_batches(shard))) == steps * replicas
    batches = global_batches(data.eval_batches, steps=steps, **topology)
    weight = joined(batches, "weight")
    np.testing.assert_array_equal(weight, np.arange(len(weight)) < size)
    np.testing.assert_array_equal(joined(batches, "id")[weight == 1], np.arange(size))


def test_evaluation_begins_at_its_beginning_whatever_the_step_of_training():
    data = _data()
    (resumed,) = shards(hosts=1, replicas=1, batch=BATCH, start_step=3)
    np.testing.assert_array_equal(next(data.eval_batches(resumed).as_numpy_iterator())["id"], np.arange(BATCH))


def test_batches_have_static_shapes():
    (shard,) = shards(hosts=1, replicas=2, batch=BATCH)
    for dataset in (_data().train_batches(shard), _data().eval_batches(shard)):
        assert {key: tuple(spec.shape) for key, spec in dataset.element_spec.items()} == {
            "x": (6, 1),
            "id": (6,),
            "weight": (6,),
        }
        assert dataset.element_spec["weight"].dtype == tf.float32


def test_training_batches_never_end():
    (shard,) = shards(hosts=1, replicas=1, batch=BATCH)
    assert _data().train_batches(shard).cardinality() == tf.data.INFINITE_CARDINALITY


def test_no_thread_tunes_batches_for_which_the_end_of_their_iterator_would_wait():
    (shard,) = shards(hosts=1, replicas=1, batch=BATCH)
    for batches in (_data().train_batches(shard), _data().eval_batches(shard)):
        assert batches.options().autotune.enabled is False


def test_examples_may_bring_weights_of_their_own():
    examples = ArrayExamples({"id": np.arange(3), "weight": np.array([0.5, 2.0, 0.0])})
    data = RandomAccessData(train=examples, evaluation=examples)
    (batch,) = global_batches(data.eval_batches, hosts=1, replicas=1, batch=4, steps=1)
    np.testing.assert_array_equal(batch["weight"], np.array([0.5, 2.0, 0.0, 0.0], np.float32))
    (batch,) = global_batches(data.train_batches, hosts=1, replicas=1, batch=3, steps=1)
    np.testing.assert_array_equal(batch["weight"], np.array([0.5, 2.0, 0.0], np.float32)[batch["id"]])


def test_finish_changes_training_and_evaluation_batches_alike():
    def finish(batch):
        return {**batch, "id": -batch["id"]}

    data = RandomAccessData(train=_examples(9), evaluation=_examples(9), finish=finish)
    for make in (data.train_batches, data.eval_batches):
        (batch,) = global_batches(make, hosts=1, replicas=1, batch=9, steps=1)
        np.testing.assert_array_equal(np.sort(batch["id"]), np.arange(-8, 1))


def test_arrays_of_any_dtype_come_back_as_they_are():
    arrays = {
        "bytes": np.arange(8, dtype=np.uint8).reshape(4, 2),
        "half": np.array([0.5, 1, 2, 3], np.float16),
        "text": np.array(["a", "bc", "d", ""]),
        "list": [1.5, 2.5, 3.5, 4.5],
    }
    (batch,) = global_batches(
        RandomAccessData(train=ArrayExamples(arrays), evaluation=ArrayExamples(arrays)).eval_batches,
        hosts=1,
        replicas=1,
        batch=4,
        steps=1,
    )
    for key in ("bytes", "half", "list"):
        np.testing.assert_array_equal(batch[key], arrays[key])
        assert batch[key].dtype == np.asarray(arrays[key]).dtype
    assert [text.decode() for text in batch["text"]] == ["a", "bc", "d", ""]


@pytest.mark.parametrize("on_this_cpu", [True, False])
def test_mirrored_replicas_get_their_parts_of_the_global_batch(undisturbed, on_this_cpu):
    """Eagerly and in a graph, as on this machine's CPU and as on GPUs."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    runtime = TfRuntime(strategy, dataclasses.replace(traits_of(strategy), one_memory=on_this_cpu))
    batches = iter(runtime.batches(_data().train_batches, global_batch_size=BATCH, seed=5))
    assert isinstance(batches, runtime_batches._Batches) == on_this_cpu

    def parts(fed):
        def of_replica(batch):
            return tf.identity(batch["id"])

        return strategy.experimental_local_results(strategy.run(of_replica, args=(next(fed),)))

    in_a_graph = tf.function(parts, autograph=False)
    for step, take in enumerate([parts, in_a_graph, in_a_graph, parts]):
        found = take(batches)
        assert len(found) == 2
        np.testing.assert_array_equal(tf.concat(found, axis=0), undisturbed[step]["id"])
    assert in_a_graph.experimental_get_tracing_count() == 1


def test_one_replica_on_a_cpu_is_fed_by_a_plain_data_set(undisturbed):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    dataset = TfRuntime(strategy).batches(_data().train_batches, global_batch_size=BATCH, seed=5, start_step=2)
    assert isinstance(dataset, tf.data.Dataset), "a strategy's own calls functions on other devices for each batch"
    for batch, expected in zip(dataset.take(4), undisturbed[2:6], strict=True):
        np.testing.assert_array_equal(batch["id"], expected["id"])
        np.testing.assert_array_equal(batch["x"], expected["x"])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "at least one"),
        ({"x": np.zeros([3, 2]), "y": np.zeros([4])}, "'x': 3, 'y': 4"),
        ({"x": np.zeros([0, 2])}, "length 0"),
        ({"x": 3.0}, "first axis"),
        ({"x": [[1, 2], [3]]}, "'x'"),
        ({"x": np.array([{}, None], dtype=object)}, "different shapes or types"),
        ({"x": np.zeros([3]), "weight": np.ones([3, 1])}, "one number an example"),
    ],
)
def test_arrays_that_make_no_data_set_are_refused(arrays, words):
    with pytest.raises(UsageError, match=words):
        ArrayExamples(arrays)


def test_an_empty_data_set_is_refused():
    class Empty:
        def __len__(self):
            return 0

        def fetch(self, indices):
            raise AssertionError

    with pytest.raises(UsageError, match="at least one example"):
        RandomAccessData(train=Empty())


def test_data_without_evaluation_examples_says_so():
    data = RandomAccessData(train=_examples(3))
    assert data.num_train_examples == 3
    assert data.num_eval_examples == 0
    (shard,) = shards(hosts=1, replicas=1, batch=1)
    with pytest.raises(UsageError, match="no evaluation examples"):
        data.eval_batches(shard)


def test_examples_of_unknown_shape_are_refused_by_name():
    class Shapeless:
        def __len__(self):
            return 3

        def fetch(self, indices):
            return {"odd": tf.py_function(lambda i: i, [indices], tf.int64)}

    (shard,) = shards(hosts=1, replicas=1, batch=1)
    with pytest.raises(UsageError, match=r"'odd'.*ensure_shape"):
        RandomAccessData(train=Shapeless()).train_batches(shard)


def test_a_reader_that_looks_at_the_first_element_cuts_no_cache():
    """Which TensorFlow does where the reader is let go while it reads ahead: here, without `held`, in one of eight."""
    for _ in range(60):
        dataset = tf.data.Dataset.range(50).prefetch(16).cache().prefetch(2)
        assert next(held(dataset)) == 0
        assert sum(1 for _ in held(dataset)) == 50


def test_a_shard_knows_its_batch_sizes():
    shard = Shard(global_batch_size=24, num_replicas=6, first_replica=2, local_replicas=2, seed=0)
    assert shard.per_replica_batch_size == 4


def test_a_global_batch_that_replicas_cannot_share_is_refused():
    with pytest.raises(UsageError, match="10: choose a multiple of 4"):
        Shard(global_batch_size=10, num_replicas=4, first_replica=0, local_replicas=4, seed=0)


@pytest.mark.parametrize(
    "wrong", [{"num_replicas": 0}, {"first_replica": -1}, {"first_replica": 3}, {"start_step": -1}]
)
def test_an_impossible_shard_is_refused(wrong):
    right = {"global_batch_size": 8, "num_replicas": 4, "first_replica": 0, "local_replicas": 2, "seed": 0}
    with pytest.raises(ValueError, match=r"shard|replicas"):
        Shard(**{**right, **wrong})
