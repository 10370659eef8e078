"""The environment of processes on a played CUDA machine (played_gpu/)."""

from __future__ import annotations

import os

from places import PYTHONPATH, SUPPORT


def machine(gpus: int = 2, **more: str) -> dict[str, str | None]:
    """So many GPUs, for JAX and by a driver's program; all visible unless `more` says which."""
    path = f"{SUPPORT / 'played_gpu' / 'bin'}:{os.environ['PATH']}"
    chosen: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": None, "JAX_PLATFORMS": None}
    played = {"PYTHONPATH": f"{PYTHONPATH}:{SUPPORT / 'played_gpu'}", "PATH": path, "PLAYED_GPUS": str(gpus)}
    return {**chosen, **played, **more}
