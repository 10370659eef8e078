"""A loss in pieces against NumPy in float64: values, gradients, accuracy; what is never made; when it is chosen."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import small_run
import tensorflow as tf
from cases import repeated_but
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.machine import xla
from launcher.models.lstm import lstm_language_model
from launcher.models.transformer import language_model, transformer
from launcher.tasks import text
from launcher.tasks.cross_entropy import Head, LossChunks, chunked_sums, using

pytestmark = pytest.mark.slow

# How far from float64 a result may be, relative to its largest element: rounding of the features' own dtype.
TOLERANCES = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}
PIECES = 3


def case(seed=0, tokens=13, vocab=11, width=4, dtype="float32", bias=True, operands=None):
    """Features, head, targets and weights, with ties and tokens of no weight; features exactly as `dtype` has them.

    The head multiplies `operands`, or else float32 (float64 features by float64).
    """
    numbers = np.random.default_rng(seed)
    matrix = numbers.standard_normal((vocab, width))
    offsets = numbers.standard_normal(vocab) if bias else np.zeros(vocab)
    if vocab > 3:  # these two words have the same logit for every token
        matrix[3], offsets[3] = matrix[1], offsets[1]
    features = numbers.standard_normal((tokens, width))
    features[::3] = 2 * matrix[1]  # likely the highest for these
    features[1::5] = 0.0
    targets = numbers.integers(0, vocab, tokens)
    targets[::6], targets[3::6] = 1 % vocab, 3 % vocab
    weight = numbers.uniform(0, 2, tokens) * (numbers.uniform(size=tokens) > 0.2)
    exact = "float64" if dtype == "float64" else "float32"
    features = tf.cast(tf.constant(features), dtype)
    head = Head(tf.cast(tf.constant(matrix, exact), operands or exact), tf.constant(offsets, exact) if bias else None)
    return features, head, tf.constant(targets, tf.int32), tf.constant(weight, exact)


def oracle(features, head, targets, weight, smoothing, factor):
    """Loss, weight of the right tokens, gradients of `factor` times the loss by features, matrix and bias."""
    weight_dtype = weight.dtype.as_numpy_dtype
    x, matrix, weight = (tf.cast(one, tf.float64).numpy() for one in (features, head.matrix, weight))
    bias = 0.0 if head.bias is None else tf.cast(head.bias, tf.float64).numpy()
    logits, targets = x @ matrix.T + bias, targets.numpy()
    logits = logits.astype(weight_dtype).astype("float64")  # ties as they are in its dtype
    top = logits.max(-1, keepdims=True)
    log_sum = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    target = (1 - smoothing) * np.eye(len(matrix))[targets] + smoothing / len(matrix)
    loss = (weight * (log_sum[:, 0] - (target * logits).sum(-1))).sum()
    by_logits = (np.exp(logits - log_sum) - target) * weight[:, np.newaxis] * factor
    gradients = [by_logits @ matrix, by_logits.T @ x, by_logits.sum(0)]
    return [loss, (weight * (logits.argmax(-1) == targets)).sum(), *gradients[: 2 if head.bias is None else 3]]


def found(features, head, targets, weight, pieces, smoothing=0.0, factor=1.0, training=True, narrow=False):
    sources = [features, *(one for one in head if one is not None)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        loss, right = chunked_sums(
            features, head, targets, weight,
            pieces=pieces, narrow=narrow, label_smoothing=smoothing, training=training,
        )  # fmt: skip
        scaled = loss * factor
    return [loss, right, *tape.gradient(scaled, sources)]


def assert_close(values, expected, dtype, rounded=("by features",)):
    names = ("loss", "right", "by features", "by matrix", "by bias")
    for name, value, wanted in zip(names, values, expected, strict=False):
        # Losses and sums over tokens are not rounded to the features' dtype; gradients by features are.
        tolerance = TOLERANCES[dtype if name in rounded else ("float64" if dtype == "float64" else "float32")]
        scale = max(1.0, np.abs(wanted).max())  # a share minus 1 is off by the rounding of 1
        np.testing.assert_allclose(tf.cast(value, tf.float64), wanted, rtol=0, atol=tolerance * scale, err_msg=name)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    tokens=st.integers(1, 17),
    vocab=st.integers(2, 23),
    width=st.integers(1, 7),
    dtype=st.sampled_from(list(TOLERANCES)),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    pieces=st.integers(1, 5),
    training=st.booleans(),
)
def test_any_pieces_of_any_sizes_give_the_sums_and_gradients_of_whole_logits(
    seed, tokens, vocab, width, dtype, bias, smoothing, pieces, training
):
    arguments = case(seed, tokens, vocab, width, dtype, bias)
    values = found(*arguments, min(pieces, tokens), smoothing, 3.0, training)
    assert_close(values, oracle(*arguments, smoothing, 3.0), dtype)
    assert values[2].dtype == dtype and values[3].dtype == values[0].dtype == arguments[1].matrix.dtype


@pytest.mark.parametrize(
    ("jit", "training"), repeated_but([(True, True)], [(False, True), (True, True), (True, False)])
)
def test_in_a_graph_and_compiled_by_xla_they_are_the_same(jit, training):
    arguments = case(vocab=103, dtype="float64")

    @tf.function(jit_compile=jit)
    def traced(features, matrix, bias):
        with xla.compiling(jit):
            return found(features, Head(matrix, bias), *arguments[2:], PIECES, 0.1, 3.0, training)

    assert_close(traced(arguments[0], *arguments[1]), oracle(*arguments, 0.1, 3.0), "float64")


def test_gradients_too_small_for_float16_are_kept_by_the_loss_scale():
    features, head, targets, weight = case(dtype="float16")
    weight = weight * 1e-9
    plain, scaled = (found(features, head, targets, weight, PIECES, factor=factor)[2] for factor in (1.0, 2.0**15))
    expected = oracle(features, head, targets, weight, 0.0, 2.0**15)[2]
    assert not np.any(plain), "float16 holds these gradients: the loss scale is not needed"
    np.testing.assert_allclose(scaled, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", repeated_but(["float16"], ["bfloat16", "float16"]))
@pytest.mark.parametrize(
    ("jit", "accelerator"),
    [
        pytest.param(False, "cpu", id="kernels"),
        pytest.param(True, "cpu", id="compiled", marks=pytest.mark.nightly),
        pytest.param(True, "gpu", id="compiled for a GPU"),
    ],
)
@pytest.mark.parametrize(
    ("pieces", "narrow", "rounded"),
    # Gradients by logits are rounded before the products, and narrow logits themselves before the loss.
    [(1, False, ("by features", "by matrix")), (PIECES, False, ("by features", "by matrix")),
     (PIECES, True, ("loss", "by features", "by matrix", "by bias"))],
    ids=["whole", "pieces", "narrow"],
)  # fmt: skip
def test_a_head_of_16_bits_is_off_by_the_rounding_of_its_operands(pieces, narrow, rounded, jit, dtype, accelerator):
    features, head, targets, weight = case(tokens=64, vocab=103, width=16, dtype=dtype, operands=dtype)
    weight = weight * 1e-3  # in float16, what is below 2^-14 of this would lose digits
    scale = 2.0**15 * 1e3  # and a loss scale of this size would overflow if it stood before the products

    @tf.function(jit_compile=jit)
    def traced(features, matrix, bias):
        with xla.compiling(jit), using(LossChunks(accelerator=accelerator)):
            return found(features, Head(matrix, bias), targets, weight, pieces, 0.1, scale, narrow=narrow)

    values = traced(tf.cast(features, tf.float32), *head)
    assert {value.dtype for value in values} == {tf.float32}
    assert_close([one / scale * 1e3 if place > 1 else one * 1e3 for place, one in enumerate(values)],
                 oracle(features, head, targets, weight * 1e3, 0.1, 1.0), dtype, rounded)  # fmt: skip


def operations(function):
    """Every operation of a traced function and of those that it calls."""
    graph = function.graph.as_graph_def(add_shapes=True)
    return [*graph.node, *(node for called in graph.library.function for node in called.node_def)]


def traced(training):
    features, head, targets, weight = case(tokens=64, vocab=96, width=4, bias=False)

    def evaluated(features, matrix):
        if training:
            return found(features, Head(matrix), targets, weight, 4)
        return chunked_sums(features, Head(matrix), targets, weight, pieces=4, training=False)

    return operations(tf.function(evaluated).get_concrete_function(features, head.matrix))


def test_evaluation_makes_logits_only_and_nothing_has_the_size_of_all_logits():
    assert sum(node.op == "MatMul" for node in traced(training=False)) == 1
    nodes = traced(training=True)
    assert sum(node.op == "MatMul" for node in nodes) == 3
    sizes = [tf.TensorShape(shape).num_elements() or 0 for node in nodes for shape in _shapes(node)]
    assert 64 * 4 <= max(sizes) < 64 * 96 / 2


def _shapes(node):
    return node.attr["_output_shapes"].list.shape


MODELS = {
    "a tied matrix": functools.partial(language_model, layers=1, width=8, heads=2),
    "a head of its own": functools.partial(language_model, layers=1, width=8, heads=2, tie_embeddings=False),
    "an LSTM": functools.partial(lstm_language_model, layers=1, width=8, tie_embeddings=False),
    "an encoder and a decoder": functools.partial(transformer, layers=1, width=8, heads=2, hidden=8, norm="pre"),
}


def token_rows(vocab=31):
    rows = np.random.default_rng(0).integers(4, vocab, (3, 4, 6)).astype(np.int32)
    rows[:, -1, 2:] = 0
    return {
        "tokens": rows[0], "source": rows[1], "target_in": rows[0], "targets": rows[2],
        "weight": np.array([1, 2, 0, 1], np.float32),
    }  # fmt: skip


@pytest.mark.parametrize("kind", repeated_but([one for one in MODELS if one != "an LSTM"], MODELS))
def test_a_model_is_trained_by_the_gradients_of_its_whole_logits(kind):
    model = MODELS[kind](vocab_size=31, dropout=0.0)
    batch = {name: tf.constant(value) for name, value in token_rows().items()}

    def sums(pieces):
        with using(pieces), tf.GradientTape() as tape:
            loss, weight, metrics = text.model_sums(model, batch, batch["targets"], training=True, label_smoothing=0.1)
        return [loss, weight, metrics["accuracy"], *tape.gradient(loss, [one.value for one in model.trainable_weights])]

    whole = sums(LossChunks(pieces=1))
    for one, value in zip(sums(LossChunks(pieces=5)), whole, strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(one), tf.convert_to_tensor(value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "a head of its own"])
def test_a_model_of_16_bits_has_a_head_of_16_bits_unless_its_layer_is_float32(tied):
    model = language_model(vocab_size=31, layers=1, width=8, heads=2, tie_embeddings=tied)
    features, layer = tf.random.stateless_normal([2, 3, 8], [0, 1]), model.embedding if tied else model.head
    exact = model._logits(features)
    layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    matrix, _ = model.output_matrix()
    products = [tf.cast(tf.cast(one, tf.bfloat16), tf.float64) for one in (features, matrix)]
    assert matrix.dtype == tf.bfloat16
    assert model._logits(features).dtype == tf.float32
    np.testing.assert_allclose(model._logits(features), tf.einsum("blw,vw->blv", *products), rtol=0, atol=1e-6)
    layer.dtype_policy = keras.DTypePolicy("float32")
    np.testing.assert_array_equal(model._logits(features), exact)


@pytest.mark.parametrize(
    ("pieces", "tokens", "vocab_size", "width", "expected"),
    [
        (LossChunks(pieces="auto", accelerator="cpu"), 4096, 2048, 192, 1),
        (LossChunks(pieces="auto", accelerator="gpu"), 32_768, 32_000, 768, 1),
        (LossChunks(pieces="auto", accelerator="gpu"), 65_536, 32_000, 768, 32),
        (LossChunks(pieces="auto", accelerator="cpu"), 2048 + 256, 32_000, 256, 6),
        (LossChunks(pieces="auto", accelerator="gpu"), 4096, 32_000, 1024, 1),
        (LossChunks(pieces="auto", accelerator="tpu"), 32_768, 32_000, 768, 32),
        (LossChunks(pieces="auto", accelerator="tpu"), 8192, 32_000, 768, 8),
        (LossChunks(pieces=1, accelerator="tpu"), 8192, 32_000, 768, 1),
        (LossChunks(pieces=4, accelerator="cpu"), 96, 1000, 8, 4),
        (LossChunks(pieces=4, accelerator="cpu"), 3, 1000, 8, 3),
        (LossChunks(), 1 << 20, 1 << 20, 8, 1),
    ],
)  # fmt: skip
def test_pieces_are_chosen_by_the_size_of_all_logits(pieces, tokens, vocab_size, width, expected):
    assert pieces.count(tokens, vocab_size, width) == expected


def test_a_model_of_ones_own_that_gives_logits_trains_whole_and_refuses_pieces():
    batch = {name: tf.constant(value) for name, value in token_rows().items()}

    def logits_only(batch, training):
        return tf.one_hot(batch["tokens"], 31)

    with using(LossChunks(pieces="auto")):
        loss, *_ = text.model_sums(logits_only, batch, batch["targets"], training=True)
    assert loss > 0
    with (
        using(LossChunks(pieces=8)),
        pytest.raises(UsageError, match=r"train\.loss_chunks = 8: the model has no output_matrix"),
    ):
        text.model_sums(logits_only, batch, batch["targets"], training=True)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [(2, r"train\.loss_chunks = 2: only a task of text"),
     (0, r"train\.loss_chunks = 0: must be 1 or more")],
)  # fmt: skip
def test_pieces_of_a_task_without_a_vocabulary_are_refused(pieces, says):
    task = small_run.GivenTask(
        small_run.linear_batches(np.ones((1, 4, 2))), lambda: small_run.linear_model(2), small_run.negative_sum
    )
    with pytest.raises(UsageError, match=says):
        small_run.build(task, loss_chunks=pieces)
