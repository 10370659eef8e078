"""The output of a prediction: whole in its place, or not there."""

from __future__ import annotations

import numpy as np
import pytest

from launcher.errors import UsageError
from launcher.serving import predict


def test_arrays_are_written_row_by_row(tmp_path):
    rows = {"one": np.arange(12, dtype=np.float32).reshape(6, 2), "two": np.arange(6, dtype=np.int64)}
    output = predict.AnswerArrays(tmp_path, str(tmp_path / "out.npz"), 6)
    for part in (slice(0, 5), slice(5, 6)):
        output.append({name: array[part] for name, array in rows.items()})
    output.finish()
    found = np.load(tmp_path / "out.npz")
    for name, array in rows.items():
        np.testing.assert_array_equal(found[name], array)


def test_what_an_attempt_left_is_gone_before_and_after_the_next(tmp_path):
    path = str(tmp_path / "out")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "answers").write_text("a\n")
    with predict.partial_folder(path) as folder:
        assert list(folder.iterdir()) == []
    assert not folder.exists()


def test_one_npy_file_does_not_hold_two_outputs(tmp_path):
    output = predict.AnswerArrays(tmp_path, "out.npy", 2)
    with pytest.raises(UsageError, match=r"name a \.npz file for one, two"):
        output.append({"one": np.zeros(2), "two": np.zeros(2)})
