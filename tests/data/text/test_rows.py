import numpy as np

from launcher.data.text import rows


def test_segments_count_up_within_a_row():
    tokens, positions = np.array([[5, 3, 3, 6, 0, 0]]), np.array([[0, 1, 0, 0, 0, 0]])
    assert rows.segments(tokens, positions).numpy().tolist() == [[1, 1, 2, 3, 0, 0]]
