"""Evaluation by decoding: every example once, the same score on any topology."""

from __future__ import annotations

import numpy as np
import pytest
import text_run
from building import build_session
from cases import repeated_but

from launcher.tasks.translation import Translation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    held_out = text_run.write_pairs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(folder / "data"))
        yield folder, held_out


def evaluated(folder, replicas, monkeypatch, *params):
    """What is scored: example to output, and the event; from untrained weights, the same each time."""
    bindings = [*text_run.pair_bindings(folder), "train.steps = 1", "translation.decode_examples = None", *params]
    made = build_session("transformer_cpu.gin", bindings, replicas)
    made.plan.data.check()
    seen = {}
    score = Translation.score

    def spy(self, examples, outputs):
        assert examples.tolist() == sorted(set(examples.tolist())), "every example once"
        seen.update(zip(examples.tolist(), map(tuple, outputs.tolist()), strict=True))
        return score(self, examples, outputs)

    monkeypatch.setattr(Translation, "score", spy)
    return seen, made.evaluator.evaluate(), made


@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_every_held_out_example_is_decoded_once_on_any_topology(folder, monkeypatch, beams):
    folder, held_out = folder
    beam = f"translation.beam_size = {beams}"
    seen, metrics, made = evaluated(folder, 1, monkeypatch, beam)
    assert sorted(seen) == list(range(len(held_out)))
    assert made.plan.data.eval_pairs == held_out
    assert {"loss", "accuracy", "bleu", "exact_match", "examples"} == metrics.keys()
    again, same, _ = evaluated(folder, 2, monkeypatch, beam, "train.eval_batch_size = 12")
    assert again == seen
    assert same["bleu"] == pytest.approx(metrics["bleu"]) and same["exact_match"] == metrics["exact_match"]


def test_what_is_scored_is_what_the_model_writes_right_or_wrong(folder):
    folder, held_out = folder
    made = build_session("transformer_cpu.gin", [*text_run.pair_bindings(folder), "train.steps = 1"])
    task = made.plan.recipe.task
    task.data().check()
    ids = np.zeros([len(held_out), 40], np.int32)
    for row, tokens in zip(ids, task.vocabulary.encode([target for _, target in held_out]), strict=True):
        row[: len(tokens) + 1] = [*tokens, 3]
    perfect = task.score(np.arange(len(held_out)), ids)
    assert perfect.metrics == {"bleu": pytest.approx(100.0), "exact_match": 1.0}
    half = ids.copy()
    half[::2, 0] = ids[::2, 1]
    assert task.score(np.arange(len(held_out)), half).metrics["exact_match"] < 0.6
    assert "smooth:exp" in perfect.notes[0], "the signature of sacrebleu"


DECODED = [("always", 5, 5), ("end", 0, 5), ("never", 0, 0)]


@pytest.mark.parametrize(("decode", "during", "last"), repeated_but([("end", 0, 5)], DECODED))
def test_when_and_how_many_are_decoded_is_bound(folder, decode, during, last):
    folder, _ = folder
    params = ("translation.beam_size = 1", "translation.decode_examples = 5", f"translation.decode = '{decode}'")
    best = ("train.best_metric = 'loss'",)
    made = build_session("transformer_cpu.gin", ["train.steps = 1", *text_run.pair_bindings(folder), *params, *best])
    task = made.plan.recipe.task
    task.data().check()
    assert (task.num_decode_examples(last=False), task.num_decode_examples(last=True)) == (during, last)
    assert ("bleu" in made.plan.recipe.task.evaluation_metrics) == (decode == "always")
    if last:
        assert "bleu" in made.evaluator.evaluate(last=True)
    if not during:
        assert "bleu" not in made.evaluator.evaluate(last=False)
