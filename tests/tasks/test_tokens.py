"""Loss and metrics of the text tasks, against NumPy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import small_run
import tensorflow as tf
from cases import repeated_but

from launcher.data.text.corpus import TextCorpus
from launcher.data.text.pairs import TextPairs
from launcher.errors import UsageError
from launcher.machine import xla
from launcher.models.transformer import language_model, transformer
from launcher.tasks.cross_entropy import token_losses
from launcher.tasks.language_modelling import LanguageModelling
from launcher.tasks.text import model_sums
from launcher.tasks.translation import Translation

pytestmark = pytest.mark.slow

ROWS, LENGTH, SIZE = 6, 5, 11


def batch():
    numbers = np.random.default_rng(0)
    targets = numbers.integers(1, SIZE, (ROWS, LENGTH)).astype(np.int32)
    targets[np.arange(LENGTH)[None] >= numbers.integers(0, LENGTH + 1, (ROWS, 1))] = 0
    logits = 3 * numbers.standard_normal((ROWS, LENGTH, SIZE)).astype(np.float32)
    return logits, targets, np.array([1, 0, 0.5, 1, 1, 2], np.float32)


def oracle(logits, targets, weight, smoothing):
    """(sum of losses, sum of weights, weight of the tokens that were right), token by token."""
    loss = total = right = 0.0
    for row in range(ROWS):
        for place in range(LENGTH):
            token = targets[row, place]
            if token == 0:
                continue
            scores = logits[row, place].astype(np.float64)
            log_p = scores - math.log(np.exp(scores).sum())
            target = np.full(SIZE, smoothing / SIZE)
            target[token] += 1 - smoothing
            loss -= weight[row] * (target * log_p).sum()
            total += weight[row]
            right += weight[row] * (scores.argmax() == token)
    return loss, total, right


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_the_loss_is_the_smoothed_cross_entropy_of_real_tokens(smoothing):
    logits, targets, weight = batch()
    loss, total, metrics = model_sums(
        lambda batch, training: tf.constant(logits), {"weight": tf.constant(weight)}, tf.constant(targets),
        training=True, label_smoothing=smoothing,
    )  # fmt: skip
    expected = oracle(logits, targets, weight, smoothing)
    np.testing.assert_allclose([loss, total, metrics["accuracy"]], expected, rtol=1e-5)
    assert loss.dtype == total.dtype == metrics["accuracy"].dtype == tf.float32


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_compiled_by_xla_losses_and_gradients_are_those_of_the_kernels_and_of_numpy(smoothing):
    logits, targets, _ = batch()
    logits[0, 0] = 3.0  # all equal: the first one counts as the highest
    targets[0, 0] = 0

    @tf.function
    def found(compiled):
        given = tf.constant(logits)
        with xla.compiling(compiled), tf.GradientTape() as tape:
            tape.watch(given)
            losses, right = token_losses(given, tf.constant(targets), smoothing)
            total = tf.reduce_sum(losses * tf.constant(factors))
        return losses, right, tape.gradient(total, given)

    factors = np.linspace(-1, 2, targets.size).reshape(targets.shape).astype("float32")
    scores = logits.astype("float64")
    share = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    target = (1 - smoothing) * np.eye(SIZE)[targets] + smoothing / SIZE
    losses, gradient = -(target * np.log(share)).sum(-1), (share - target) * factors[..., np.newaxis]
    right = scores.argmax(-1) == targets
    assert right[0, 0]
    for compiled in (False, True):
        for value, expected in zip(found(compiled), (losses, right, gradient), strict=True):
            np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-6, err_msg=f"compiled={compiled}")


class Source:
    """Texts of which only the facts matter here."""

    name = "made up"


def pairs_task(**arguments):
    data = TextPairs(Source(), vocab_size=300, max_length=8)
    return Translation(data=data, model=transformer, **arguments)


def corpus_task(**arguments):
    return LanguageModelling(data=TextCorpus(Source(), vocab_size=300, length=LENGTH), model=language_model, **{
        "max_new_tokens": 2, **arguments
    })  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [pairs_task, corpus_task])
def test_only_training_is_smoothed(make, training, monkeypatch):
    monkeypatch.setattr(TextCorpus, "bytes_per_token", 4.0)
    logits, targets, weight = batch()
    inputs = {"targets": targets, "target_out": targets, "weight": weight}
    inputs = {name: tf.constant(value) for name, value in inputs.items()}
    loss, total, metrics = make(label_smoothing=0.4).loss(lambda batch, training: tf.constant(logits), inputs, training)
    expected = oracle(logits, targets, weight, 0.4 if training else 0.0)
    np.testing.assert_allclose([loss, total, metrics["accuracy"]], expected, rtol=1e-5)
    if make is corpus_task and not training:
        # Nats of all tokens in bits, over the bytes of all tokens.
        bits, size = expected[0] / math.log(2), 4.0 * expected[1]
        assert float(metrics["bits_per_byte"] / total) == pytest.approx(bits / size, rel=1e-5)
    else:
        assert set(metrics) == {"accuracy"}


def test_perplexity_is_the_exponential_of_the_mean_loss():
    finished = corpus_task().finish_metrics({"loss": 2.5, "accuracy": 0.5})
    assert finished == {"loss": 2.5, "accuracy": 0.5, "perplexity": math.exp(2.5)}
    assert corpus_task().finish_metrics({"loss": 1e6})["perplexity"] == math.inf


@pytest.mark.parametrize("kind", repeated_but([], ["translation", "language_modelling"]))
def test_a_replica_of_padding_alone_changes_nothing(kind):
    """The same rows on one replica, and on two of which the second has nothing but padding."""
    numbers = np.random.default_rng(1)
    rows = numbers.integers(4, 290, (2, 4, 6)).astype(np.int32)
    keys = ("source", "target_in", "target_out") if kind == "translation" else ("tokens", "targets")

    def trained(padded):
        arrays = {key: rows + number for number, key in enumerate(keys)}
        arrays["weight"] = np.ones(rows.shape[:2], np.float32)
        if padded:
            arrays = {key: np.concatenate([value, np.zeros_like(value)], axis=1) for key, value in arrays.items()}
        task = pairs_task() if kind == "translation" else corpus_task()
        tiny = {"layers": 1, "width": 8, "heads": 2, "hidden": 16, "dropout": 0.0}
        builder = transformer if kind == "translation" else language_model
        given = small_run.GivenTask(arrays, lambda: builder(vocab_size=300, **tiny), task.loss)
        made = small_run.build(given, 2 if padded else 1)
        small_run.train(made)
        return {weight.path: small_run.copies(weight)[0] for weight in made.model.weights}

    padded = trained(True)
    for path, value in trained(False).items():
        np.testing.assert_allclose(padded[path], value, rtol=0, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    ("make", "arguments", "says"),
    [
        (pairs_task, {"label_smoothing": 1.0}, "translation.label_smoothing = 1.0"),
        (pairs_task, {"beam_size": 0}, "translation.beam_size = 0"),
        (pairs_task, {"length_penalty": -0.1}, "translation.length_penalty = -0.1"),
        (pairs_task, {"decode": "sometimes"}, "translation.decode = 'sometimes': must be"),
        (pairs_task, {"decode_examples": 0}, "translation.decode_examples = 0"),
        (corpus_task, {"label_smoothing": -0.1}, "language_modelling.label_smoothing = -0.1"),
        (corpus_task, {"max_new_tokens": 5}, "must be 1 to 4"),
        (corpus_task, {"temperature": -1.0}, "language_modelling.temperature = -1.0"),
        (corpus_task, {"top_p": 0.0}, "language_modelling.top_p = 0.0"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_refused(make, arguments, says):
    with pytest.raises(UsageError, match=says):
        make(**arguments)


def test_a_built_model_is_refused():
    model = transformer(vocab_size=300, layers=1, width=8, heads=2, hidden=8)
    with pytest.raises(UsageError, match="must be a reference without parentheses, such as @transformer"):
        Translation(data=TextPairs(Source(), vocab_size=300, max_length=8), model=model)
