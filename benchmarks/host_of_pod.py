"""What the host of one process of a pod needs to start, save and restore a model in parts, without the pod's devices.

    python benchmarks/host_of_pod.py lm_8b_tpu.gin --replicas=64 --processes=16 --folder=/tmp/host_of_pod

Builds the recipe as `--engine=pjrt` does with train.shard = 'all', makes the first value of each array of the state and
cuts this process's part out of it, as the engine does when its devices take the state; writes these parts as this
process writes them to a checkpoint, and reads them again. The devices are not there: a part that they would hold is
kept in memory only where `--keep` says so, for the checkpoint. Prints seconds and the largest memory so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import tensorflow as tf

from launcher.checkpoints import CheckpointStore
from launcher.checkpoints.bundle import StoredArray, Writers, make_room
from launcher.config import gin_bindings
from launcher.machine.array_parts import Part, Range
from launcher.run import loading, session
from launcher.runtime.tensorflow import TfRuntime
from launcher.step_program import lowering
from launcher.step_program.pjrt_runtime import PjrtRuntime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the part of the checkpoint goes; removed")
    parser.add_argument("--bind", action="append", default=[], help="a binding of the recipe")
    args = parser.parse_args()
    started = time.monotonic()

    def tell(what: str) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{what:>10}: {time.monotonic() - started:6.0f} s, most memory so far {peak:5.2f} GiB", flush=True)

    machine = loading.Machine(environ={"JAX_PLATFORMS": "cpu"}, strategy="one_device", engine=None, connect=False)
    tell("imported")
    with gin_bindings.usage_errors():
        plan = machine.resolve([args.recipe], [*args.bind, "train.shard = 'all'", "train.strategy = 'one_device'"])
    plan = lowering.for_replicas(plan, args.replicas)
    plan = dataclasses.replace(plan, policy="mixed_bfloat16")
    elsewhere = SimpleNamespace(all=[None] * args.replicas, num_processes=1)
    host = TfRuntime(tf.distribute.OneDeviceStrategy("/CPU:0"))
    runtime = PjrtRuntime(cast(Any, elsewhere), host, divides_weights=True)
    built = session.build_on(runtime, plan)
    tell("built")
    held, state, local = runtime.state.parts, built.trainer.state, args.replicas // args.processes
    of_process: dict[str, np.ndarray | Part] = {}
    shapes = {name: spec[0] for name, spec in state.specs().items()}
    for name, source in ((name, runtime.state.source(name)) for name in state.variables()):
        if (axis := held[name].axis if name in held else None) is None:
            of_process[name] = source(None)
            continue
        where = Range(axis, 0, shapes[name][axis] // args.replicas * local)
        of_process[name] = Part(np.array(source(where)), where, shapes[name])
    parts = sum((one.array if isinstance(one, Part) else one).nbytes for one in of_process.values())
    tell("first")
    print(
        f"{len(of_process)} arrays, {sum(map(np.prod, shapes.values())) * 4 / 2**30:.1f} GiB, "
        f"of this process {parts / 2**30:.2f} GiB"
    )
    make_room(args.folder, 0)
    writers = Writers(1, args.processes)  # any but the first, which waits for the others
    CheckpointStore(str(args.folder), is_chief=False).save(0, of_process, writers=writers)
    tell("written")
    (room,) = args.folder.glob(".writing-*")
    for path in room.glob("part-1.*"):
        path.rename(path.with_name(path.name.replace("part-1", "state")))
    for name, one in of_process.items():
        if isinstance(one, Part):
            stored = StoredArray(room, name, one.shape, one.array.dtype.name)
            np.testing.assert_array_equal(stored(one.where), one.array)
    tell("read")
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
