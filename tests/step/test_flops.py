"""FLOPs of a step, against counts made by hand."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf
import text_run
from building import build_session
from places import SMALL_DIGITS

from launcher import main as entry
from launcher.machine.accelerators import card_of
from launcher.run.actions import base
from launcher.step import flops

pytestmark = pytest.mark.slow

# Forward and by the weights in both layers of 64 -> 32 -> 10; by the inputs in the second alone.
OF_EXAMPLE = 2 * (2 * 64 * 32 + 3 * 32 * 10)

ROWS, LENGTH, WIDTH, HIDDEN, LAYERS = 8, 32, 16, 48, 2
SCORES = 2 * ROWS * LENGTH * LENGTH * WIDTH
# Of one block: query, key, value and output; scores and what they weigh; the three matrices of SwiGLU.
FORWARD = 2 * ROWS * LENGTH * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN) + 2 * SCORES


@pytest.mark.parametrize(
    "bindings",
    [pytest.param((), marks=pytest.mark.nightly), ("train.microbatches = 4",), ("train.jit_compile = True",)],
)
def test_the_products_of_a_step_are_counted_whatever_it_is_cut_in(bindings):
    session = build_session(SMALL_DIGITS, bindings)
    session.trainer.trace(session.trainer.batches(session.plan.data))
    assert session.trainer.matrix_flops() == flops.Flops(64 * OF_EXAMPLE, 64 * OF_EXAMPLE)


def count(function, *shapes, loops=0):
    traced = tf.function(function).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes))
    found = flops.count(traced.graph, loops)
    return found and found.hardware


def test_each_kind_of_product_counts_its_multiply_adds_twice():
    assert count(lambda a, b: tf.matmul(a, b, transpose_a=True), [3, 2], [3, 5]) == 2 * 2 * 3 * 5
    assert count(lambda a, b: tf.matmul(a, b), [7, 2, 3], [7, 3, 5]) == 2 * 7 * 2 * 3 * 5
    assert count(lambda a, b: tf.einsum("bij,bjk->bik", a, b), [7, 2, 3], [7, 3, 5]) == 2 * 7 * 2 * 3 * 5
    assert count(lambda a, b: tf.nn.conv2d(a, b, 2, "SAME"), [4, 8, 8, 3], [3, 3, 3, 6]) == 2 * (4 * 4 * 4 * 6) * 27


def test_a_convolutions_backward_pass_costs_what_its_forward_pass_does_each_time():
    def both(images, kernel):
        with tf.GradientTape() as tape:
            tape.watch([images, kernel])
            result = tf.nn.conv2d(images, kernel, 1, "VALID")
        return tape.gradient(result, [images, kernel])

    assert count(both, [4, 8, 8, 3], [3, 3, 3, 6]) in (2 * 2 * (4 * 6 * 6 * 6) * 27, 3 * 2 * (4 * 6 * 6 * 6) * 27)


def test_what_is_not_known_before_it_runs_is_not_guessed():
    assert count(lambda a, b: tf.matmul(a, b), [None, 2], [2, 5]) is None

    def loop(a):
        return tf.while_loop(lambda b: tf.reduce_sum(b) < 9.0, lambda b: (tf.matmul(b, b),), (a,))

    def steps_of_two(a):
        return tf.while_loop(lambda i, b: i < 6, lambda i, b: (i + 2, tf.matmul(b, b)), (0, a))

    assert count(loop, [3, 3]) is None
    assert count(steps_of_two, [3, 3]) is None
    assert count(loop, [3, 3], loops=4) == 4 * 2 * 27


def test_loops_that_count_to_a_constant_tell_how_often_they_turn():
    def loop(a):
        def inner(b):
            return tf.while_loop(lambda i, c: i < 3, lambda i, c: (i + 1, tf.matmul(c, c)), (0, b))[1]

        return tf.while_loop(lambda i, b: i < 5, lambda i, b: (i + 1, inner(b)), (0, a))

    assert count(loop, [2, 2]) == 5 * 3 * 2 * 8


def test_the_gradient_of_a_loop_turns_as_often_as_the_loop():
    def state(a):
        with tf.GradientTape() as tape:
            tape.watch(a)
            last = tf.scan(lambda state, _: tf.tanh(tf.matmul(state, a)), tf.zeros([6, 1]), tf.ones([4, 3]))[-1]
        return tape.gradient(last, a)

    # In each turn a product, its gradient by the state and that by the matrix.
    assert count(state, [3, 3]) == 6 * 3 * (2 * 4 * 3 * 3)


@pytest.mark.parametrize(
    ("bindings", "again"),
    [
        pytest.param((), 0, marks=pytest.mark.nightly),
        (("train.rematerialize = True",), LAYERS * FORWARD),
        pytest.param(("train.attention = 'blocks'",), LAYERS * SCORES, marks=pytest.mark.nightly),
        pytest.param(
            ("train.attention = 'blocks'", "train.rematerialize = True", "train.microbatches = 2"),
            LAYERS * (FORWARD + SCORES),
            marks=pytest.mark.nightly,
        ),
        pytest.param(("train.loss_chunks = 4",), 0, marks=pytest.mark.nightly),
    ],
)
def test_what_the_backward_pass_computes_again_is_no_part_of_the_models_flops(tmp_path, bindings, again):
    text_run.write_corpus(tmp_path)
    sizes = {"text_corpus.length": LENGTH, "train.global_batch_size": ROWS, "language_model.layers": LAYERS}
    sizes |= {"language_model.width": WIDTH, "language_model.hidden": HIDDEN, "language_model.heads": 2}
    sizes |= {"language_model.kv_heads": 2, "language_model.dropout": 0.0, "language_model.smeared_keys": False}
    given = [f"{name} = {value}" for name, value in sizes.items()]
    session = build_session("lm_cpu.gin", (*text_run.corpus_bindings(tmp_path), *given, *bindings))
    session.trainer.trace(session.trainer.batches(session.plan.data))
    words = session.model.embedding.embeddings.shape[0]
    model = 3 * (LAYERS * FORWARD + 2 * ROWS * LENGTH * WIDTH * words)  # each product and its two gradients
    assert session.trainer.matrix_flops() == flops.Flops(model, model + again)


def test_a_runs_events_tell_flops_per_second_and_without_a_known_peak_no_share_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "COUNT_AFTER_SECONDS", 0.0)
    flags = [f"--gin_file={SMALL_DIGITS}", "--gin_param=train.steps = 20", "--mode=train", f"--model_dir={tmp_path}"]
    assert entry.main(["launcher", *flags]) == 0
    for event in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        assert event["flops_per_second"] == pytest.approx(OF_EXAMPLE * event["examples_per_second"])
        assert "mfu" not in event


def test_peaks_are_found_by_the_drivers_names():
    assert card_of("NVIDIA H100 80GB HBM3").tensor_flops.value == 989e12
    assert card_of("NVIDIA H100 PCIe").tensor_flops.value == 756e12
    assert card_of("NVIDIA A100-SXM4-80GB").tensor_flops.value == 312e12
    assert card_of("NVIDIA L40S").tensor_flops.value == 362.05e12
    assert card_of("NVIDIA GB200").tensor_flops.value == 2500e12
    assert card_of("Tesla V100-SXM2-16GB").tensor_flops.value == 125e12
    assert card_of("NVIDIA L40") is None


def test_a_loop_with_a_gradient_inside_a_function_is_counted():
    @tf.function(autograph=False, jit_compile=True)
    def inner(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            _, y = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, h @ w), (0, x), maximum_iterations=3)
        return tape.gradient(y, w)

    def outer(x, w):
        return inner(x, w)

    graph = (
        tf.function(outer, autograph=False).get_concrete_function(tf.TensorSpec([4, 8]), tf.TensorSpec([8, 8])).graph
    )
    assert flops.count(graph, [1]) == flops.Flops(*[3 * 3 * 2 * 4 * 8 * 8] * 2)
