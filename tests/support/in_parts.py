"""Steps of one recipe with weights whole and in parts, each run on CPU devices from the same values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pods
from places import PYTHONPATH

from launcher.run import loading
from launcher.run.plan import RunPlan
from launcher.step_program import lowering


def plan_of(recipe: str, params: Sequence[str], shard: str = "all") -> RunPlan:
    """Of a gin file or a program, resolved as for preflight."""
    machine = loading.Machine(environ={}, strategy="one_device", connect=False)
    return machine.resolve([recipe], [*params, f"train.shard = '{shard}'"])


def write(folder: Path, recipe: str, params: Sequence[str], *, shard: str, replicas: int, steps: int) -> Path:
    """Lowers the step and writes it with its whole first values, and those of its batches."""
    folder.mkdir(parents=True)
    plan = plan_of(recipe, params, shard)
    whole_plan = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, shard="none"))
    whole = lowering.build(whole_plan, replicas).trainer.state.snapshot()
    built = lowering.build(plan, replicas)
    lowered = lowering.lower_session(built)
    program = lowered.program
    values = dict(lowered.constants)
    for one in program.arguments:
        if one.kind == "variable":
            values[one.name] = whole[one.name] if one.name in whole else lowered.variables[one.name].numpy()
    shard_of_all = lowering.whole_shard(built.plan)
    parts = list(islice(plan.data.train_batches(shard_of_all).as_numpy_iterator(), steps * replicas))
    batches = {name: np.stack([one[name] for one in parts]) for name in parts[0]}
    batches = {name: one.reshape(steps, replicas * one.shape[1], *one.shape[2:]) for name, one in batches.items()}
    np.savez(folder / "batches.npz", **batches)
    np.savez(folder / "values.npz", **{n: v if v.dtype.isbuiltin else v.view(np.uint16) for n, v in values.items()})
    (folder / "step.mlir").write_text(program.stablehlo)
    described = dataclasses.asdict(program) | {"stablehlo": "", "steps": steps}
    (folder / "program.json").write_text(json.dumps(described))
    return folder


def run(folder: Path, run_launcher: Callable) -> dict[str, np.ndarray]:
    """What came out: "report/NAME", [steps], and "state/NAME", the whole of each variable."""
    replicas = json.loads((folder / "program.json").read_text())["num_replicas"]
    flags = f"{pods.FAST_COMPILE} --xla_force_host_platform_device_count={replicas}"
    env = {"PYTHONPATH": PYTHONPATH, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    done = run_launcher(str(folder), module="parts_run", env=env, timeout=550)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "out.npz") as found:
        return {name: found[name] for name in found.files}


def run_both(
    folder: Path, recipe: str, params: Sequence[str], run_launcher: Callable, *, replicas: int = 8, steps: int = 12
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """With weights in parts, and whole."""
    found = [
        run(write(folder / shard, recipe, params, shard=shard, replicas=replicas, steps=steps), run_launcher)
        for shard in ("all", "none")
    ]
    return found[0], found[1]
