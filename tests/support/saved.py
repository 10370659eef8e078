"""States that tell which step they belong to, and what tests look for where they were saved."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from places import PYTHONPATH

DEADLINE_SECONDS = 60


def state_of(step: int, size: int = 1000) -> dict[str, np.ndarray]:
    """A state in which every array tells the step it belongs to."""
    generator = np.random.default_rng(step)
    return {
        "step": np.array(step, np.int64),
        "model/dense/kernel": generator.standard_normal((size, 4), np.float32),
        "optimizer/momentum": generator.standard_normal((4, size), np.float32),
        "loss_scale": np.array([step], ml_dtypes.bfloat16),
    }


def assert_same_bits(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        assert found[name].tobytes() == array.tobytes(), name


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "3"}


def comes(condition: Callable[[], bool], within_seconds: float) -> bool:
    """Whether a condition comes to hold in that time; looks as often as it can, so as to see what passes quickly."""
    deadline = time.monotonic() + within_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


def wait_for(condition: Callable[[], bool]) -> None:
    assert comes(condition, DEADLINE_SECONDS), "the condition did not come"
