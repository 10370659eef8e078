"""What belongs to the weights: kept once, whole, and compared by a run that goes on."""

from __future__ import annotations

import types

import pytest
import text_run

from launcher.errors import UsageError
from launcher.run.start import assets
from launcher.tasks.base import Task


def task(content: bytes):
    return types.SimpleNamespace(assets=lambda: {"vocabulary.model": content})


def test_assets_are_kept_as_they_are_and_nothing_else_is_left(tmp_path):
    assets.save(str(tmp_path), task(b"one"))
    assert assets.read(str(tmp_path)) == {"vocabulary.model": b"one"}
    assert [path.name for path in (tmp_path / "assets").iterdir()] == ["vocabulary.model"]


def test_what_a_run_has_kept_is_never_overwritten(tmp_path):
    assets.save(str(tmp_path), task(b"one"))
    assets.save(str(tmp_path), task(b"two"))
    assert assets.read(str(tmp_path)) == {"vocabulary.model": b"one"}


def test_other_assets_than_the_weights_were_trained_with_are_refused(tmp_path):
    assets.check(str(tmp_path), task(b"one"))
    assets.save(str(tmp_path), task(b"one"))
    assets.check(str(tmp_path), task(b"one"))
    with pytest.raises(
        UsageError, match=r"vocabulary\.model is not what the data gives now.*choose another --model_dir"
    ):
        assets.check(str(tmp_path), task(b"two"))


def test_a_task_without_assets_has_none(tmp_path):
    assets.save(str(tmp_path), Task())
    assets.check(str(tmp_path), Task())
    assert assets.read(str(tmp_path)) == {}
    assert not (tmp_path / "assets").exists()


@pytest.mark.heavy
def test_a_run_on_other_text_is_refused_by_the_vocabulary(run_launcher, tmp_path):
    text_run.write_corpus(tmp_path)
    bindings = [*text_run.corpus_bindings(tmp_path), "train.steps = 1", "Checkpoints.save_model = 'none'"]
    flags = ["--gin_file=lm_cpu.gin", f"--model_dir={tmp_path}/run", f"--data_dir={tmp_path}/data"]
    flags += ["--mode=train", *(f"--gin_param={binding}" for binding in bindings)]
    assert run_launcher(*flags).returncode == 0
    with (tmp_path / "train.txt").open("a") as text:
        text.write("another line\n" * 50)
    refused = run_launcher(*flags, "--gin_param=Checkpoints.on_changed_data = 'continue'")
    assert refused.returncode == 64
    assert "is not what the data gives now" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.nightly  # as replicas do, test_decoding_evaluator.py
@pytest.mark.heavy
def test_two_workers_decode_every_example_once_and_agree(run_workers, tmp_path):
    text_run.write_pairs(tmp_path)
    bindings = [*text_run.pair_bindings(tmp_path), "train.steps = 2", "translation.decode_examples = None"]
    bindings += ["translation.beam_size = 1", "Checkpoints.save_model = 'none'"]
    flags = ["--gin_file=transformer_cpu.gin", f"--model_dir={tmp_path}/run", f"--data_dir={tmp_path}/data"]
    workers = run_workers(2, *flags, *(f"--gin_param={binding}" for binding in bindings))
    assert [worker.returncode for worker in workers] == [0, 0], workers[0].stderr + workers[1].stderr
    assert "23 held-out translations" in workers[0].stdout
    assert "exact_match" in (tmp_path / "run/metrics.jsonl").read_text()
