"""Whether a process still runs, and which it is."""

from __future__ import annotations

import contextlib
import json

import psutil


def is_running(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_worker(process: psutil.Process, rank: int) -> bool:
    with contextlib.suppress(psutil.Error):
        config = process.environ().get("TF_CONFIG")
        return config is not None and json.loads(config)["task"]["index"] == rank
    return False
