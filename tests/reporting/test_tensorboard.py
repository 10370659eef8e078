"""TensorBoard's own readers get back what was logged, once, also after a resume."""

from __future__ import annotations

import base64
import logging
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from launcher.reporting.sinks import PICTURE, RunStart, Sinks
from launcher.reporting.tensorboard import TensorBoard

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def curve(directory: Path, run: str, tag: str) -> list[tuple[int, float]]:
    accumulator = event_accumulator.EventAccumulator(str(directory / run), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(point.step, point.value) for point in accumulator.Scalars(tag)]


def test_curves_come_back_by_split(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path))
    for step in (10, 20):
        board.train({"step": step, "loss": np.float32(1 / step), "accuracy": tf.constant(0.5), "skipped_steps": 1})
    board.evaluation({"step": 20, "loss": 0.25})
    # Read while the writer is open: every event is flushed.
    assert curve(tmp_path, "train", "loss") == [(10, np.float32(0.1)), (20, np.float32(0.05))]
    assert curve(tmp_path, "train", "skipped_steps") == [(10, 1.0), (20, 1.0)]
    assert curve(tmp_path, "eval", "loss") == [(20, 0.25)]
    board.close()


def test_any_reader_of_event_files_can_read_them(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path), clock=lambda: 1700000000.25)
    board.train({"step": 3, "loss": 0.5})
    board.close()
    (path,) = (tmp_path / "train").iterdir()
    records = tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
    version, event = (tf.compat.v1.Event.FromString(record) for record in records)
    assert version.file_version == "brain.Event:2"
    assert (event.step, event.wall_time) == (3, 1700000000.25)
    assert [(value.tag, value.simple_value) for value in event.summary.value] == [("loss", 0.5)]


def test_samples_are_texts_and_images_of_the_evaluation(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path))
    picture = tf.io.encode_png(tf.constant([[[0], [255], [7]]], tf.uint8)).numpy()
    shown = PICTURE + base64.b64encode(picture).decode()
    board.samples(5, [("ein Tag", "one | day", "a day")])
    board.samples(9, [(shown, "3", "8"), (shown, "4", "4")])
    accumulator = event_accumulator.EventAccumulator(str(tmp_path / "eval"), size_guidance={"tensors": 0})
    accumulator.Reload()
    assert {tag: kind.plugin_data.plugin_name for tag, kind in accumulator.summary_metadata.items()} == {
        "samples": "text",
        "pictures": "images",
    }
    texts = [(found.step, found.tensor_proto.string_val[0].decode()) for found in accumulator.Tensors("samples")]
    assert [step for step, _ in texts] == [5, 9]
    assert "| ein Tag | one \\| day | a day |" in texts[0][1]
    assert "| 1 | 3 | 8 |\n| 2 | 4 | 4 |" in texts[1][1]
    (images,) = accumulator.Tensors("pictures")
    assert list(images.tensor_proto.string_val) == [b"3", b"1", picture, picture]


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    def attempt(first_step: int, last_step: int) -> None:
        board = TensorBoard(str(tmp_path), clock=lambda: 1700000000.0)  # A clock that stands still, or was set back.
        board.truncate_after(first_step)
        for step in range(first_step + 1, last_step + 1):
            board.train({"step": step, "loss": float(first_step)})
        board.evaluation({"step": last_step, "loss": float(first_step)})

    attempt(0, 5)
    attempt(3, 7)
    attempt(6, 8)
    train = [(1, 0.0), (2, 0.0), (3, 0.0), (4, 3.0), (5, 3.0), (6, 3.0), (7, 6.0), (8, 6.0)]
    assert curve(tmp_path, "train", "loss") == train
    assert curve(tmp_path, "eval", "loss") == [(8, 6.0)]  # Those at 5 and 7 lay past the resumed steps 3 and 6.


def test_points_past_the_resumed_step_are_forgotten_before_any_new_one(tmp_path: Path) -> None:
    first = TensorBoard(str(tmp_path))
    for step in (1, 2, 3):
        first.train({"step": step, "loss": 0.0})
    TensorBoard(str(tmp_path)).truncate_after(2)
    assert curve(tmp_path, "train", "loss") == [(1, 0.0), (2, 0.0)]


def test_nothing_is_made_before_the_first_event(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path / "tensorboard"))
    board.truncate_after(3)
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_a_board_that_cannot_be_written_is_told_once_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    run = RunStart(model_dir=str(tmp_path), plan={}, config="", step=0, total_steps=3)
    sinks = Sinks([TensorBoard(str(tmp_path / "tensorboard"))], lambda: run)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            sinks.tell("train", {"step": step, "loss": 0.0})
        sinks.close()
    assert len(caplog.messages) == 2
    assert "TensorBoard lacks events of this run: its train() raised NotADirectoryError" in caplog.messages[0]
    assert caplog.messages[1] == "TensorBoard lacks 3 events of this run"
