"""The programs in examples/, which are as Keras publishes them but for the call of `fit`, on every topology."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import repeated_but
from places import PYTHONPATH, ROOT

from launcher.reporting.metrics_file import read_events

PROGRAMS = (
    "image_classification",
    "transfer_learning",
    "text_classification",
    "two_losses",
    "structured_data",
    "clicks",
)
TOPOLOGIES = ((), ("--replicas=2",), ("--workers=2",))
# image_classification reads as transfer_learning; test_fit.py has two losses, test_keras_metrics_workers.py workers.
BY_DEFAULT = [
    ("transfer_learning", ("--replicas=2",)),
    ("text_classification", ()),
    ("structured_data", ()),
]


@pytest.fixture(scope="session")
def published(made_once) -> Path:
    import published_data

    return made_once("published", lambda folder: (folder.mkdir(), published_data.make(folder)))


def losses(folder: Path, split: str) -> list[float]:
    return [event["loss"] for event in read_events(folder) if event["split"] == split]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("program", "topology"), repeated_but(BY_DEFAULT, [(one, where) for one in PROGRAMS for where in TOPOLOGIES])
)
def test_a_program_trains_on_every_topology(program, topology, published, run_launcher, tmp_path):
    module = "launcher.launch" if "--workers=2" in topology else "launcher.main"
    command = (f"--gin_file={ROOT / 'examples' / program}.py", f"--model_dir={tmp_path / 'run'}", *topology)
    done = run_launcher(*command, module=module, cwd=published)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "run", "train")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit_code"] == 0
    assert summary["num_replicas"] == (2 if topology else 1)


STEP_BY_HAND = """
import launcher, step_by_hand as hand
from launcher.reporting.metrics_file import read_events
from launcher.step.precision import DynamicLossScale

hand.loss_scale.assign(2.0**22)
losses = hand.train(20)
run = launcher.fit(
    hand.build,
    (hand.images[:1280], hand.labels[:1280]),
    **dict(batch_size=64, shuffle=False, strategy=hand.strategy, log_every=1, verbose=0, model_dir="run"),
    loss_scale=DynamicLossScale(initial_scale=2.0**22),
)
events = [event for event in read_events(run.model_dir) if event["split"] == "train"]
assert [event["loss"] for event in events] == losses
assert 0 < events[-1]["skipped_steps"] < 10, events[-1]
for weight, by_hand in zip(run.model.get_weights(), hand.model.get_weights()):
    assert (weight == by_hand).all()
"""


def test_the_step_by_hand_is_the_step_that_trains_bit_for_bit_also_after_overflows(run_launcher, tmp_path):
    (tmp_path / "program.py").write_text(STEP_BY_HAND)
    done = run_launcher(module="program", env={"PYTHONPATH": f"{PYTHONPATH}:{ROOT}/examples"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
