"""The versions of TensorFlow and Keras that Launcher trains with, and what differs between them: asked for here alone.

setup.py says the same to pip. Containers, notebooks and TPU images bring their own versions, which pip is not asked
about, so they are looked at once more where TensorFlow is imported. `scripts/matrix.sh` tries the oldest, one between
and the newest.
"""

from __future__ import annotations

import re
import sys

from launcher.errors import UsageError
from launcher.machine import installation

TENSORFLOW = (2, 16)  # the first with Keras 3
# 3.4 has no losses that a distributed step can take as they are, 3.3 no `add` of layers in a subclassed model.
KERAS = (3, 5)
KERAS_WITHOUT = (3, 7)  # its weights have an aggregation over replicas, and a step reduces once


def check() -> None:
    """UsageError, with what to install, where TensorFlow or Keras, which are imported, is none that Launcher knows."""
    import keras
    import tensorflow as tf

    if of(tf.__version__) < TENSORFLOW:
        raise UsageError(
            f"TensorFlow {tf.__version__} is installed, and Launcher needs {_text(TENSORFLOW)} or later: "
            f"{installation.tensorflow_command()}"
        )
    found = of(keras.__version__)
    if found < KERAS or found == KERAS_WITHOUT:
        raise UsageError(
            f"Keras {keras.__version__} is installed, and Launcher needs {_text(KERAS)} or later, other than "
            f"{_text(KERAS_WITHOUT)}: {installation.pip()} install 'keras>={_text(KERAS)},!={_text(KERAS_WITHOUT)}.*'"
        )


def of(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as "2.17.0+nv25.02"."""
    major, minor, *_ = re.findall(r"\d+", version)
    return int(major), int(minor)


def sums_activity_penalties() -> bool:
    """Whether Keras adds what an activity regulariser says of a batch to the loss as it is; from 3.14 on, its mean."""
    return of(sys.modules["keras"].__version__) < (3, 14)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
