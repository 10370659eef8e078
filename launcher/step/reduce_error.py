"""Bytes and error of gradients that are reduced, known before a run starts."""

import functools
from collections.abc import Sequence

import ml_dtypes
import numpy as np

# One unit in the last place of bfloat16: more than what a 16-bit backward pass has lost already is too much. bfloat16
# reaches it past 8 replicas, float16 past 1024.
ACCEPTABLE_ERROR = 2.0**-8

_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_SAMPLES = 4096


@functools.cache
def predicted_error(dtype: str, num_replicas: int) -> float:
    """Relative error of the sum of one gradient over replicas, added up one after the other in `dtype`, as rings do.

    Simulated on gradients that agree on their sign and differ in size (uniform in [0, 1)), where the partial sum grows
    past what the dtype resolves of the next term. Scaling is taken to keep everything in range. The error is the norm
    of the errors over the norm of the sums.
    """
    source = np.random.default_rng(0)
    # Scaled so that the sum stays finite in float16: its range is the loss scale's business, not rounding's.
    terms = source.random((num_replicas, _SAMPLES)) / num_replicas
    total = terms[0].astype(_DTYPES[dtype])
    for term in terms[1:]:
        total = (total + term.astype(_DTYPES[dtype])).astype(_DTYPES[dtype])
    exact = terms.sum(axis=0)
    return float(np.linalg.norm(total.astype(np.float64) - exact) / np.linalg.norm(exact))


def warning(dtype: str, num_replicas: int) -> str | None:
    """The warning about a reduce dtype that loses too much at this number of replicas; None when it is safe."""
    error = predicted_error(dtype, num_replicas)
    if num_replicas == 1 or error <= ACCEPTABLE_ERROR:
        return None
    return (
        f"train.reduce_dtype = {dtype!r} over {num_replicas} replicas: sums of gradients will be off by about "
        f"{error:.1%}; use 'float16' with a loss scale, or 'float32'"
    )


def payload_bytes(sizes: Sequence[int], dtype: str) -> int:
    """Bytes of one step's gradients, of so many elements each, in the reduce dtype."""
    return sum(sizes) * _DTYPES[dtype].itemsize


def describe(gradients: Sequence[int], dtype: str, moving: Sequence[int], num_replicas: int) -> str:
    """One line on what each step reduces; the loss, the weight and the metrics, a number each, are left out.

    `gradients` and `moving` are numbers of elements: of gradients in the reduce dtype, of moving statistics in float32.
    """
    payload, statistics = payload_bytes(gradients, dtype), payload_bytes(moving, "float32")
    beside = f" and {statistics / 2**20:.2f} MiB of moving statistics in float32" if moving else ""
    sent = f"{ring_bytes(payload + statistics, num_replicas) / 2**20:.2f} MiB sent by each replica"
    if num_replicas == 1:
        sent = "nothing is sent by a single replica"
    return f"{dtype}: {payload / 2**20:.2f} MiB of gradients{beside} a step, {sent}"


def ring_bytes(payload: int, num_replicas: int) -> int:
    """Bytes each replica sends (and receives) to reduce `payload` bytes around a ring: 2 (n - 1) / n of it."""
    return round(2 * (num_replicas - 1) / num_replicas * payload)
