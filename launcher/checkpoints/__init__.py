"""Checkpoints: written whole or not at all, verified before they are trusted, kept by rank.

A checkpoint is a folder `step_00000100` with a TensorFlow tensor bundle (`tf.train.load_checkpoint` reads it) and a
`manifest.json` that names every tensor, file size and checksum. It is written under a temporary name beside it,
synchronised to the disk and committed by one rename: whatever is killed, readers see whole checkpoints only.

TensorFlow is imported when tensors are written or read, so whoever only asks for steps starts in milliseconds.
"""

from launcher.checkpoints.bundle import Writers
from launcher.checkpoints.errors import CheckpointReadError, CheckpointWriteError, NoWholeCheckpointError
from launcher.checkpoints.manifest import DATA, HOST, PROGRAM, array_of, find_damage, record_of
from launcher.checkpoints.saver import Saver
from launcher.checkpoints.store import Best, CheckpointStore

__all__ = [
    "DATA",
    "HOST",
    "PROGRAM",
    "Best",
    "CheckpointReadError",
    "CheckpointStore",
    "CheckpointWriteError",
    "NoWholeCheckpointError",
    "Saver",
    "Writers",
    "array_of",
    "find_damage",
    "record_of",
]
