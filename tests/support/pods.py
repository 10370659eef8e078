"""Steps of a recipe by JAX, on as many CPU devices as there are replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import convolutions  # noqa: F401
import numpy as np
from places import PYTHONPATH

from launcher.config import gin_bindings
from launcher.run import loading
from launcher.run.plan import RunPlan
from launcher.run.recipe import Recipe

# A tenth of the time to compile; the arithmetic is the same.
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

SMALL_IMAGES = (
    "train.global_batch_size = 32",
    "cosine.warmup_fraction = 0.0",
    "cosine.peak = 0.05",
)
SMALL_CONVOLUTIONS = ("image_classification.model = @two_convolutions", *SMALL_IMAGES)


def plan_of(recipe: str, params: Sequence[str] = ()) -> RunPlan:
    """On one CPU device, to be lowered for any number of replicas."""
    loading.import_builtins()
    gin_bindings.load([recipe], params)
    return loading.Machine(environ={}, strategy="one_device").plan_of(Recipe())


class Pod:
    """What came out of some steps.

    Attributes:
      reports: each reported scalar by name, [steps].
      states: each replica's variables by name, after the last step.
    """

    def __init__(self, path: Path):
        self.reports: dict[str, np.ndarray] = {}
        self.states: dict[int, dict[str, np.ndarray]] = {}
        with np.load(path) as found:
            for key in found.files:
                kind, name = key.split("/", 1)
                if kind == "report":
                    self.reports[name] = found[key]
                else:
                    replica, name = name.split("/", 1)
                    self.states.setdefault(int(replica), {})[name] = found[key]

    @property
    def losses(self) -> np.ndarray:
        """Mean loss of each step's global batch."""
        return self.reports["loss"] / self.reports["weight"]

    def state(self) -> dict[str, np.ndarray]:
        """The variables, after a check that all replicas hold the same, bit for bit."""
        for state in self.states.values():
            for name, value in self.states[0].items():
                np.testing.assert_array_equal(state[name], value, err_msg=name)
        return self.states[0]


def run(
    folder: Path,
    recipe: str,
    params: Sequence[str],
    run_launcher: Callable,
    *,
    replicas: int,
    steps: int,
    batches: Path | None = None,
) -> Pod:
    """Takes the steps in a process of its own, on the recipe's batches or on those of a file."""
    folder.mkdir(exist_ok=True)
    out = folder / "out.npz"
    done = run_launcher(
        recipe,
        str(replicas),
        str(steps),
        str(out),
        str(batches or ""),
        *params,
        module="pod_run",
        env={"PYTHONPATH": PYTHONPATH, "XLA_FLAGS": FAST_COMPILE},
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    return Pod(out)


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """No element is off by more than `tolerance` times the largest of its array."""
    for name, value in expected.items():
        bound = tolerance * np.abs(value).max(initial=0)
        np.testing.assert_allclose(found[name], value, rtol=0, atol=bound, err_msg=name)
