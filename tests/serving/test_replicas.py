"""A batch of lines is divided among the replicas, and its answers are put together in the order of the lines."""

from __future__ import annotations

import numpy as np
import pytest
import text_run
from building import build_session

from launcher.serving import predict

LINES = ["abc", "h", "", "ga", "abcd", "b", "hh", "gab"]


@pytest.mark.parametrize("beams", [1, 2])
def test_two_replicas_write_what_one_writes(beams, tmp_path, monkeypatch):
    text_run.write_pairs(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    bindings = [*text_run.pair_bindings(tmp_path), f"translation.beam_size = {beams}"]
    answers = []
    for replicas in (1, 2):
        made = build_session("transformer_cpu.gin", bindings, replicas)
        task = made.plan.recipe.task
        write = predict.writer(made)
        answers.append(write(task.encode_lines(LINES)))
        assert task.decode_lines(write(task.encode_lines(LINES[::-1])))[::-1] == task.decode_lines(answers[-1])
    np.testing.assert_array_equal(*answers)
    assert answers[0].shape[0] == len(LINES) and len({tuple(row) for row in answers[0]}) > 1
