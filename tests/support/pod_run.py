"""Takes steps by --engine=pjrt on made-up CPU devices, and writes down what came out.

python pod_run.py RECIPE REPLICAS STEPS OUT.npz BATCHES.npz|"" [BINDING ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import convolutions  # noqa: F401
import numpy as np

from launcher.config import gin_bindings
from launcher.machine.runtime_kinds import PJRT
from launcher.run import loading, session
from launcher.run.recipe import Recipe


def main(recipe: str, replicas: str, steps: str, out: str, batches: str, *params: str) -> None:
    loading.import_builtins()
    gin_bindings.load([recipe], params)
    plan = loading.Machine(environ={}, replicas=int(replicas), runtime=PJRT).plan_of(Recipe())
    trainer = session.build(plan).trainer
    records = trainer.train(given(batches, int(replicas)) if batches else trainer.batches(plan.data), int(steps))
    found = {f"report/{name}": getattr(records, name) for name in REPORTED}
    for name, value in trainer.runtime.state.arrays.items():
        for replica, shard in enumerate(value.addressable_shards):
            found[f"state/{replica}/{name}"] = np.asarray(shard.data)
    np.savez(out, **found)


REPORTED = ("loss", "weight", "gradient_norm", "learning_rate", "finite", "loss_scale")


def given(path: str, replicas: int) -> Iterator:
    """Global batches of a file, each as its replicas' parts."""
    with np.load(path) as stored:
        batches = dict(stored)
    for step in range(len(next(iter(batches.values())))):
        parts = {name: np.split(value[step], replicas) for name, value in batches.items()}
        yield [{name: value[replica] for name, value in parts.items()} for replica in range(replicas)]


if __name__ == "__main__":
    main(*sys.argv[1:])
