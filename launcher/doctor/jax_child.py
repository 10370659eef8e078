"""The doctor's part on the GPUs that `--engine=pjrt` would use, in a process of its own: JAX takes their memory."""

import os
import sys
from typing import Any

import numpy as np

from launcher.doctor import child
from launcher.machine import jax_devices
from launcher.machine.cluster import resolve
from launcher.machine.devices import Devices


def _gpus(request: dict[str, Any]) -> dict[str, Any]:
    """Starts JAX on all of them as a training does; a product on each, added up over all, says whether they compute."""
    alone = resolve({})
    found = jax_devices.start(jax_devices.plan(None, alone, os.environ, Devices()), alone, None)
    jax, count = found.jax, len(found.all)
    spread = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(found.all), "x"), jax.sharding.PartitionSpec("x"))
    ones = jax.device_put(np.ones((count, 256, 256), np.float32), spread)
    if (total := float(jax.jit(lambda one: (one @ one).sum())(ones))) != count * 256.0**3:
        raise RuntimeError(f"the GPUs multiply or add up wrongly: the sum is {total}, not {count * 256.0**3}")
    return {"model": found.all[0].device_kind, "count": count, "bytes": found.memory_bytes}


if __name__ == "__main__":
    sys.exit(child.answer_topics(sys.argv[1], {"gpus": _gpus}, essential="gpus"))
