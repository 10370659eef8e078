"""The model_dir, the folder of a run: its default and whether it can be one; contents.json says what is in it.

Imports no TensorFlow.
"""

import os
from collections.abc import Sequence

from launcher.errors import UsageError


def default_model_dir(gin_files: Sequence[str]) -> str:
    """`runs/RECIPE`, named after the last gin file."""
    return os.path.join("runs", os.path.splitext(os.path.basename(gin_files[-1]))[0])


def check_is_path(model_dir: str) -> None:
    """UsageError for the address of a bucket, and for a path that TensorFlow reads as a pattern."""
    if "://" in model_dir:
        raise UsageError(
            f"--model_dir={model_dir}: a run needs a file system with an atomic rename: give a folder of a disk or "
            "of a shared file system, and copy it to the bucket afterwards"
        )
    if pattern := set(model_dir) & set("*?[\\"):
        raise UsageError(
            f"--model_dir={model_dir}: TensorFlow takes {' '.join(sorted(pattern))} in the path of a checkpoint for a "
            "pattern and would not find it again; choose another --model_dir"
        )


def check_model_dir(model_dir: str) -> str:
    """Returns `model_dir`, making nothing; UsageError where it cannot be made or written to."""
    check_is_path(model_dir)
    existing = os.path.abspath(model_dir)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise UsageError(f"--model_dir={model_dir}: {existing} is not a folder; choose another --model_dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"--model_dir={model_dir}: {existing} is not writable; choose another --model_dir")
    return model_dir
