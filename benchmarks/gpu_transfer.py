"""Is a batch's way to the GPU hidden behind the step before? For gpu_check.py; --small for CPUs. Prints JSON.

A step of matrix products, about 40 ms on an H200, with 256 images of float32: milliseconds a step with the batch on the
device already, put just before its step, put ahead of the step before, and as uint8; and of the way alone.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np


def main() -> None:
    size, rows = (256, 2) if "--small" in sys.argv else (16384, 256)
    device = jax.devices()[0]
    weights = jax.device_put(jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / size, device)
    images = np.random.default_rng(0).random((rows, 224, 224, 3), np.float32)
    kinds = {"float32": images, "uint8": (images * 255).astype(np.uint8)}

    @jax.jit
    def step(h, x):
        for _ in range(4):
            h = h @ weights
        return h + x.astype(jnp.float32).mean().astype(jnp.bfloat16)

    def put(array):
        return array if isinstance(array, jax.Array) else jax.device_put(array, device, may_alias=False)

    def timed(array, ahead: bool, steps: int = 20) -> float:
        h = weights
        for _ in range(3):  # compiled, and once more where its own result is what it is given
            h = step(h, put(array)).block_until_ready()
        following = put(array) if ahead else None
        behind, started = [], time.perf_counter()
        for _ in range(steps):
            now, following = (following, put(array)) if ahead else (put(array), None)
            h = step(h, now)
            behind.append(h)
            if len(behind) > 2:
                behind.pop(0).block_until_ready()
        h.block_until_ready()
        return round((time.perf_counter() - started) / steps * 1e3, 2)

    found = {"on_the_device_ms": timed(put(images), False)}
    for name, array in kinds.items():
        found |= {f"{name}_put_ms": timed(array, False), f"{name}_put_ahead_ms": timed(array, True)}
        started = time.perf_counter()
        for _ in range(5):
            put(array).block_until_ready()
        found[f"{name}_alone_ms"] = round((time.perf_counter() - started) / 5 * 1e3, 2)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
