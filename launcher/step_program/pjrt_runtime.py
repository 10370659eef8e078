"""`--engine=pjrt`: the step that TensorFlow traced, run by JAX on its own devices, one a replica.

The program is that of `lowering`, for as many replicas as there are devices. It is called inside a `jax.jit` over a
mesh of them, where what TensorFlow calls a replica is a partition: collectives are over the numbers of the devices.
Parts of JAX that promise little (`jax.export`'s record of a module) were tried with 0.10.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from launcher.data.order import ALL_IN, LeftOut
from launcher.data.pipeline import WEIGHT, Batch, Shard
from launcher.machine import jax_devices, xla
from launcher.machine.accelerators import xla_options
from launcher.machine.jax_devices import JaxDevices
from launcher.run import session as session_lib
from launcher.run.plan import RunPlan
from launcher.runtime import initial_values
from launcher.runtime.batches import batches_of_host
from launcher.runtime.tensorflow import TfRuntime
from launcher.runtime.traits import Training, Traits
from launcher.runtime.workers import Workers
from launcher.step_program import device_arrays, device_memory, jax_parts, lowering, pod_module
from launcher.step_program.device_arrays import Waits
from launcher.step_program.device_state import DeviceState, spec_of
from launcher.step_program.host_batches import InTurn
from launcher.step_program.lowering import Argument, Lowered
from launcher.tasks.base import Task

# Steps that are handed to the devices before the first of them has ended.
_AHEAD = 2

Arrays = list[list[Any]]
"""The arrays that a program changes, and those that it only reads, by the order of their names."""


def make(plan: RunPlan) -> PjrtRuntime:
    """The runtime of a plan of `jax_devices.plan`.

    Raises:
      UsageError: JAX is missing or has other devices.
      PeerError: a peer did not come.
    """
    return PjrtRuntime(
        jax_devices.start(plan.strategy, plan.cluster),
        session_lib.tf_runtime(plan),
        task=plan.recipe.task,
        divides_weights=plan.recipe.shard == "all",
        as_stored=plan.finish_stored is not None,
        deterministic=plan.deterministic and plan.strategy.accelerator == "gpu",
    )


class PjrtRuntime:
    """A `Runtime` on JAX's devices, one a replica.

    Args:
      host: of one device, the host's CPU.
      task: of the run; None where rows of weight 0 may fill up a batch.
      divides_weights: each device has a part of the weights, too.
      as_stored: batches come as they are stored.
      deterministic: programs of GPUs give the same bits each time.
    """

    def __init__(
        self,
        devices: JaxDevices,
        host: TfRuntime,
        *,
        task: Task | None = None,
        divides_weights: bool = False,
        as_stored: bool = False,
        deterministic: bool = False,
    ):
        self._task = task
        self.devices, self.host, self.num_replicas = devices, host, len(devices.all)
        self.deterministic, self._as_stored = deterministic, as_stored
        several = devices.num_processes > 1
        self.traits = Traits(compiles=True, several_processes=several, divides_rows=True, own_parts=True)
        self.workers = Workers(self._over_processes, devices.num_processes, are_several=several)
        self.state = DeviceState(devices, divides_weights=divides_weights)
        self.waiting, self.arriving = ThreadPoolExecutor(1, "steps"), ThreadPoolExecutor(1, "batches")

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return initial_values.scope(self.host.strategy, self.state.first_values)

    def batches(self, make: Callable[[Shard], tf.data.Dataset], *, left_out: LeftOut = ALL_IN, **about: Any) -> InTurn:
        first, local = self.devices.first, len(self.devices.local)
        task = self._task
        by_rows = task is not None and (task.step_assigns is not None or task.divides_rows)
        place: dict[str, Any] = {"num_replicas": self.num_replicas, "first_replica": first, "local_replicas": local}
        place = {"rows": 0} if by_rows else place
        shard = Shard(**{"seed": 0, **about, **place, "as_stored": self._as_stored})
        dataset = batches_of_host(make, shard, left_out)
        return InTurn(dataset, range(first, first + local), divided_by=self.num_replicas if by_rows else None)

    def loop(self, function: Callable[[Batch], tf.Tensor], training: Training | None = None) -> PjrtLoop:
        return PjrtLoop(self, function, training)

    def rows(self, function: Callable[[Batch], Any]) -> PjrtRows:
        return PjrtRows(self, function)

    def batch_of(self, inputs: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        parts = zip(*(np.split(array, self.num_replicas) for array in inputs.values()), strict=True)
        return [dict(zip(inputs, part, strict=True)) for part in parts]

    def batch(self, parts: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
        """A step's batch, on its way to the devices; where they have the host's memory, the step itself takes it."""
        if self.devices.num_processes == 1 and self.devices.all[0].platform == "cpu":
            joined = parts[1:] and {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            return joined or parts[0]
        return {key: self.state.of_parts([part[key] for part in parts], 0) for key in parts[0]}

    def _over_processes(self, value: npt.ArrayLike) -> np.ndarray:
        from jax.experimental import multihost_utils

        with self.devices.peer_failures(""):
            return np.sum(multihost_utils.process_allgather(np.asarray(value)), axis=0)


class _OnDevices:
    """A function of one replica's batch, as a program for each kind of batch."""

    def __init__(
        self,
        runtime: PjrtRuntime,
        function: Callable[[Batch], Any],
        training: Training | None = None,
        *,
        of_rows: bool = False,
    ):
        self.runtime, self._function, self._of_rows = runtime, function, of_rows
        self.trains, self._microbatches = training is not None, training.microbatches if training else 1
        self._programs: dict[str, Program] = {}

    def trace(self, batches: Any) -> tf.Graph:
        return self.program(batches.element_spec).graph

    def program(self, spec: Mapping[str, tf.TensorSpec]) -> Program:
        """For batches of these tensors."""
        if (key := str(sorted(spec.items()))) not in self._programs:
            made: list[Any] = []

            def noted(batch: Batch) -> list[tf.Tensor]:
                with contextlib.nullcontext() if self.trains else xla.compiling(True):
                    made.append(self._function(batch))
                return tf.nest.flatten(made[-1]) if self._of_rows else tf.unstack(made[-1])

            runtime = self.runtime
            lowered = lowering.lower(
                runtime.state.held,
                noted,
                spec,
                strategy=runtime.host.strategy,
                num_replicas=runtime.num_replicas,
                divides_weights=runtime.state.divides_weights,
                trains=self.trains,
                microbatches=self._microbatches,
                for_tpu=runtime.devices.all[0].platform == "tpu",
            )
            check = functools.partial(
                device_memory.check, lowered.program, self._microbatches, runtime.devices.memory_bytes
            )
            self._programs[key] = Program(lowered, runtime, made[-1], check if self.trains else None)
        return self._programs[key]

    def program_for(self, parts: Sequence[Mapping[str, np.ndarray]]) -> Program:
        return self.program({key: tf.TensorSpec(value.shape, value.dtype) for key, value in parts[0].items()})


