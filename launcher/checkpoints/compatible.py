"""Whether a checkpoint is of the run that wants to go on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.checkpoints.errors import shorten
from launcher.errors import UsageError

# Of names of what is the state of no variable, may be of any size, and is understood by who wrote it.
HOST = "host/"

# Of what is recorded of a run: what its order of examples owes to the data.
DATA = "data"


def check_same_model(
    manifest: Mapping[str, Any],
    expected: Mapping[str, tuple[Sequence[int], Any]],
    directory: Path,
    stand_ins: Mapping[str, str],
) -> None:
    """See `CheckpointStore.check_compatible`; `directory` is where the checkpoint lies, for the message."""
    found = {name: about for name, about in manifest["tensors"].items() if not name.startswith(HOST)}
    wanted = {name: {"shape": list(size), "dtype": _dtype_name(dtype)} for name, (size, dtype) in expected.items()}
    missing = [name for name in wanted if name not in found and name not in stand_ins]
    unexpected = [name for name in found if name not in wanted and name not in stand_ins]
    differences = {
        "missing": [f"{name} {_show(wanted[name])}" for name in missing],
        "unexpected": [f"{name} {_show(found[name])}" for name in unexpected],
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
            f"Choose another --model_dir, or remove {directory.parent}."
        )


def check_same_run(manifest: Mapping[str, Any], expected: Mapping[str, Any], directory: Path) -> None:
    """Refuses the checkpoint of a run that saw its examples in another order; `DATA` is not compared.

    Raises:
        UsageError: An argument of `train` that decides the order differs from what was recorded.
    """
    found = manifest.get("run") or {}
    changed = [name for name, value in expected.items() if found.get(name, value) != value and name != DATA]
    if not changed:
        return
    was = ", ".join(f"train.{name} = {found[name]}" for name in changed)
    now = ", ".join(f"{expected[name]}" for name in changed)
    seed = f" (or --seed={found['seed']})" if "seed" in changed else ""
    raise UsageError(
        f"This model_dir holds a run that was begun with {was} (step {manifest['step']} in {directory}); with {now} it "
        f"would go on with other examples than it has left to see. Give the value it was begun with{seed}, or choose "
        "another --model_dir."
    )


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    return str(dtype.name) if hasattr(dtype, "name") else np.dtype(dtype).name


def _show(description: Mapping[str, Any]) -> str:
    return f"{description['dtype']}{description['shape']}"
