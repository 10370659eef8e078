"""summary.json has the contract's fields, is strict and atomic; the stopwatch counts no second twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from launcher.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_RETRY
from launcher.reporting.summary import PHASES, Stopwatch, make_summary, write_summary


def summary_of(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "exit_code": 0,
        "error": None,
        "metrics": {"train": {"loss": np.float32(0.5)}, "eval": {"accuracy": 0.75}},
        "step": np.int64(400),
        "strategy": "mirrored",
        "num_replicas": 2,
        "policy": "mixed_float16",
        "loss_scale": 32768.0,
        "seconds": Stopwatch(clock=lambda: 0.0).seconds(),
    }
    return make_summary(**{**fields, **changes})


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


class FakeClock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


def test_the_summary_has_the_contracts_fields(tmp_path: Path) -> None:
    write_summary(str(tmp_path / "run"), summary_of())
    summary = written(tmp_path / "run")
    versions, seconds = summary.pop("versions"), summary.pop("seconds")
    assert summary == {
        "status": "completed",
        "exit_code": 0,
        "error": None,
        "metrics": {"train": {"loss": 0.5}, "eval": {"accuracy": 0.75}},
        "step": 400,
        "strategy": "mirrored",
        "num_replicas": 2,
        "policy": "mixed_float16",
        "loss_scale": 32768.0,
    }
    assert versions["tensorflow"] == tf.__version__
    assert versions["numpy"] == np.__version__
    assert set(versions) >= {"python", "keras"}
    assert list(seconds) == ["startup", "compile", "train", "input_wait", "evaluate", "checkpoint", "total"]


@pytest.mark.parametrize(
    ("exit_code", "status"), [(EXIT_PREEMPTED, "preempted"), (EXIT_FAILED, "failed"), (EXIT_RETRY, "failed")]
)
def test_the_status_follows_from_the_exit_code(exit_code: int, status: str) -> None:
    assert summary_of(exit_code=exit_code, error="why")["status"] == status


def test_a_loss_that_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    write_summary(str(tmp_path), summary_of(metrics={"train": {"loss": float("nan"), "accuracy": 0.5}}))
    summary = written(tmp_path)
    assert summary["metrics"] == {"train": {"loss": None, "accuracy": 0.5}, "eval": {}}
    assert summary["non_finite"] == ["metrics.train.loss"]


def test_a_summary_is_replaced_and_never_rewritten(tmp_path: Path) -> None:
    write_summary(str(tmp_path), summary_of(step=1))
    with open(tmp_path / "summary.json") as opened:
        write_summary(str(tmp_path), summary_of(step=2))
        assert json.load(opened)["step"] == 1
    assert written(tmp_path)["step"] == 2
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_summary(str(tmp_path), summary_of(step=1))
    with pytest.raises(TypeError):
        write_summary(str(tmp_path), summary_of(step=object()))
    assert written(tmp_path)["step"] == 1
    assert os.listdir(tmp_path) == ["summary.json"]


def test_phases_are_exclusive_and_the_total_has_it_all() -> None:
    clock = FakeClock()
    watch = Stopwatch(clock=clock, started=90.0)  # 10 s before the watch was made
    clock.pass_seconds(1)
    with watch.phase("checkpoint"):  # restoring is not starting
        clock.pass_seconds(2)
    clock.pass_seconds(4)
    watch.end_startup()
    clock.pass_seconds(8)  # in no phase
    with watch.phase("train"):
        clock.pass_seconds(16)
        with watch.phase("input_wait"):
            clock.pass_seconds(32)
        with watch.phase("evaluate"):
            clock.pass_seconds(64)
            with watch.phase("compile"):
                clock.pass_seconds(128)
        clock.pass_seconds(256)
    watch.end_startup()
    seconds = watch.seconds()
    assert seconds == {
        "startup": 10 + 1 + 4,
        "compile": 128,
        "train": 16 + 256,
        "input_wait": 32,
        "evaluate": 64,
        "checkpoint": 2,
        "total": 10 + 511,
    }
    assert sum(seconds[phase] for phase in PHASES) == seconds["total"] - 8


def test_a_phase_that_fails_or_is_still_open_is_counted() -> None:
    clock = FakeClock()
    watch = Stopwatch(clock=clock)
    watch.end_startup()
    with pytest.raises(RuntimeError), watch.phase("train"):
        clock.pass_seconds(1)
        assert watch.seconds()["train"] == 1
        clock.pass_seconds(2)
        raise RuntimeError
    clock.pass_seconds(4)
    assert watch.seconds()["train"] == 3


def test_a_wait_known_afterwards_is_moved_and_never_more_than_there_was() -> None:
    clock = FakeClock()
    watch = Stopwatch(clock=clock)
    with watch.phase("train"):
        clock.pass_seconds(10)
    watch.move(3, source="train", to="input_wait")
    assert (watch.seconds()["train"], watch.seconds()["input_wait"]) == (7, 3)
    watch.move(100, source="train", to="input_wait")
    assert (watch.seconds()["train"], watch.seconds()["input_wait"]) == (0, 10)


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="'lunch'"), Stopwatch().phase("lunch"):
        pass
