"""No sum of the training step depends on when its parts are ready: the graphs that TensorFlow runs, and NumPy."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from building import build_session
from cases import repeated_but
from places import ROOT
from small_run import GivenTask, assert_replicas_equal, build, train

from launcher import optimizers
from launcher.data import batch_spec
from launcher.data.pipeline import Shard
from launcher.runtime.summation import InOrder

pytestmark = pytest.mark.slow


def sums_of_many(run: Callable[[], object]) -> list[str]:
    """The floating-point `AddN` of three and more in the graphs, as Grappler leaves them, that are first run here."""
    with tempfile.TemporaryDirectory() as folder:
        tf.summary.trace_on(graph=True, profiler=False)
        run()
        with tf.summary.create_file_writer(folder).as_default():
            tf.summary.trace_export("graphs", step=0)
        (path,) = pathlib.Path(folder).iterdir()
        values = [value for event in tf.compat.v1.train.summary_iterator(str(path)) for value in event.summary.value]
    (data,) = [value.tensor.string_val[0] for value in values if value.tag == "graphs"]
    graphs = [one.post_optimization_graph for one in tf.compat.v1.RunMetadata.FromString(data).function_graphs]
    nodes = [node for graph in graphs for node in graph.node]
    functions = [function for graph in graphs for function in graph.library.function]
    # XLA has an order of its own.
    nodes += [node for function in functions if "_XlaMustCompile" not in function.attr for node in function.node_def]
    assert nodes
    many = [node for node in nodes if node.op in ("AddN", "AccumulateNV2") and node.attr["N"].i > 2]
    return [node.name for node in many if tf.as_dtype(node.attr["T"].type).is_floating]


ONE_CPU = tf.distribute.OneDeviceStrategy("CPU:0")
# Rounded otherwise in any other order than the first to the last.
PARTS = np.float32([[1, 2], [1e8, 3e8], [-1e8, -3e8], [3, 5], [1e-3, 4e-3], [7, 11], [1e7, 1e7], [-1e7, -1e7], [1, 9]])


def added_up(parts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The sum of rows that somebody else reads, too."""
    rows = tf.unstack(parts)
    return tf.add_n(rows), tf.stack([tf.square(row) for row in rows])


def in_a_loop(parts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    def again(index, total, squares):
        total, squares = added_up(parts + 0 * total)
        return index + 1, total, squares

    start = (tf.constant(0), tf.zeros([2]), tf.zeros(PARTS.shape))
    return tf.while_loop(lambda index, *_: index < 3, again, start)[1:]


def one_by_one(parts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Additions of two, of which Grappler makes one of all."""
    rows = tf.unstack(parts)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total, tf.stack([tf.square(row) for row in rows])


def over_a_call(parts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The same, with a part of them in a function that is put in the place of its call."""
    rows = tf.unstack(parts)

    @tf.function
    def more(total):
        for row in tf.unstack(parts)[2:5]:
            total = total + row
        return total

    total = more(rows[0] + rows[1])
    for row in rows[5:]:
        total = total + row
    return total, tf.stack([tf.square(row) for row in rows])


@pytest.mark.parametrize("function", [added_up, in_a_loop, one_by_one, over_a_call])
def test_many_tensors_are_added_up_from_the_first_to_the_last(function):
    expected = PARTS[0]
    for part in PARTS[1:]:
        expected = expected + part
    plain, ordered = tf.function(function), InOrder(function, on_cpu=True)
    given = tf.constant(PARTS)
    assert sums_of_many(lambda: plain(given)), "TensorFlow has this defect no more: is the rewriting still needed?"
    assert sums_of_many(lambda: ordered(given)) == []
    total, squares = ordered(given)
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(squares, np.square(PARTS))


NARROW = {
    "a bias": lambda x: tf.raw_ops.BiasAddGrad(out_backprop=x),
    "a sum": lambda x: tf.reduce_sum(tf.reshape(x, [64, 128, 4]), [0, 1]),
    "a mean": lambda x: tf.reduce_mean(tf.reshape(x, [64, 128, 4]), [0, 1]),
    "a product": lambda x: tf.reduce_prod(0 * x[:1000] + 1.0078125, 0),
    "means of segments": lambda x: tf.math.segment_mean(x, tf.range(8192) // 4096),
    "segments": lambda x: tf.math.segment_sum(x, tf.range(8192) // 4096),
    "segments in any order": lambda x: tf.math.unsorted_segment_sum(x, tf.range(8192) % 2, 2),
    "scattered": lambda x: tf.scatter_nd(tf.range(8192)[:, None] % 2, x, [2, 4]),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cpu_adds_sixteen_bit_floats_up_in_float32(dtype):
    rows = tf.cast(np.random.default_rng(0).random((8192, 4), np.float32) / 64, dtype)

    def all_sums(x: tf.Tensor) -> list[tf.Tensor]:
        _, *looped = tf.while_loop(
            lambda index, *_: index < 1,
            lambda index, *_: (index + 1, *(one(x) for one in NARROW.values())),
            (tf.constant(0), *(one(tf.zeros_like(x)) for one in NARROW.values())),
        )
        return [*(one(x) for one in NARROW.values()), *looped]

    def worst(found, wanted):
        return max(
            float(tf.reduce_max(tf.abs(tf.cast(one, tf.float32) / other - 1)))
            for one, other in zip(found, wanted, strict=True)
        )

    wanted = [one(tf.cast(rows, tf.float32)) for one in NARROW.values()]
    found = InOrder(all_sums, on_cpu=True)(rows)
    assert [one.dtype for one in found] == [dtype] * 2 * len(NARROW)
    assert worst(found, wanted * 2) < 2**-8
    assert worst(tf.function(all_sums)(rows), wanted * 2) > 0.5, "TensorFlow has this defect no more"


# ------------------------------------------------------------------------------------------------------------- the step


def side_by_side() -> keras.Model:
    """One tensor meets three sums, so that its gradient is a sum of six."""
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16)(inputs)
    sums = [keras.layers.Add()([hidden, keras.layers.Dense(16)(hidden)]) for _ in range(3)]
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Concatenate()(sums)))


def many_added() -> keras.Model:
    inputs = keras.Input((8,))
    hidden = [keras.layers.Dense(16)(inputs) for _ in range(4)]
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Concatenate()([keras.layers.Add()(hidden), *hidden])))


