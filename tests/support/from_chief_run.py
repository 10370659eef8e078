"""A worker that gets all kinds of arrays from its chief and writes down their bytes.

TF_CONFIG=… python -m from_chief_run OUTPUT_PREFIX
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from launcher.machine import strategy as strategy_lib
from launcher.machine.cluster import resolve
from launcher.run.start.starting_point import FromChief
from launcher.runtime.tensorflow import TfRuntime

MESSAGE = {"step": 12, "text": "größer"}
CHUNKS = (4, 64, 2**20)  # a word at a time; across the borders of arrays; all in one


def arrays() -> dict[str, np.ndarray]:
    """Every dtype a state may have, with the values that arithmetic would change."""
    nans = np.array([0x7FC12345, 0xFFC00001, 0x7F812345, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    return {
        "scalar": np.array(0.1, np.float32),
        "nan payloads, signed zero, subnormal": nans,
        "float64": np.array([[np.pi, -0.0], [np.inf, np.nan]]),
        "float16": np.array([65504, 2**-24, -0.0, np.nan, -np.inf], np.float16),
        "bfloat16": np.array([[1, np.nan], [-0.0, np.inf]], ml_dtypes.bfloat16),
        "int64": np.array([2**63 - 1, -(2**63), -1], np.int64),
        "int8": np.array([-128, 127, 0], np.int8),
        "bool": np.array([[True], [False], [True]]),
        "nothing": np.zeros((0, 3), np.float32),
        "all words": np.arange(-500, 500, dtype=np.int32) * 4294967,
    }


def written(found: dict[str, np.ndarray]) -> dict[str, list[object]]:
    return {name: [list(array.shape), array.dtype.name, array.tobytes().hex()] for name, array in found.items()}


if __name__ == "__main__":
    cluster = resolve(os.environ)
    plan = strategy_lib.plan(requested="auto", replicas=None, tpu=None, cluster=cluster, environ=os.environ)
    strategy = strategy_lib.build(plan, cluster)
    answer = []
    for chunk in CHUNKS:
        chief = FromChief(TfRuntime(strategy), is_chief=cluster.is_chief, chunk_bytes=chunk)
        message, found = chief.share(*(MESSAGE, arrays()) if cluster.is_chief else ())
        chief.share()
        answer.append({"message": message, "arrays": written(found)})
    Path(f"{sys.argv[1]}{cluster.index}.json").write_text(json.dumps(answer))
