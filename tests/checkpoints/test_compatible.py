"""A checkpoint of another model is refused by name."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from launcher.checkpoints import CheckpointStore
from launcher.errors import UsageError


def test_the_same_model_is_compatible(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    store.save(1, {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), ml_dtypes.bfloat16)})
    store.check_compatible(1, {"b": ((), "bfloat16"), "a": ([2, 3], "float32")})
    with pytest.raises(UsageError, match=r"b is bfloat16\[\] in the checkpoint, float32\[\] in the model"):
        store.check_compatible(1, {"b": ((), "float32"), "a": ((2, 3), "float32")})


def test_another_model_is_refused_by_name_shape_and_dtype(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    store.save(1, {"kernel": np.zeros((3, 3), np.float32)} | {f"old/{i}": np.zeros(i) for i in range(7)})
    expected = {"kernel": ((3, 4), "float32"), "new": ((5,), "float16")}
    with pytest.raises(UsageError) as caught:
        store.check_compatible(1, expected)
    text = str(caught.value)
    assert "holds a checkpoint of another model (step 1" in text
    assert "missing: new float16[5]" in text
    assert "unexpected: old/0 float64[0]; " in text
    assert "old/4" in text and "old/5" not in text and "and 2 more" in text
    assert "kernel is float32[3, 3] in the checkpoint, float32[3, 4] in the model" in text
    assert f"Choose another --model_dir, or remove {directory.parent}." in text
