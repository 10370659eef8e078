"""Training data of which one worker's generator fails once, for benchmarks/faults.py."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import tensorflow as tf

from launcher.data.images import ImageData
from launcher.data.pipeline import Data, Shard


@gin.configurable
def faulty_data(source: ImageData, fault: str, rank: int, step: int, marker: str) -> ImageData:
    """`source`, but the first time that worker `rank` reads the batch of `step`, its generator fails.

    Args:
      source: images.
      fault: "block" for ever, or "raise".
      rank, step: where and when.
      marker: a file that then holds the time, in Unix seconds; where it exists, nothing fails.
    """
    return dataclasses.replace(source, source=_Faulty(source.source, fault, rank, step, Path(marker)))


class _Faulty:
    def __init__(self, source: Data, fault: str, rank: int, step: int, marker: Path):
        self._source, self._fault, self._rank, self._step, self._marker = source, fault, rank, step, marker
        self.num_train_examples = source.num_train_examples
        self.num_eval_examples = source.num_eval_examples
        self.check = source.check
        self.eval_batches = source.eval_batches

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        batches = self._source.train_batches(shard)

        def read() -> Iterator[Any]:
            for step, batch in enumerate(batches, start=shard.start_step + 1):
                if shard.first_replica == self._rank and step >= self._step and not self._marker.exists():
                    leave_time(self._marker)
                    self._fail()
                yield batch

        return tf.data.Dataset.from_generator(read, output_signature=batches.element_spec)

    def _fail(self) -> None:
        if self._fault == "raise":
            raise RuntimeError("record 4711 cannot be decoded")
        threading.Event().wait()


def leave_time(marker: Path) -> None:
    """Writes the time to a file, whole or not at all."""
    aside = marker.with_name(f".{marker.name}-{os.getpid()}")
    aside.write_text(repr(time.time()))
    aside.rename(marker)
