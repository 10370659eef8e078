"""The chain cast -> bucket -> reduce -> unscale -> judge -> clip against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.models import resnet
from launcher.step import gradients

pytestmark = pytest.mark.slow


def on_replicas(values, function):
    """Runs `function(value)` with values[i] on replica i of a MirroredStrategy; returns each replica's result."""
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(len(values))], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    per_replica = strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )

    @tf.function
    def run():
        return strategy.run(function, args=(per_replica,))

    results = run()
    flat = [strategy.experimental_local_results(value) for value in tf.nest.flatten(results)]
    return [
        tf.nest.pack_sequence_as(results, [copies[index].numpy() for copies in flat]) for index in range(len(values))
    ]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    halves=st.lists(st.booleans(), min_size=12, max_size=12),
    bucket_bytes=st.integers(1, 300),
)
def test_buckets_hold_every_tensor_once_one_dtype_each_within_the_bound(sizes, halves, bucket_bytes):
    dtypes = [tf.float16 if half else tf.float32 for half in halves[: len(sizes)]]
    buckets = gradients.plan_buckets(sizes, dtypes, bucket_bytes)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert len({dtypes[index] for index in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[i] * dtypes[i].size for i in bucket) <= bucket_bytes


def test_little_of_a_resnet_is_left_to_be_reduced_when_its_backward_pass_has_ended():
    model = resnet.resnet(image_shape=(64, 64, 3), num_classes=1000, depth=50)
    sizes = [variable.shape.num_elements() for variable in model.trainable_variables]
    buckets = gradients.plan_buckets(sizes, [tf.float32] * len(sizes), gradients.DEFAULT_BUCKET_BYTES)
    (last,) = (bucket for bucket in buckets if 0 in bucket)  # the first layer's gradient is made last
    assert sum(sizes[index] for index in last) < 0.2 * sum(sizes)


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [16, 2**20])
def test_sum_over_replicas_is_numpys_for_mixed_dtypes_and_shapes(num_replicas, bucket_bytes):
    source = np.random.default_rng(0)
    shapes = [((3, 4), np.float32), ((), np.float32), ((5,), np.float16), ((2, 2, 2), np.float16), ((0,), np.float32)]
    values = [
        [tf.constant(source.integers(-8, 8, shape).astype(dtype)) for shape, dtype in shapes]
        for _ in range(num_replicas)
    ]
    results = on_replicas(values, lambda tensors: gradients.reduce_sum(tensors, bucket_bytes=bucket_bytes))
    for position, (shape, dtype) in enumerate(shapes):
        expected = sum(value[position].numpy() for value in values)
        for result in results:
            assert result[position].dtype == dtype
            assert result[position].shape == shape
            np.testing.assert_array_equal(result[position], expected)


def test_float16_wire_is_judged_by_the_sum_not_by_one_replica():
    # 40,000 is finite in float16 on each replica; the sum, 80,000, is not.
    values = [tf.constant([40000.0], tf.float16)] * 2

    def judge(value):
        reduced = gradients.reduce_sum([value])
        return gradients.unscale_and_check(
            reduced, scale=tf.constant(1.0), nominal_weight=2.0, true_weight=tf.constant(2.0)
        ).finite

    assert on_replicas(values, judge) == [False, False]


@pytest.mark.parametrize("bad_replica", [0, 1])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("size", [2, 5000])
def test_one_bad_value_on_any_replica_is_seen_by_all(bad_replica, bad, size):
    values = [tf.constant([1.0] * (size - 1) + [bad if index == bad_replica else 2.0]) for index in range(2)]

    def judge(value):
        return gradients.unscale_and_check(
            gradients.reduce_sum([value]), scale=tf.constant(8.0), nominal_weight=2.0, true_weight=tf.constant(2.0)
        ).finite

    assert on_replicas(values, judge) == [False, False]


