"""A disk that keeps every write of a checkpoint waiting until it is released, or until a condition holds."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from saved import DEADLINE_SECONDS

from launcher.checkpoints import store
from launcher.checkpoints.errors import write_error

Write = Callable[..., Path]


class HeldDisk:
    """Stands between the store and its writer.

    Attributes:
      begun: steps whose write has begun, in order.
      most_at_once: how many writes were ever under way together.
      refused: steps whose write fails, as on a full disk.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun: list[int] = []
        self.refused: set[int] = set()
        self.most_at_once = 0
        self._under_way = 0
        self._released = threading.Event()
        self._write: Write = store.write_checkpoint
        monkeypatch.setattr(store, "write_checkpoint", self._held)

    def release(self) -> None:
        self._released.set()

    def hold(self) -> None:
        self._released.clear()

    def _held(self, directory: Path, step: int, state: Mapping[str, np.ndarray], *rest: object) -> Path:
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        self.begun.append(step)
        try:
            assert self._released.wait(DEADLINE_SECONDS), "the disk was never released"
            if step in self.refused:
                full = OSError(errno.ENOSPC, "No space left on device")
                raise write_error(f"the checkpoint of step {step}", directory / "state", 2**23, full)
            return self._write(directory, step, state, *rest)
        finally:
            self._under_way -= 1
