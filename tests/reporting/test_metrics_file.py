"""metrics.jsonl: strict JSON, fields in order, each step once whatever was killed."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import launcher
from launcher.errors import EXIT_RETRY
from launcher.reporting.metrics_file import MetricsFile, MetricsWriteError, read_events

TRAIN = {
    "input_wait_fraction": 0.01,
    "learning_rate": np.float32(0.5),
    "accuracy": tf.constant(0.25),
    "step": np.int64(10),
    "loss": 2.5,
    "loss_scale": 32768.0,
    "skipped_steps": 1,
    "gradient_norm": 3.5,
    "examples_per_second": 100.0,
}


def lines_of(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def steps_of(folder: Path) -> list[tuple[int, str]]:
    return [(event["step"], event["split"]) for event in read_events(str(folder))]


def filled(folder: Path) -> MetricsFile:
    """A file with training at 1, 2, ... 6 and evaluations at 2, 4 and 6."""
    metrics = MetricsFile(str(folder))
    for step in range(1, 7):
        metrics.append("train", {"step": step, "loss": 1.0 / step})
        if step % 2 == 0:
            metrics.append("eval", {"step": step, "loss": 1.0 / step})
    return metrics


def test_fields_have_the_contracts_names_and_order(tmp_path: Path) -> None:
    metrics = MetricsFile(str(tmp_path), clock=lambda: 1700000000.5)
    metrics.append("train", TRAIN)
    metrics.append("eval", {"accuracy": 0.5, "step": 10, "loss": 1.0})
    train, evaluation = map(json.loads, lines_of(tmp_path))
    assert list(train.items()) == [
        ("step", 10),
        ("split", "train"),
        ("loss", 2.5),
        ("accuracy", 0.25),
        ("learning_rate", 0.5),
        ("loss_scale", 32768.0),
        ("skipped_steps", 1),
        ("gradient_norm", 3.5),
        ("examples_per_second", 100.0),
        ("input_wait_fraction", 0.01),
        ("time", 1700000000.5),
    ]
    assert list(evaluation) == ["step", "split", "loss", "accuracy", "time"]
    assert evaluation["split"] == "eval"


def test_non_finite_values_are_null_and_named(tmp_path: Path) -> None:
    MetricsFile(str(tmp_path)).append(
        "train", {"step": 1, "loss": float("nan"), "gradient_norm": np.float32("inf"), "accuracy": 0.0}
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    event = json.loads(lines_of(tmp_path)[0], parse_constant=refuse)
    assert (event["loss"], event["gradient_norm"], event["accuracy"]) == (None, None, 0.0)
    assert event["non_finite"] == ["loss", "gradient_norm"]


def test_an_event_can_be_read_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    metrics = MetricsFile(str(tmp_path))
    for step in (1, 2):
        metrics.append("train", {"step": step, "loss": 0.0})
        assert steps_of(tmp_path)[-1] == (step, "train")


def test_nothing_is_made_before_the_first_event(tmp_path: Path) -> None:
    metrics = MetricsFile(str(tmp_path / "run"))
    assert metrics.truncate_after(0) == 0
    metrics.flush()
    assert list(tmp_path.iterdir()) == []
    assert read_events(str(tmp_path / "run")) == []


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    filled(tmp_path)
    resumed = MetricsFile(str(tmp_path))
    assert resumed.truncate_after(4) == 3
    for step in (5, 6):
        resumed.append("train", {"step": step, "loss": 0.0})
    resumed.append("eval", {"step": 6, "loss": 0.0})
    once = [(1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval")]
    assert steps_of(tmp_path) == [*once, (5, "train"), (6, "train"), (6, "eval")]


def test_truncating_keeps_the_kept_lines_as_they_were(tmp_path: Path) -> None:
    metrics = filled(tmp_path)
    before = lines_of(tmp_path)
    metrics.truncate_after(2)
    assert lines_of(tmp_path) == before[:3]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_open_reader_never_sees_a_file_being_rewritten(tmp_path: Path) -> None:
    metrics = filled(tmp_path)
    with open(tmp_path / "metrics.jsonl") as opened:
        metrics.truncate_after(0)
        assert len(opened.readlines()) == 9
    assert lines_of(tmp_path) == []


@pytest.mark.parametrize("truncating", [True, False])
def test_half_a_last_line_is_passed_over_and_dropped(tmp_path: Path, truncating: bool) -> None:
    filled(tmp_path)
    whole = lines_of(tmp_path)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 7, "split": "train", "l')
    assert len(read_events(str(tmp_path))) == 9
    metrics = MetricsFile(str(tmp_path))
    if truncating:
        assert metrics.truncate_after(100) == 1
    metrics.append("train", {"step": 7, "loss": 0.0})
    assert [line for line in lines_of(tmp_path) if line.endswith("}")][:-1] == whole
    assert len(lines_of(tmp_path)) == 10 + (not truncating)
    assert steps_of(tmp_path)[-1] == (7, "train")


@pytest.mark.parametrize("truncating", [True, False])
def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path, truncating: bool) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "split": "eval", "loss": 1.0, "time": 0.0}')
    metrics = MetricsFile(str(tmp_path))
    if truncating:
        assert metrics.truncate_after(6) == 0
    metrics.append("train", {"step": 7, "loss": 0.0})
    assert steps_of(tmp_path) == [(6, "eval"), (7, "train")]


PROGRAM = """
import itertools, sys
from launcher.reporting.metrics_file import MetricsFile
metrics = MetricsFile(sys.argv[1])
for step in itertools.count():
    metrics.append("train", {"step": step, "loss": 1.0, "accuracy": 0.5})
    if step == 1000:
        print("going", flush=True)
"""


def test_a_kill_leaves_consecutive_whole_events(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    root = str(Path(launcher.__file__).parents[1])
    with subprocess.Popen(command, env={"PYTHONPATH": root}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    MetricsFile(str(tmp_path)).append("train", {"step": -1, "loss": 0.0})
    steps = [json.loads(line)["step"] for line in lines_of(tmp_path)]
    assert steps == [*range(len(steps) - 1), -1]


def test_a_line_that_does_not_fit_is_an_error_and_leaves_whole_lines(tmp_path: Path) -> None:
    metrics = filled(tmp_path)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with pytest.raises(MetricsWriteError, match=r"Could not write .*metrics\.jsonl: No space left") as caught:
            metrics.append("train", {"step": 7, "loss": 0.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.exit_code == EXIT_RETRY
    assert (tmp_path / "metrics.jsonl").stat().st_size == size
    metrics.append("train", {"step": 8, "loss": 0.0})
    assert steps_of(tmp_path)[-2:] == [(7, "train"), (8, "train")]


def test_forgetting_later_steps_needs_no_room(tmp_path: Path) -> None:
    metrics = filled(tmp_path)
    whole = lines_of(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        assert metrics.truncate_after(steps_of(tmp_path)[4][0]) > 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < len(lines_of(tmp_path)) < len(whole)
    assert lines_of(tmp_path) == whole[: len(lines_of(tmp_path))]


def test_an_unwritable_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MetricsWriteError, match="run the same command again"):
        MetricsFile(str(tmp_path / "file")).append("train", {"step": 1, "loss": 0.0})


def test_a_measurement_is_one_number(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="one number"):
        MetricsFile(str(tmp_path)).append("train", {"step": 1, "loss": "low"})