@settings(max_examples=40, deadline=None)
@given(
    scale=st.sampled_from([1.0, 128.0, 2.0**15, 2.0**20]),
    weights=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(sum),
    seed=st.integers(0, 2**16),
)
def test_unscaled_gradient_is_the_mean_over_real_examples(scale, weights, seed):
    """Each replica holds `weight` examples' gradients; the checked one is their mean."""
    source = np.random.default_rng(seed)
    nominal = 8.0
    per_example = [[source.normal(size=(2, 3)) for _ in range(weight)] for weight in weights]
    wire = [np.sum(examples, axis=0) if examples else np.zeros((2, 3)) for examples in per_example]
    checked = gradients.unscale_and_check(
        [tf.constant(np.sum(wire, axis=0) * scale / nominal, tf.float32)],
        scale=tf.constant(scale),
        nominal_weight=nominal,
        true_weight=tf.constant(float(sum(weights))),
    )
    mean = np.sum([example for examples in per_example for example in examples], axis=0) / sum(weights)
    assert bool(checked.finite)
    np.testing.assert_allclose(checked.norm, np.linalg.norm(mean), rtol=1e-5)
    np.testing.assert_allclose(checked.gradients[0], mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shards", [(), (0, 3), (1, 2)], ids=["none", "two large", "a large and a small"])
def test_norm_is_numpys_over_small_and_large_gradients_and_their_parts(shards):
    """Two replicas hold halves of some gradients and the whole of the others."""
    source = np.random.default_rng(3)
    sizes, dtypes = [(100, 100), (50, 120), (7,), (8192,), ()], ["float32", "float16", "float16", "float32", "float32"]
    halves = [
        [source.normal(size=size).astype(dtype) for _ in range(2)] for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    held = [[pair[replica if index in shards else 0] for index, pair in enumerate(halves)] for replica in range(2)]

    def judge(values):
        return gradients.unscale_and_check(
            values, scale=tf.constant(4.0), nominal_weight=2.0, true_weight=tf.constant(2.0), shards=shards
        ).norm

    per_replica = on_replicas(
        [tf.constant(float(replica)) for replica in range(2)],
        lambda which: judge(
            [
                tf.where(which > 0.5, *(tf.constant(held[replica][index]) for replica in (1, 0)))
                for index in range(len(sizes))
            ]
        ),
    )
    every = [
        one.astype(np.float64) / 4 for index, pair in enumerate(halves) for one in pair[: 2 if index in shards else 1]
    ]
    np.testing.assert_allclose(per_replica, [np.sqrt(sum(np.sum(one**2) for one in every))] * 2, rtol=1e-6)


@pytest.mark.parametrize("replicas", repeated_but([3], [2, 3, 4]))
def test_norm_of_which_each_replica_squares_a_share_is_numpys_and_sees_every_number(replicas):
    """Of the sizes, all replicas have another share, some have the same one, all have the whole."""
    source = np.random.default_rng(5)
    sizes = [(96, 128), (8, 16, 1024), (3, 3, 48, 64), (70, 70), (9216,), (7,)]
    values = [source.normal(size=size).astype(np.float32) for size in sizes]

    def norms(values):
        def judge(_):
            arguments = {"scale": tf.constant(4.0), "nominal_weight": 2.0, "true_weight": tf.constant(2.0)}
            return gradients.unscale_and_check([tf.constant(value) for value in values], divides=True, **arguments).norm

        return on_replicas([tf.constant(0.0)] * replicas, judge)

    expected = np.sqrt(sum(np.sum(value.astype(np.float64) ** 2) for value in values)) / 4
    np.testing.assert_allclose(norms(values), [expected] * replicas, rtol=1e-6)
    for index in range(len(sizes)):
        for place in (0, -1):
            bad = [value.copy() for value in values]
            bad[index].flat[place] = np.inf
            assert not np.isfinite(norms(bad)).any(), (index, place)


def test_no_norm_is_added_up_in_an_order_that_depends_on_what_else_the_machine_does():
    """`AddN` begins with an input it may overwrite, and TensorFlow makes one of a tree of additions."""

    def norm():
        values = [tf.ones([100, 100 + number]) for number in range(4)]
        return gradients.unscale_and_check(
            values, scale=tf.constant(1.0), nominal_weight=1.0, true_weight=tf.constant(1.0)
        ).norm

    traced = tf.function(norm, autograph=False).get_concrete_function()
    assert not {operation.type for operation in traced.graph.get_operations()} & {"AddN", "AddV2", "Add"}


def test_one_program_for_gpus_computes_the_same_bits_of_gradients_and_the_squares_of_each(monkeypatch):
    monkeypatch.setattr(gradients, "_TOGETHER", 5000)
    source = np.random.default_rng(7)
    sizes = [(70, 70), (7,), (70, 70), (100, 70), (), (7,)]
    values = [source.normal(size=size).astype(np.float32) for size in sizes]

    @tf.function(jit_compile=True, autograph=False)
    def judge(values, each):
        return gradients.unscale_and_check(
            values,
            scale=tf.constant(3.0), nominal_weight=7.0, true_weight=tf.constant(5.0), each=each,
        )  # fmt: skip

    plain, together = judge(values, each=False), judge(values, each=True)
    for before, after in zip(plain.gradients, together.gradients, strict=True):
        np.testing.assert_array_equal(before, after)
    squares = [np.sum((value.astype(np.float64) * 7 / 15) ** 2) for value in values]
    np.testing.assert_allclose(together.squares, squares, rtol=1e-5)
    np.testing.assert_allclose(together.norm, np.sqrt(sum(squares)), rtol=1e-5)


def test_sparse_gradients_add_up_duplicate_rows():
    slices = tf.IndexedSlices(tf.ones([3, 2], tf.bfloat16), tf.constant([0, 2, 2]), dense_shape=tf.constant([4, 2]))
    np.testing.assert_array_equal(gradients.dense(slices, tf.TensorShape([4, 2])), [[1, 1], [0, 0], [2, 2], [0, 0]])
