"""Translation and language models in the launcher's step: topologies, microbatches, XLA, 16 bits, recomputed blocks."""

from __future__ import annotations

import functools
import itertools
import re

import keras
import numpy as np
import pytest
import small_run
import tensorflow as tf
from cases import repeated_but

from launcher.errors import UsageError
from launcher.models.lstm import lstm_language_model
from launcher.models.transformer import language_model, transformer
from launcher.run import layer_settings

pytestmark = pytest.mark.slow

TINY = {"vocab_size": 16, "layers": 1, "width": 8, "heads": 2, "hidden": 16, "max_length": 8}
DROPOUT = {"dropout": 0.3, "attention_dropout": 0.3}
STEPS, BATCH, LENGTH = 2, 8, 6


def rows(seed):
    """Token rows [steps, batch, length] of different lengths; the last row of each batch is padding only."""
    generator = np.random.default_rng(seed)
    made = generator.integers(4, 16, (STEPS, BATCH, LENGTH)).astype(np.int32)
    lengths = generator.integers(1, LENGTH + 1, (STEPS, BATCH, 1))
    lengths[:, -1] = 0
    return np.where(np.arange(LENGTH) < lengths, made, 0)


def token_loss(inputs):
    def loss(model, batch, training):
        logits = model(batch, training=training)
        targets = batch[inputs]
        real = tf.cast(targets != 0, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
        return tf.reduce_sum(losses * real), tf.reduce_sum(real), {}

    return loss


def task(kind, **changes):
    weight = np.ones((STEPS, BATCH), np.float32)
    if kind == "transformer":
        arrays = {"source": rows(0), "target_in": rows(1), "weight": weight}
        return small_run.GivenTask(arrays, lambda: transformer(**TINY | changes), token_loss("target_in"))
    arrays = {"tokens": rows(0), "weight": weight}
    if kind == "lstm":
        builder, arguments = lstm_language_model, {"vocab_size": 16, "layers": 1, "width": 8}
    else:
        builder, arguments = language_model, TINY
    return small_run.GivenTask(arrays, lambda: builder(**arguments | changes), token_loss("tokens"))


def trained(kind, *build, model=None, **recipe):
    """Weights after two steps by their paths, and the session."""
    made = small_run.build(task(kind, **model or {}), *build, **recipe)
    small_run.train(made)
    small_run.assert_replicas_equal(made)
    return {weight.path: small_run.copies(weight)[0] for weight in made.model.weights}, made


@functools.cache
def trained_with_dropout(kind, topology, attention):
    """The same with a third of everything dropped."""
    return trained(kind, *topology, model=DROPOUT, attention=attention)[0]


@functools.cache
def trained_plainly(kind):
    """Weights after two steps on one replica, without dropout, in float32."""
    return trained(kind, model={"dropout": 0.0})


def assert_near(actual, expected, atol):
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(actual[path], value, atol=atol, err_msg=path)


@pytest.mark.nightly  # test_blockwise_attention.py compares the gradients
@pytest.mark.parametrize("kind", ["transformer", "language_model"])
def test_both_forms_of_attention_train_the_same_weights(kind):
    plain, _ = trained_plainly(kind)
    assert_near(trained(kind, model={"dropout": 0.0}, attention="blocks")[0], plain, 1e-5)


@pytest.mark.parametrize("kind", repeated_but(["transformer"], ["transformer", "language_model", "lstm"]))
def test_topologies_train_the_same_weights(kind):
    assert_near(trained(kind, 2, 2, model={"dropout": 0.0})[0], trained_plainly(kind)[0], 1e-5)


@pytest.mark.parametrize("kind", ["transformer", "language_model", pytest.param("lstm", marks=pytest.mark.nightly)])
def test_every_weight_trains(kind):
    one, made = trained_plainly(kind)
    keras.utils.set_random_seed(made.plan.seed)
    start = task(kind, dropout=0.0).model()
    for weight in start.weights:
        assert np.abs(weight.numpy() - one[weight.path]).max() > 1e-4, f"{weight.path} did not train"


@pytest.mark.parametrize(
    ("kind", "attention"),
    repeated_but(
        [("language_model", "plain")],
        itertools.product(["transformer", "language_model"], ["plain", "blocks"]),
    ),
)
def test_dropout_does_not_depend_on_how_the_batch_is_divided(kind, attention):
    replicas = trained_with_dropout(kind, (2, 1), attention)
    assert_near(trained_with_dropout(kind, (1, 2), attention), replicas, 1e-5)
    without, _ = trained_plainly(kind)
    assert any(np.abs(without[path] - value).max() > 1e-3 for path, value in replicas.items())


@pytest.mark.nightly  # test_train_step.py compiles a step, and test_blockwise_attention.py attention
@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["transformer", "language_model", "lstm"])
def test_compiled_by_xla_trains_the_same_weights(kind):
    plain, _ = trained_plainly(kind)
    assert_near(trained(kind, model={"dropout": 0.0}, jit_compile=True)[0], plain, 1e-5)


