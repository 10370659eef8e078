"""One command line of launcher.main in this process, and what it took of the GPU's memory, for gpu_check.py.

python benchmarks/gpu_run.py --gin_file=resnet_cpu.gin --engine=pjrt
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    from launcher.machine.tensorflow_import import require_tensorflow

    require_tensorflow()
    from launcher import main as launcher_main

    try:
        code = launcher_main.main(["launcher", *sys.argv[1:]])
    except SystemExit as stop:
        code = stop.code
    if "jax" in sys.modules and any("engine=pjrt" in one for one in sys.argv):
        import jax

        stats = jax.local_devices()[0].memory_stats() or {}
        kind = jax.local_devices()[0].device_kind
        print("MEMORY " + json.dumps(memory(kind, stats.get("peak_bytes_in_use", 0), stats.get("bytes_limit", 0))))
    elif any("engine=tensorflow" in one for one in sys.argv):
        import tensorflow as tf

        if gpus := tf.config.list_logical_devices("GPU"):
            peak = tf.config.experimental.get_memory_info(gpus[0].name.removeprefix("/device:"))["peak"]
            print("MEMORY " + json.dumps(memory(gpus[0].name, peak, 0)))
    return int(code or 0)


def memory(device: str, peak: int, offered: int) -> dict[str, object]:
    """In GiB."""
    return {"device": device, "peak_gib": round(peak / 2**30, 3), "offered_gib": round(offered / 2**30, 2)}


if __name__ == "__main__":
    sys.exit(main())