def recurrent() -> keras.Model:
    layers = [keras.layers.Reshape((4, 2)), keras.layers.LSTM(8), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4)])


def loss(model, batch, training):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], model(batch["x"], training=training))
    return tf.reduce_sum(losses * batch["weight"]), tf.reduce_sum(batch["weight"]), {}


def session(model, *topology, **recipe):
    random = np.random.default_rng(0)
    arrays = {
        "x": random.normal(size=(3, 12, 8)).astype(np.float32),
        "label": random.integers(0, 4, (3, 12)).astype(np.int32),
        "weight": np.ones((3, 12), np.float32),
    }
    adam = lambda: optimizers.adam(learning_rate=1e-3)  # noqa: E731
    return build(
        GivenTask(arrays, model, loss), *topology, optimizer=adam, clipping={"global_norm": 1.0}, seed=1, **recipe
    )


TOPOLOGIES = [(1, 1, False), (1, 2, False), (3, 1, False), (3, 2, True)]


@pytest.mark.parametrize(
    ("model", "replicas", "microbatches", "jit_compile"),
    repeated_but(
        [(recurrent, 1, 2, False), (many_added, 3, 1, False)],
        [(model, *where) for model in (side_by_side, many_added, recurrent) for where in TOPOLOGIES],
    ),
)
def test_no_sum_of_a_step_depends_on_when_its_parts_are_ready(model, replicas, microbatches, jit_compile):
    made = session(model, replicas, microbatches, jit_compile=jit_compile)
    assert sums_of_many(lambda: train(made)) == []
    assert sums_of_many(made.evaluator.evaluate) == []
    assert_replicas_equal(made)


SMALL = {
    "resnet": ("resnet.depth = 8", "resnet.norm_group_size = 2"),
    "transformer": ("transformer.layers = 1", "text_pairs.vocab_size = 512"),
    "lm_1b": ("language_model.width = 256",),
    "lm_": (
        "language_model.layers = 2",
        "language_model.hidden = 64",
        "text_corpus.vocab_size = 512",
        "text_corpus.length = 128",
        "text_corpus.eval_context = 64",
    ),
}
RECIPES = sorted(path.name for path in (ROOT / "gin_configs").glob("*.gin"))


@pytest.mark.heavy
@pytest.mark.parametrize("recipe", repeated_but(["lm_1b_gpu.gin"], RECIPES))
def test_no_sum_of_any_recipes_step_depends_on_when_its_parts_are_ready(recipe):
    small = [binding for prefix, those in SMALL.items() if recipe.startswith(prefix) for binding in those]
    everywhere = ("train.strategy = 'one_device'", "train.jit_compile = False", "train.global_batch_size = 2")
    made = build_session(recipe, [*small, *everywhere])
    size = made.plan.recipe.global_batch_size
    shard = Shard(global_batch_size=size, num_replicas=1, first_replica=0, local_replicas=1, seed=0)
    spec = batch_spec.of_one_replica(made.plan.data, shard)
    batch = {key: tf.zeros([size, *one.shape[1:]], one.dtype) for key, one in spec.items()}
    batches = iter(tf.data.Dataset.from_tensors(batch).repeat())
    assert sums_of_many(lambda: made.trainer.train(batches, 1)) == []