@pytest.mark.parametrize("precision", repeated_but(["mixed_float16"], ["mixed_float16", "mixed_bfloat16"]))
def test_16_bits_train_near_float32(precision):
    expected, _ = trained_plainly("language_model")
    actual, made = trained("language_model", model={"dropout": 0.0}, precision=precision)
    assert int(made.trainer.counters.skipped.numpy()) == 0
    assert_near(actual, expected, 0.1)


RECOMPUTED = [
    ("transformer", (1, 2), "plain"),
    ("language_model", (1, 2), "blocks"),
    ("language_model", (2, 1), "blocks"),
]


@pytest.mark.nightly  # test_rematerialize.py recomputes, too
@pytest.mark.parametrize(("kind", "topology", "attention"), repeated_but([RECOMPUTED[1]], RECOMPUTED))
def test_recomputed_blocks_train_the_same_weights_with_the_same_dropout(kind, topology, attention):
    recomputed, made = trained(kind, *topology, model=DROPOUT, rematerialize=True, attention=attention)
    assert_near(recomputed, trained_with_dropout(kind, topology, attention), 1e-6)
    assert all(layer.rematerialize for layer in layer_settings.rematerializing(made.model))


@pytest.mark.nightly
def test_recomputed_blocks_compiled_by_xla_train_the_same_weights_with_the_same_dropout():
    kept, _ = trained("language_model", model=DROPOUT, jit_compile=True)
    assert_near(trained("language_model", model=DROPOUT, rematerialize=True, jit_compile=True)[0], kept, 1e-6)


@pytest.mark.parametrize("kind", ["transformer", "language_model"])
def test_whether_blocks_are_recomputed_is_bound_before_the_models_own_argument(kind):
    for bound in (False, True):
        made = small_run.build(task(kind, rematerialize=not bound), rematerialize=bound)
        layers = layer_settings.rematerializing(made.model)
        assert layers and all(layer.rematerialize == bound for layer in layers)


@pytest.mark.nightly  # test_auto_settings.py has the memory that this saves
def test_xla_keeps_the_second_computation_of_recomputed_blocks():
    """A compiler that finds the two computations equal would merge them, and keep what was not to be kept."""
    batch = {"tokens": tf.constant(rows(0)[0])}
    products = {}
    for rematerialize in (False, True):
        model = language_model(**TINY, dropout=0.0, rematerialize=rematerialize)
        program = _compiled_gradients(model, batch)
        products[rematerialize] = len(re.findall(r" dot\(", program))
    assert products[True] >= products[False] + 5  # query, key, value, scores, and more of the one block


def _compiled_gradients(model, batch):
    """The text of XLA's optimised program."""

    def gradients(batch):
        with tf.GradientTape() as tape:
            loss, _, _ = token_loss("tokens")(model, batch, True)
        return [tf.convert_to_tensor(each) for each in tape.gradient(loss, [w.value for w in model.trainable_weights])]

    return tf.function(gradients, jit_compile=True).experimental_get_compiler_ir(batch)(stage="optimized_hlo")


def test_impossible_sizes_are_a_users_mistake():
    with pytest.raises(UsageError, match="width must be a multiple of heads, and is 8 with heads = 3"):
        small_run.build(task("transformer", heads=3))
