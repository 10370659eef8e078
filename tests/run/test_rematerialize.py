"""`train.rematerialize` on the command line: the same training, resumed with and without it, and what is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import text_run

from launcher import main as entry
from launcher.checkpoints import CheckpointStore

DROPPED = ("language_model.dropout = 0.3", "language_model.attention_dropout = 0.3", "adamw.learning_rate = 1e-3")
SMALL = ("language_model.layers = 1", "language_model.width = 24")


@pytest.fixture
def launch(capsys, tmp_path, monkeypatch):
    """launch(recipe, *flags and bindings): exit code, standard output and error."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))

    def run(recipe, *words):
        flags = [word if word.startswith("--") else f"--gin_param={word}" for word in words]
        code = entry.main(["launcher", f"--gin_file={recipe}", *flags])
        return code, *capsys.readouterr()

    return run


@pytest.mark.heavy
@pytest.mark.nightly
def test_a_run_goes_on_with_it_and_without_as_if_it_had_never_changed(launch, tmp_path):
    text_run.write_corpus(tmp_path)
    recipe = (*text_run.corpus_bindings(tmp_path), *DROPPED, "Checkpoints.save_model = 'none'")
    recipe = (*recipe, "train.loss_chunks = 2", "train.attention = 'blocks'", "train.checkpoint_every = 2")

    def train(folder, steps, rematerialize):
        flags = ("--mode=train", f"--model_dir={tmp_path}/{folder}", f"train.steps = {steps}")
        code, out, err = launch("lm_cpu.gin", *flags, *recipe, f"train.rematerialize = {rematerialize}")
        assert code == 0, err
        events = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        losses = [event["loss"] for event in events if event["split"] == "train"]
        return losses, CheckpointStore(f"{tmp_path}/{folder}/checkpoints").read(steps), out

    losses, state, out = train("without", 6, None)
    assert "rematerialisation" not in out
    shutil.copytree(tmp_path / "without", tmp_path / "changed")
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"changed/checkpoints/step_{step:08}")
    assert "rematerialisation  on (train.rematerialize)" in train("changed", 4, True)[2]
    resumed, found, _ = train("changed", 6, False)
    np.testing.assert_allclose(resumed, losses, rtol=1e-6)
    assert found.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("recipe", "bindings", "message"),
    [
        ("lm_cpu.gin", (*SMALL, "train.rematerialize = 'maybe'"), "expected bool | Literal['auto'] | None, got str"),
        ("lm_cpu.gin", (*SMALL, "train.rematerialize = 3"), "expected bool | Literal['auto'] | None, got int"),
        (
            "resnet_cpu.gin",
            ("resnet.depth = 8", "train.rematerialize = 'auto'"),
            "train.rematerialize = 'auto': resnet8 has no layer that can compute its activations again",
        ),
        ("resnet_cpu.gin", ("resnet.depth = 8", "train.rematerialize = False"), "resnet8 has no layer that can"),
    ],
)
def test_what_cannot_be_is_refused(launch, recipe, bindings, message):
    code, _, err = launch(recipe, "--dry_run", *bindings)
    assert code == 64
    assert message in err
    assert "Traceback" not in err


def test_the_plan_tells_that_it_is_still_open(launch):
    code, out, err = launch("lm_cpu.gin", "--dry_run", *SMALL, "train.rematerialize = 'auto'")
    assert code == 0, err
    assert "off (auto: whether the step fits without is found when training starts, or by preflight)" in out