class PjrtLoop(_OnDevices):
    """A `Loop` over a program that is called for each batch."""

    def begin(self) -> Callable[[Iterator, int], np.ndarray]:
        runtime, held = self.runtime, dict[str, Any]()
        if self.trains:
            runtime.state.take()
            held = runtime.state.arrays

        def run(batches: Iterator, count: int) -> np.ndarray:
            with runtime.devices.peer_failures(f" in the middle of {'a step' if self.trains else 'an evaluation'}"):
                return self._run(held, batches, count)

        return run

    def _run(self, held: dict[str, Any], batches: Iterator, count: int) -> np.ndarray:
        runtime, program, state = self.runtime, cast(Program, None), Arrays()
        rows, put, of_rows = list[Any](), deque[tuple[Program, dict[str, Any]]](), dict[int, Program]()

        def sent(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
            if (size := len(parts[0][WEIGHT])) not in of_rows:
                of_rows[size] = self.program_for(parts)
            return runtime.batch(of_rows[size].taken_by(parts))

        waits = Waits(sent, runtime.arriving, runtime.waiting)
        try:
            for number in range(count):
                # A GPU copies a batch after all that it was given before: each is put there ahead of the step before.
                while number + len(put) < min(number + 2, count):
                    parts, batch = waits.of_next(batches, rows[-1:])
                    put.append((of_rows[len(parts[0][WEIGHT])], batch))
                before, (program, batch) = program, put.popleft()
                if program is not before:
                    held |= zip(before.changed, state[0], strict=True) if state else ()
                    held |= {} if held else runtime.state.taken(program.variables, program.changed)
                    state = program.state(held)
                rows.append(program(state, batch))
                waits.of_step(rows[-1])
                if number >= _AHEAD:
                    device_arrays.wait(rows[number - _AHEAD])
        finally:
            if state:
                held |= zip(program.changed, state[0], strict=True)
        for row in rows[-_AHEAD:]:
            device_arrays.wait(row)
        table = np.stack([np.asarray(row.addressable_data(0)) for row in rows])
        return np.concatenate([table, waits.seconds()[:, None]], axis=1) if self.trains else table


class PjrtRows(_OnDevices):
    """`Rows` of a program that is called for each batch."""

    def __init__(self, runtime: PjrtRuntime, function: Callable[[Batch], Any]):
        super().__init__(runtime, function, of_rows=True)

    def begin(self) -> Callable[[Any], Any]:
        held: dict[int, Arrays] = {}

        def answer(parts: Sequence[dict[str, np.ndarray]]) -> Any:
            program = self.program_for(parts)
            with self.runtime.devices.peer_failures(" in the middle of an evaluation"):
                if id(program) not in held:
                    held[id(program)] = program.state(self.runtime.state.taken(program.variables, program.changed))
                found = program(held[id(program)], self.runtime.batch(program.taken_by(parts)))
                for one in found:
                    device_arrays.wait(one)
                return tf.nest.pack_sequence_as(program.structure, [jax_devices.whole(one) for one in found])

        return answer


class Program:
    """A function of all replicas: (state, batch) -> its report, or a list of what has the rows of all replicas.

    The arrays that it changes are others afterwards, and take the memory of the old ones.

    Attributes:
      variables: those of its arguments that are.
      changed: names of those that it changes, sorted.
      structure: of what the function returns.
      graph: what was lowered.
    """

    def __init__(
        self, lowered: Lowered, runtime: PjrtRuntime, structure: Any, check: Callable[[Any], None] | None = None
    ):
        program, devices, jax = lowered.program, runtime.devices, runtime.devices.jax
        from jax import export

        def spec(one: Argument) -> Any:
            return jax.ShapeDtypeStruct(one.shape, jax.numpy.dtype(one.dtype))

        def shell(*arguments: Any) -> list[Any]:
            return [jax.numpy.zeros(one.shape, one.dtype) for one in program.results]

        # Gloo's reduce_scatter is suspected: between processes, a part's last row was wrong once in thousands of them.
        scatters = devices.num_processes == 1 or devices.all[0].platform != "cpu"
        # A record of a function of this signature, in which the module takes the place of the function's own.
        made = export.export(jax.jit(shell, keep_unused=True))
        exported = dataclasses.replace(
            made(*map(spec, program.arguments)),
            mlir_module_serialized=pod_module.of_partitions(jax_parts.load(), program.stablehlo, scatters=scatters),
            _get_vjp=None,
        )
        of_rows = program.results[0].shape != ()
        self.structure, self.graph, self._check, self._on_host = structure, lowered.graph, check, lowered.on_host
        self.variables = [one for one in program.arguments if one.kind == "variable"]
        self.changed = sorted(one.name for one in program.results if one.kind == "variable")
        self._constants = {name: runtime.state.everywhere(value) for name, value in lowered.constants.items()}
        axes = {one.name: spec_of(one.axis) for one in program.arguments if one.kind != "batch"}
        self._kept = sorted(axes.keys() - self.changed)
        specs = [[axes[name] for name in names] for names in (self.changed, self._kept)]

        def step(changed: list[Any], kept: list[Any], batch: dict[str, Any]) -> tuple[list[Any], Any]:
            given = dict(zip([*self.changed, *self._kept], [*changed, *kept], strict=True)) | batch
            found = list(
                zip(program.results, exported.call(*[given[one.name] for one in program.arguments]), strict=True)
            )
            report = [value for one, value in found if one.kind == "report"]
            new = {one.name: value for one, value in found if one.kind == "variable"}
            return [new[name] for name in self.changed], report if of_rows else jax.numpy.stack(report)

        mapped = jax.shard_map(
            step,
            mesh=runtime.state.mesh,
            in_specs=(*specs, spec_of(0)),
            out_specs=(specs[0], spec_of(0 if of_rows else None)),
            check_vma=False,
        )
        divided = jax.sharding.NamedSharding(runtime.state.mesh, spec_of(0))
        self._run = jax.jit(mapped, donate_argnums=0, in_shardings=(None, None, divided))
        self._made: Any = None
        self._options = xla_options(program.stablehlo) if devices.all[0].platform == "gpu" else {}
        if runtime.deterministic:
            self._options["xla_gpu_deterministic_ops"] = True

    def state(self, held: Mapping[str, Any]) -> Arrays:
        """What a call takes of arrays that are held by name."""
        given = {**held, **self._constants}
        return [[given[name] for name in names] for names in (self.changed, self._kept)]

    def taken_by(self, parts: Sequence[dict[str, np.ndarray]]) -> Sequence[dict[str, np.ndarray]]:
        """Replicas' batches as it takes them."""
        return parts if self._on_host is None else [self._on_host(part) for part in parts]

    def __call__(self, state: Arrays, batch: dict[str, Any]) -> Any:
        if self._made is None:
            self._made = self._run.lower(*state, batch).compile(self._options or None)
            if self._check is not None:
                self._check(self._made.memory_analysis())
        state[0], report = self._made(*state, batch)
        return report
