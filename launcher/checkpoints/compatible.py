"""Whether a checkpoint is of the run that wants to go on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.checkpoints.errors import shorten
from launcher.errors import UsageError


def check_same_model(
    manifest: Mapping[str, Any], expected: Mapping[str, tuple[Sequence[int], Any]], directory: Path
) -> None:
    """Refuses the checkpoint of another model.

    Args:
        manifest: The checkpoint's.
        expected: Shape and dtype (NumPy's, TensorFlow's or a name) of every array the model needs, by name.
        directory: Where the checkpoint lies, for the message.

    Raises:
        UsageError: Names are missing or unexpected, or shapes or dtypes differ; at most five of each are shown.
    """
    found = manifest["tensors"]
    wanted = {name: {"shape": list(size), "dtype": _dtype_name(dtype)} for name, (size, dtype) in expected.items()}
    differences = {
        "missing": [f"{name} {_show(wanted[name])}" for name in wanted if name not in found],
        "unexpected": [f"{name} {_show(found[name])}" for name in found if name not in wanted],
        "different": [
            f"{name} is {_show(found[name])} in the checkpoint, {_show(wanted[name])} in the model"
            for name in wanted
            if name in found and found[name] != wanted[name]
        ],
    }
    details = "".join(f"\n  {kind}: {shorten(names)}" for kind, names in differences.items() if names)
    if details:
        raise UsageError(
            f"This model_dir holds a checkpoint of another model (step {manifest['step']} in {directory}).{details}\n"
            f"Choose another --model_dir, or remove {directory}."
        )


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    return str(dtype.name) if hasattr(dtype, "name") else np.dtype(dtype).name


def _show(description: Mapping[str, Any]) -> str:
    return f"{description['dtype']}{description['shape']}"
