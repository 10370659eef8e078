"""A tiny run from training to lines, and to a SavedModel that a process without this package uses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import text_run
from cases import repeated_but
from places import ROOT

from launcher import main as entry
from launcher.config import gin_bindings

LINES = ["abc", "h", "", "what is not in the vocabulary: é, \U0001f389", "ga"]

LOADS = """
import json, sys
assert not any(path.endswith({root!r}) for path in sys.path)
import tensorflow as tf
served = tf.saved_model.load(sys.argv[1])
assert not any(name.split(".")[0] in ("launcher", "models", "sentencepiece", "keras_hub") for name in sys.modules)
answers = served.signatures["serving_default"](text=tf.constant(json.loads(sys.argv[2])))["text"]
print(json.dumps([answer.decode() for answer in answers.numpy()]))
"""


@pytest.fixture(scope="module", params=repeated_but(["translation"], ["translation", "language_modelling"]))
def run(request, tmp_path_factory):
    """(flags of the run, its folder) after a few steps of training."""
    folder = tmp_path_factory.mktemp("served")
    if request.param == "translation":
        text_run.write_pairs(folder)
        recipe, bindings = "transformer_cpu.gin", text_run.pair_bindings(folder)
        bindings += ["translation.decode_examples = 7", "translation.beam_size = 2"]
    else:
        text_run.write_corpus(folder)
        recipe, bindings = "lm_cpu.gin", text_run.corpus_bindings(folder)
    flags = [f"--gin_file={recipe}", f"--model_dir={folder}/run", f"--data_dir={folder}/data"]
    flags += [
        f"--gin_param={binding}"
        for binding in [*bindings, "train.steps = 30", "cosine.peak = 1e-2", "train.log_every = 10"]
    ]
    trained = launch(*flags)
    assert trained.returncode == 0, trained.stderr
    return flags, folder, trained.stdout


def launch(*flags):
    """`launcher.main` in this process: exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.dict(os.environ):
        code = entry.main(["launcher", *flags])
    gin_bindings.reset()
    return types.SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def without_data(flags, folder: Path):
    """The same recipe where the data is not: nothing but MODEL_DIR is there."""
    return [flag.replace(f"--data_dir={folder}/data", f"--data_dir={folder}/nowhere") for flag in flags]


@pytest.mark.heavy
def test_a_run_is_evaluated_keeps_its_vocabulary_answers_lines_and_is_exported(run, tmp_path):
    flags, folder, printed = run
    summary = json.loads((folder / "run/summary.json").read_text())
    evaluation = summary["metrics"]["eval"]
    assert (folder / "run/assets/vocabulary.model").stat().st_size > 1000
    if "bleu" in evaluation:
        assert 0 <= evaluation["exact_match"] <= 1 and "7 held-out translations (beam 2" in printed
        assert "version:" in printed, "sacrebleu's signature says how BLEU was computed"
    else:
        assert evaluation["perplexity"] == pytest.approx(2.718281828 ** evaluation["loss"], rel=1e-6)
        assert 0 < evaluation["bits_per_byte"] < 20

    (tmp_path / "lines").write_text("\n".join(LINES) + "\n")
    to_file = launch(
        *without_data(flags, folder), "--mode=predict", f"--input={tmp_path}/lines", f"--output={tmp_path}/answers"
    )
    assert to_file.returncode == 0, to_file.stderr
    answers = (tmp_path / "answers").read_text().splitlines()
    assert len(answers) == len(LINES) and any(answers)

    exported = launch(*without_data(flags, folder), "--mode=export", f"--export_dir={tmp_path}/saved")
    assert exported.returncode == 0, exported.stderr
    loaded = subprocess.run(
        [sys.executable, "-c", LOADS.format(root=ROOT.name), f"{tmp_path}/saved", json.dumps(LINES)],
        capture_output=True, text=True, cwd=tmp_path, timeout=400,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr
    served = [" ".join(answer.splitlines()) for answer in json.loads(loaded.stdout.splitlines()[-1])]
    if "bleu" in evaluation:
        assert served == answers
    else:  # sampling depends on the row, and the prompts are padded to other lengths: the draws are the same
        assert served == answers
