import numpy as np
import tensorflow as tf

from launcher.data.text import rows


def test_segments_count_up_within_a_row():
    tokens, positions = np.array([[5, 3, 3, 6, 0, 0]]), np.array([[0, 1, 0, 0, 0, 0]])
    assert rows.segments(tokens, positions).numpy().tolist() == [[1, 1, 2, 3, 0, 0]]


def test_many_rows_are_read_where_they_lie_on_disk(tmp_path):
    file = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint16, (70_000, 512))
    file[[5, 69_999], 3] = 7, 8
    examples = rows.MappedExamples({"x": np.load(tmp_path / "x.npy", mmap_mode="c")})

    def fetched():
        return examples.fetch(tf.constant([69_999, 5], tf.int64))["x"].numpy()[:, 3].tolist()

    assert fetched() == [8, 7]
    file[5, 3] = 9  # what has been copied would not know
    assert fetched() == [8, 9]
