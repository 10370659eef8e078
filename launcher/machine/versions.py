"""The versions of TensorFlow and Keras that Launcher trains with, and what differs between them: asked for here alone.

setup.py says the same to pip. Containers, notebooks and TPU images bring their own versions, which pip is not asked
about, so they are looked at once more where TensorFlow is imported. `scripts/matrix.py` tries the oldest, one between
and the newest.
"""

import re
import sys
from typing import Any

from launcher.errors import UsageError
from launcher.machine import installation

TENSORFLOW = (2, 16)  # the first with Keras 3
# Weights of 3.7 have an aggregation over replicas; a model of several inputs does not take them by name in 3.5 and 3.6;
# a dropout inside a block draws with a seed that TensorFlow refuses in 3.4; layers have no path in 3.3 and before.
KERAS = (3, 8)


def check() -> None:
    """UsageError, with what to install, where TensorFlow or Keras, which are imported, is none that Launcher knows."""
    import keras
    import tensorflow as tf

    if of(tf.__version__) < TENSORFLOW:
        raise UsageError(
            f"TensorFlow {tf.__version__} is before {text(TENSORFLOW)}: {installation.tensorflow_command()}"
        )
    if of(keras.__version__) < KERAS:
        raise UsageError(
            f"Keras {keras.__version__} is installed, and Launcher needs {text(KERAS)} or later: "
            f"{installation.python()} -m pip install 'keras>={text(KERAS)}'"
        )


def of(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as "2.17.0+nv25.02"."""
    major, minor, *_ = re.findall(r"\d+", version)
    return int(major), int(minor)


def sums_activity_penalties() -> bool:
    """Whether Keras adds what an activity regulariser says of a batch to the loss as it is; from 3.14 on, its mean."""
    return of(sys.modules["keras"].__version__) < (3, 14)


def keeps_metrics_variables() -> bool:
    """Whether Keras's history keeps a variable that a metric's result() returned, and shows what it has become."""
    return of(sys.modules["keras"].__version__) >= (3, 14)


def opens_models_safely() -> bool:
    """Whether Keras opens a file of a model without running what it holds: CVE-2025-8747 and others of that year."""
    return of(sys.modules["keras"].__version__) >= (3, 12)


def text(version: tuple[int, int]) -> str:
    """ "2.16"."""
    return ".".join(map(str, version))


# Arguments that Keras's own classes gained after 3.8, with their defaults, which change nothing.
_GAINED: dict[str, Any] = {
    **dict.fromkeys(("quantization_config", "lora_alpha", "output_padding", "sliding_window", "ragged", "salt")),
    **dict.fromkeys(("input_axes", "output_axes", "renorm_clipping", "ignore_class")),
    **dict.fromkeys(("renorm", "use_gate", "antialias"), False),
    "renorm_momentum": 0.99,
    "oov_method": "floormod",
}


def without_later_arguments(config: Any) -> Any:
    """A saved model's configuration as Keras 3.8 reads it, too: without later arguments that say nothing."""
    if isinstance(config, list):
        return [without_later_arguments(item) for item in config]
    if not isinstance(config, dict):
        return config
    config = {name: without_later_arguments(value) for name, value in config.items()}
    settings = config.get("config")
    if isinstance(settings, dict) and str(config.get("module")).split(".")[0] == "keras":
        # `axis` is what others had before.
        gained = _GAINED | ({"axis": -1} if config.get("class_name") == "SparseCategoricalCrossentropy" else {})
        config["config"] = {
            name: value for name, value in settings.items() if name not in gained or value != gained[name]
        }
    return config
