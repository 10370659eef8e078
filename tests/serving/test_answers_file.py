"""Partial answers: what is kept of an attempt that ended anywhere, and what does not belong together."""

from __future__ import annotations

import numpy as np
import pytest

from launcher.errors import UsageError
from launcher.serving import answers_file


def test_of_lines_whole_batches_are_kept(tmp_path):
    (tmp_path / "answers").write_text("a\nb\nc\nd\ne\nhal")
    lines, seen = answers_file.AnswerLines(tmp_path, str(tmp_path / "out")), []
    assert lines.keep(2, seen.append) == 4
    assert [line.strip() for line in seen] == ["a", "b", "c", "d"]
    lines.append(["E", "F"])
    lines.finish()
    assert (tmp_path / "out").read_text() == "a\nb\nc\nd\nE\nF\n"


@pytest.mark.parametrize("cut", [0, 1, 40, 200, 333])
def test_of_arrays_whole_batches_of_all_outputs_are_kept(tmp_path, cut):
    rows = {"one": np.arange(12, dtype=np.float32).reshape(6, 2), "two": np.arange(6, dtype=np.int64)}
    first = answers_file.AnswerArrays(tmp_path, str(tmp_path / "out.npz"), 6)
    assert first.keep(2, str) == 0
    first.append({name: array[:5] for name, array in rows.items()})
    cut_file = tmp_path / "0.npy"
    cut_file.write_bytes(cut_file.read_bytes()[: cut_file.stat().st_size - cut])
    again = answers_file.AnswerArrays(tmp_path, str(tmp_path / "out.npz"), 6)
    kept = again.keep(2, str)
    assert kept == {0: 4, 1: 4, 40: 0, 200: 0, 333: 0}[cut]
    again.append({name: array[kept:] for name, array in rows.items()})
    again.finish()
    found = np.load(tmp_path / "out.npz")
    for name, array in rows.items():
        np.testing.assert_array_equal(found[name], array)


def test_what_belongs_to_something_else_is_begun_anew(tmp_path, capsys):
    path = str(tmp_path / "out")
    for belongs_to, kept in (({"step": 1}, False), ({"step": 1}, True), ({"step": 2}, False)):
        with pytest.raises(KeyboardInterrupt), answers_file.partial_folder(path, belongs_to) as folder:
            assert (folder / "answers").exists() == kept
            (folder / "answers").write_text("a\n")
            raise KeyboardInterrupt
    assert "of another input or other weights: starting anew" in capsys.readouterr().err
    with answers_file.partial_folder(path, {"step": 2}) as folder:
        assert (folder / "answers").exists()
    assert not folder.exists()


def test_one_npy_file_does_not_hold_two_outputs(tmp_path):
    output = answers_file.AnswerArrays(tmp_path, "out.npy", 2)
    with pytest.raises(UsageError, match=r"has the outputs one, two; name a \.npz file"):
        output.append({"one": np.zeros(2), "two": np.zeros(2)})
