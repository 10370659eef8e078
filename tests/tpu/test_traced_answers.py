"""Evaluation and writing, too, are programs that a TPU can run: static shapes, no work for the host, few reductions."""

from __future__ import annotations

from typing import Any

import made_up_tpu
import numpy as np
import pytest
import replicated
import tensorflow as tf
from cases import repeated_but

from launcher.data.text.corpus import TextCorpus
from launcher.serving import predict

pytestmark = pytest.mark.slow

REPLICAS, ROWS = 8, 2
TRANSFORMER = ("transformer.layers = 1", "transformer.width = 128", "text_pairs.vocab_size = 512")
LANGUAGE_MODEL = ("language_model.layers = 1", "text_corpus.vocab_size = 512")
LSTM = ("lstm_language_model.layers = 1", "text_corpus.vocab_size = 512")
RECIPES = {
    "resnet_tpu.gin": ("resnet.depth = 8",),
    "transformer_tpu.gin": TRANSFORMER,
    "lm_tpu.gin": LANGUAGE_MODEL,
    "lstm_cpu.gin": LSTM,
}
ANSWERS = {
    "beam search": ("transformer_tpu.gin", TRANSFORMER),
    "greedy translation": ("transformer_cpu.gin", (*TRANSFORMER, "translation.beam_size = 1")),
    "sampling": ("lm_tpu.gin", LANGUAGE_MODEL),
    "greedy continuation": ("lm_cpu.gin", (*LANGUAGE_MODEL, "language_modelling.temperature = 0")),
    "sampling from an LSTM": ("lstm_cpu.gin", LSTM),
}


def built(strategy, recipe: str, params: tuple[str, ...]) -> Any:
    batch = 32 * REPLICAS if "resnet" in recipe else ROWS * REPLICAS
    sizes = (f"train.global_batch_size = {batch}", "train.eval_batch_size = None")
    return made_up_tpu.build(strategy, made_up_tpu.resolve(recipe, [*params, *sizes], REPLICAS))


def graph_of(function) -> list[replicated.Operation]:
    def traced() -> Any:  # by a name: TensorFlow makes one for the replicas of the function's
        return function()

    return replicated.operations(tf.function(traced, autograph=False).get_concrete_function())


def batches(made, stand_in: made_up_tpu.StandIn) -> Any:
    return iter(made.runtime.batches(stand_in.batches, global_batch_size=made.plan.eval_batch_size))


@pytest.mark.parametrize("recipe", repeated_but(["transformer_tpu.gin"], RECIPES))
def test_an_evaluation_is_one_program_with_one_reduction(recipe, monkeypatch):
    monkeypatch.setattr(TextCorpus, "bytes_per_token", 4.0)  # of text that is not here
    with made_up_tpu.strategy(REPLICAS) as strategy:
        made = built(strategy, recipe, RECIPES[recipe])
        stand_in = made_up_tpu.training_shapes(made.plan)
        found = graph_of(
            lambda: made.evaluator._batches.program(made.runtime).run(batches(made, stand_in), tf.constant(3))
        )
    assert replicated.faults(found) == []
    sums = 2 + len(made.evaluator._metric_names)
    assert replicated.reductions(found) == {("float32", sums): 1}
    assert replicated.loops_around(found) == {("While.body",)}


@pytest.mark.parametrize("decoding", repeated_but(["beam search"], ["beam search", "greedy translation"]))
def test_translations_to_be_judged_are_written_by_one_program_without_reductions(decoding):
    with made_up_tpu.strategy(REPLICAS) as strategy:
        made = built(strategy, *ANSWERS[decoding])
        length = made.plan.data.max_length
        held_out = {"source": ((length,), tf.int32), "example": ((), tf.int64), "weight": ((), tf.float32)}
        function = made.evaluator._decoding.batches.program(made.runtime).run
        found = graph_of(lambda: function(next(batches(made, made_up_tpu.StandIn(held_out)))))
    assert replicated.faults(found) == []
    assert replicated.reductions(found).total() == 0


@pytest.mark.parametrize("decoding", repeated_but(["beam search", "sampling", "sampling from an LSTM"], ANSWERS))
def test_answers_to_lines_are_written_by_one_program_without_reductions(decoding):
    with made_up_tpu.strategy(REPLICAS) as strategy:
        made = built(strategy, *ANSWERS[decoding])
        name = "source" if hasattr(made.plan.data, "packed") else "prompt"
        lines = made.runtime.batch_of({name: np.ones([ROWS * REPLICAS, 16], np.int32)})
        found = graph_of(lambda: predict.on_all_replicas(made, made.plan.recipe.task.generate).run(lines))
    assert replicated.faults(found) == []
    assert replicated.reductions(found).total() == 0


def test_the_layers_of_a_skipped_step_are_named_by_one_program():
    with made_up_tpu.strategy(REPLICAS) as strategy:
        made = built(strategy, "resnet_cpu.gin", ("resnet.depth = 8", f"train.bucket_bytes = {2**26}"))
        stand_in = made_up_tpu.training_shapes(made.plan)
        named = made.runtime.on_replicas(made.trainer.replica_step.non_finite)
        found = graph_of(lambda: named(next(batches(made, stand_in))))
    assert replicated.faults(found) == []
    assert replicated.reductions(found).total() == 2
