"""Takes steps of a program on as many CPU devices as it has replicas, each with its parts of what is divided.

python parts_run.py FOLDER: reads what `in_parts.write` left there, and writes out.npz
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.extend import backend
from jax.interpreters.mlir import make_ir_context, module_to_bytecode
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir


def main(folder: Path) -> None:
    described = json.loads((folder / "program.json").read_text())
    devices = jax.devices()[: described["num_replicas"]]
    mesh = Mesh(np.array(devices), ("replica",))
    options = backend.get_compile_options(
        num_replicas=len(devices), num_partitions=1, device_assignment=np.array(devices)[:, np.newaxis]
    )
    with make_ir_context():
        module = module_to_bytecode(ir.Module.parse((folder / "step.mlir").read_text()))
    executable = devices[0].client.compile_and_load(module, devices, options)

    def placed(argument, value):
        axis = 0 if argument["kind"] == "batch" else argument["axis"]
        divided = [None if place != axis else "replica" for place in range(len(argument["shape"]))]
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*divided)))

    def loaded(name):
        with np.load(folder / name) as found:
            return {one: found[one] for one in found.files}

    arguments, batches = described["arguments"], loaded("batches.npz")
    held = {}
    for name, value in loaded("values.npz").items():
        (argument,) = (one for one in arguments if one["name"] == name)
        held[name] = placed(argument, value.view(np.dtype(getattr(ml_dtypes, argument["dtype"], argument["dtype"]))))
    reports: dict[str, list[float]] = {}
    for step in range(described["steps"]):
        values = [
            placed(one, batches[one["name"]][step]) if one["kind"] == "batch" else held[one["name"]]
            for one in arguments
        ]
        results = executable.execute_sharded(values).disassemble_into_single_device_arrays()
        for result, parts in zip(described["results"], results, strict=True):
            if result["kind"] == "report":
                reports.setdefault(result["name"], []).append(float(parts[0]))
            else:
                old = held[result["name"]]
                held[result["name"]] = jax.make_array_from_single_device_arrays(old.shape, old.sharding, parts)
    state = {f"state/{name}": np.asarray(value) for name, value in held.items()}
    bytes_of_one = sum(value.addressable_shards[0].data.nbytes for value in held.values())
    counts = {
        kind: executable.hlo_modules()[0].to_string().count(f" {kind}(") for kind in ("all-gather", "reduce-scatter")
    }
    peak = executable.get_compiled_memory_stats()
    measured = {"held": bytes_of_one, "temporary": peak.temp_size_in_bytes, **counts}
    np.savez(folder / "out.npz", **state, **{f"report/{name}": found for name, found in reports.items()}, **measured)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
