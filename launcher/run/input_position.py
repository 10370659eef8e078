"""The position in the training data from which a run goes on after a restart.

Most data finds the batch of any step at once. A `tf.data` pipeline has to read all that comes before it, or to be told
its own state, which TensorFlow can save of many: it is part of a checkpoint then.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.data.kinds import DataInTurn
from launcher.data.pipeline import Data
from launcher.runtime import batches as batches_lib
from launcher.step.trainer import Trainer

_STATE = "input_position"
_MOST_BYTES = 2**28  # of buffers, such as those of `shuffle` and `cache`, in each checkpoint


class InputPosition:
    """Opens the batches of a trainer at its step, and says what tells where they are.

    Args:
      num_workers: of the run; what the chief's pipeline has prepared is for its own replicas.
      state: what actions and this had in the checkpoint.
    """

    def __init__(self, trainer: Trainer, data: Data, *, num_workers: int, state: Mapping[str, np.ndarray]):
        self._trainer, self._data = trainer, data
        on_tpu = trainer.runtime.host.traits.compiles
        self._reads_again = isinstance(data, DataInTurn) and data.reads_again and not on_tpu
        self._saves = self._reads_again and num_workers == 1
        self._state = state
        self._batches: Any = None
        self._read = self._until = 0

    def __str__(self) -> str:
        if not self._until:
            return "opening the data"
        return f"reading the dataset again: {self._read:,} of {self._until:,} batches"

    def open(self) -> Iterator:
        """Batches for `Trainer.train`, from the trainer's step on."""
        step = self._trainer.step
        if not self._reads_again or self._trainer.left_out.ranges:
            self._saves = False
            return self._trainer.batches(self._data)
        self._batches = self._trainer.batches(self._data, start_step=0)
        if not self._restored(step):
            self._until = step
            for self._read in range(1, step + 1):
                next(self._batches)
        return self._batches

    def _restored(self, step: int) -> bool:
        saved = {name.removeprefix(f"{_STATE}/"): value for name, value in self._state.items() if _STATE in name}
        iterator = batches_lib.tf_iterator(self._batches)
        if not saved or iterator is None or not step or not self._saves:
            return not step
        with tempfile.TemporaryDirectory() as folder:
            for name, value in saved.items():
                Path(folder, name).write_bytes(value.tobytes())
            try:
                tf.train.Checkpoint(iterator=iterator).read(str(Path(folder, _STATE))).assert_consumed()
            except (tf.errors.OpError, ValueError, AssertionError):
                # Of another pipeline, or another TensorFlow's: the iterator is as it was. A new one would not do, as
                # `shuffle` draws its order from what all iterators of a dataset share.
                return False
        return True

    def state(self) -> dict[str, np.ndarray]:
        """The state that a checkpoint of the trainer's step holds, uint8 vectors by name; {} where that is enough."""
        iterator = batches_lib.tf_iterator(self._batches) if self._saves else None
        if iterator is None:
            return {}
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(tf.errors.OpError, ValueError):
            tf.train.Checkpoint(iterator=iterator).write(str(Path(folder, _STATE)))
            files = [*Path(folder).iterdir()]
            if sum(file.stat().st_size for file in files) <= _MOST_BYTES:
                return {f"{_STATE}/{file.name}": np.frombuffer(file.read_bytes(), np.uint8) for file in files}
        self._saves = False
        return {}
