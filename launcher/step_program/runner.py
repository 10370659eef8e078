"""Runs an exported training step on any devices that JAX knows; needs NumPy and JAX, and nothing else of Launcher.

    python -m launcher.step_program.runner DIR --steps 10
    python DIR/run.py --steps 10

DIR is what `--mode=export_step` wrote. It may be copied to another machine, such as one with GPUs and only JAX on it.
The program has a fixed number of replicas, one a device; where there are only CPUs, as many are made up. New values of
variables are fed back from step to step; batches come round again when there are fewer of them than steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

PROGRAM, DESCRIPTION, VARIABLES, BATCHES = "step.stablehlo", "arguments.json", "variables.npz", "batches.npz"

Arrays = dict[str, np.ndarray]


class RunnerError(Exception):
    """What keeps the program from running, and what to do."""


class Runner:
    """A step that has been compiled, and the variables it works on.

    Args:
      directory: what `--mode=export_step` wrote.
      platform: of the devices, such as "cpu" or "gpu"; None for JAX's first choice.

    Raises:
      RunnerError: files or devices are missing.
    """

    def __init__(self, directory: str | os.PathLike[str], *, platform: str | None = None):
        self._directory = Path(directory)
        self.description = json.loads(existing(self._directory, DESCRIPTION).read_text("utf-8"))
        self.num_replicas = int(self.description["num_replicas"])
        self._arguments = {argument["name"]: argument for argument in self.description["arguments"]}
        _prepare_jax(self.num_replicas, platform)
        # Only now: JAX reads its settings once.
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self._jax = jax
        self._devices = self._chosen(platform)
        mesh = Mesh(np.array(self._devices), ("replica",))
        self._split, self._same = (NamedSharding(mesh, spec) for spec in (PartitionSpec("replica"), PartitionSpec()))
        self._executable = _compiled(existing(self._directory, PROGRAM).read_bytes(), self._devices)
        self._held: dict[str, Any] = {}
        self.restore(self._load(existing(self._directory, VARIABLES)))

    def restore(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets variables and constants on every replica."""
        for name, value in values.items():
            self._held[name] = self._jax.device_put(self._checked(name, value), self._same)

    def batches(self) -> list[Arrays]:
        """The exported global batches in order; made-up ones where none were exported."""
        if not (self._directory / BATCHES).is_file():
            return [self._made_up()]
        stacked = self._load(self._directory / BATCHES)
        count = len(next(iter(stacked.values())))
        return [{name: value[index] for name, value in stacked.items()} for index in range(count)]

    def placed(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """A global batch on the devices: replica r gets the r-th of equal parts of every tensor."""
        return {
            name: self._jax.device_put(self._checked(name, value, self.num_replicas), self._split)
            for name, value in batch.items()
        }

    def step(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """Takes one step on what `placed` returned, and keeps the new variables.

        Returns:
          The scalars that the step reports, by name; they are sums over the global batch where training's are.
        """
        values = [
            (batch if argument["kind"] == "batch" else self._held)[name] for name, argument in self._arguments.items()
        ]
        outputs = self._executable.execute_sharded(values).disassemble_into_single_device_arrays()
        report = {}
        for result, parts in zip(self.description["results"], outputs, strict=True):
            if result["kind"] == "report":
                report[result["name"]] = float(parts[0])
            else:
                shape = tuple(result["shape"])
                self._held[result["name"]] = self._jax.make_array_from_single_device_arrays(shape, self._same, parts)
        self._jax.block_until_ready(self._held)
        return report

    def state(self, replica: int = 0) -> Arrays:
        """The variables of one replica."""
        return {name: np.asarray(value.addressable_shards[replica].data) for name, value in self._held.items()}

    @property
    def devices(self) -> str:
        """What it runs on, for people."""
        kinds = sorted({device.device_kind for device in self._devices})
        return f"{len(self._devices)} x {', '.join(kinds)} ({self._devices[0].platform}), JAX {self._jax.__version__}"

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that any device has taken since JAX started; None where devices do not tell, as CPUs."""
        told = [device.memory_stats() for device in self._devices]
        return max(one["peak_bytes_in_use"] for one in told) if all(told) else None

    def _load(self, path: Path) -> Arrays:
        """Arrays in their own dtypes; of 16-bit floats that NumPy does not have, the bits are stored."""
        with np.load(path) as stored:
            return {name: stored[name].view(_dtype(self._arguments[name]["dtype"])) for name in stored.files}

    def _checked(self, name: str, value: np.ndarray, parts: int = 1) -> np.ndarray:
        """The array, if it fits; a wrong one would end the process without a message."""
        argument = self._arguments[name]
        shape = tuple(argument["shape"])
        shape = (shape[0] * parts, *shape[1:]) if parts > 1 else shape
        if value.shape != shape or value.dtype != _dtype(argument["dtype"]):
            raise RunnerError(
                f"{name} must be {argument['dtype']} of shape {shape}, and is {value.dtype} of shape {value.shape}"
            )
        return value

    def _chosen(self, platform: str | None) -> list[Any]:
        try:
            found = self._jax.devices(platform)
        except RuntimeError as error:
            raise RunnerError(f"--platform={platform}: JAX has no such devices here ({error})") from None
        if len(found) < self.num_replicas:
            raise RunnerError(
                f"the program has {self.num_replicas} replicas, and JAX sees {len(found)} {found[0].platform} device(s)"
                f": use --platform=cpu, where devices can be made up, or export it with --replicas={len(found)}"
            )
        return found[: self.num_replicas]

    def _made_up(self) -> Arrays:
        numbers = np.random.default_rng(0)
        batch = {}
        for argument in self.description["arguments"]:
            if argument["kind"] != "batch":
                continue
            shape = (argument["shape"][0] * self.num_replicas, *argument["shape"][1:])
            dtype = _dtype(argument["dtype"])
            # Ones weigh an example, and are a class or a token that every model has.
            real = np.issubdtype(dtype, np.integer) or argument["name"] == "weight"
            batch[argument["name"]] = (np.ones(shape) if real else numbers.standard_normal(shape)).astype(dtype)
        return batch


def existing(directory: Path, name: str) -> Path:
    """A file of the export; RunnerError where it is not there."""
    path = directory / name
    if not path.is_file():
        raise RunnerError(f"{directory} has no {name}: name a directory that --mode=export_step wrote")
    return path


def _prepare_jax(num_devices: int, platform: str | None) -> None:
    """What JAX reads when it is imported: as many CPU devices, 64-bit counters, no search for other devices."""
    flag = "--xla_force_host_platform_device_count"
    present = os.environ.get("XLA_FLAGS", "")
    if flag not in present:
        os.environ["XLA_FLAGS"] = f"{present} {flag}={num_devices}".strip()
    os.environ["JAX_ENABLE_X64"] = "1"
    if platform == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", platform)
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        # What compiles for GPUs may be there without what runs on them: JAX would log a traceback of that, and go on.
        log = logging.getLogger("jax._src.xla_bridge")
        log.addFilter(lambda record: "jax_plugins.xla_cuda" not in record.getMessage())


def _compiled(portable: bytes, devices: list[Any]) -> Any:
    """The program, compiled for one replica a device; by parts of JAX that promise little, tried with JAX 0.10.2."""
    import jax

    try:
        from jax.extend import backend, mlir
        from jax.interpreters.mlir import make_ir_context, module_to_bytecode

        with make_ir_context() as context:
            module = module_to_bytecode(mlir.deserialize_portable_artifact(portable, context))
        options = backend.get_compile_options(
            num_replicas=len(devices), num_partitions=1, device_assignment=np.array(devices)[:, np.newaxis]
        )
        return devices[0].client.compile_and_load(module, devices, options)
    except (ImportError, AttributeError, TypeError) as error:
        raise RunnerError(
            f"JAX {jax.__version__} cannot run a program in this way ({error}): pip install 'jax==0.10.2', with which "
            "it was tried"
        ) from error


def _dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def timed_steps(runner: Runner, steps: int) -> Iterator[tuple[dict[str, float], float]]:
    """Takes steps; yields each one's report and seconds."""
    # There already, so that what is timed is the step.
    batches = [runner.placed(batch) for batch in runner.batches()]
    for step in range(steps):
        started = time.perf_counter()
        report = runner.step(batches[step % len(batches)])
        yield report, time.perf_counter() - started


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and runs the program; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    beside = Path(__file__).parent
    has_program = (beside / PROGRAM).is_file()
    parser.add_argument("directory", nargs="?" if has_program else None, default=beside, help="what export_step wrote")
    parser.add_argument("--steps", type=int, default=5, help="how many steps to take (default: 5)")
    parser.add_argument("--platform", help="cpu, gpu or tpu (default: the first that JAX finds)")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps={options.steps}: must be 1 or more")
    try:
        started = time.perf_counter()
        runner = Runner(options.directory, platform=options.platform)
    except (RunnerError, ImportError) as error:
        needs = ": the runner needs JAX and NumPy: pip install jax" if isinstance(error, ImportError) else ""
        print(f"error: {error}{needs}", file=sys.stderr)
        return 64
    print(f"{runner.devices}; compiled in {time.perf_counter() - started:.1f} s")
    if not (Path(options.directory) / BATCHES).is_file():
        print("no batch was exported: the numbers of a made-up one mean nothing, its times do")
    times = []
    for number, (report, seconds) in enumerate(timed_steps(runner, options.steps), start=1):
        weight = report["weight"] or 1.0
        skipped = "" if report["finite"] else "  skipped: gradients not finite"
        print(f"step {number}  loss {report['loss'] / weight:.6f}  {seconds * 1e3:.1f} ms{skipped}")
        times.append(seconds)
    if len(times) > 2:
        print(f"median of {len(times) - 1} steps, the first left out: {np.median(times[1:]) * 1e3:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
