"""`--engine=pjrt`: the step that TensorFlow traced, run by JAX on its own devices, one a replica.

The program is that of `lowering`, for as many replicas as there are devices. It is called inside a `jax.jit` over a
mesh of them, where what TensorFlow calls a replica is a partition: collectives are over the numbers of the devices.
Parts of JAX that promise little (`jax.export`'s record of a module) were tried with 0.10.2.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from launcher.data.distributed import batches_of_host
from launcher.data.order import LeftOut
from launcher.data.pipeline import Shard
from launcher.errors import UsageError
from launcher.machine import jax_devices
from launcher.machine.jax_devices import JaxDevices
from launcher.run import session as session_lib
from launcher.run.plan import RunPlan
from launcher.run.session import Session
from launcher.step.workers import Workers
from launcher.step_program import jax_parts, lowering, pod_module
from launcher.step_program.lowering import Argument, Lowered, StepProgram

# Steps that are handed to the devices before the first of them has ended.
_AHEAD = 2
_REPLICA = "replica"


def build(plan: RunPlan, *, compile_cache: str | None, from_chief: bool) -> Session:
    """The session of a plan of `jax_devices.plan`, whose steps JAX runs; the last two as `training.Order` has them.

    Raises:
      UsageError: JAX is missing or has other devices, or the recipe needs TensorFlow's own runtime.
      PeerError: a peer did not come.
    """
    _check(plan, from_chief)
    devices = jax_devices.start(plan.strategy, plan.cluster, compile_cache)
    engine = PjrtEngine(devices, plan.recipe.global_batch_size)
    engine.session = built = session_lib.build(plan, engine)
    return built


def _check(plan: RunPlan, from_chief: bool) -> None:
    recipe = plan.recipe
    if recipe.task.step_assigns is not None:
        raise UsageError(
            "--engine=pjrt: the model has a train_step of its own, which runs in TensorFlow alone; leave --engine out"
        )
    if from_chief:
        raise UsageError(
            "--restore_from_chief is for --engine=tensorflow: give every worker --model_dir on a disk that all share"
        )
    if "auto" in (recipe.microbatches, recipe.rematerialize):
        raise UsageError(
            "--engine=pjrt tries no settings: give train.microbatches and train.rematerialize values, such as those "
            "that --mode=preflight finds"
        )


class PjrtEngine:
    """An `Engine` on JAX's devices; `session` is what it runs the step of, given once it is built."""

    session: Session

    def __init__(self, devices: JaxDevices, global_batch_size: int):
        from jax.sharding import Mesh

        self.num_replicas, self.holds = len(devices.all), False
        self._devices, self._global_batch_size = devices, global_batch_size
        self._mesh = Mesh(np.array(devices.all), (_REPLICA,))
        several = devices.num_processes > 1
        self.workers = Workers(self._over_processes, devices.num_processes, are_several=several)
        self._held: dict[str, Any] = {}
        self._lowered: Lowered | None = None
        self._step: Callable[..., Any] | None = None
        self._arguments: dict[str, Argument] = {}
        self._waiting = ThreadPoolExecutor(1, "steps")

    def distribute(
        self, make: Callable[[Shard], tf.data.Dataset], *, seed: int, start_step: int, left_out: LeftOut, rows: int
    ) -> Iterable:
        local = len(self._devices.local)
        shard = Shard(
            global_batch_size=self._global_batch_size,
            num_replicas=self.num_replicas,
            first_replica=self._devices.first,
            local_replicas=local,
            seed=seed,
            start_step=start_step,
            rows=rows,
        )
        return _in_turn(batches_of_host(make, shard, left_out), local)

    def prepare(self) -> tf.Graph:
        if self._lowered is None:
            on_tpu = self.session.plan.strategy.accelerator == "tpu"
            self._lowered = lowering.lower_session(self.session, for_tpu=on_tpu)
            self._arguments = {one.name: one for one in self._lowered.program.arguments}
            self._step = _compiled(self._lowered.program, self._devices, self._mesh)
        return self._lowered.graph

    def run(self, batches: Iterator, num_steps: int) -> np.ndarray:
        self._take_state()
        assert self._step is not None
        rows: list[Any] = []
        got: list[tuple[float, float]] = []
        ended: list[Future[float]] = []
        with self._devices.peer_failures(" in the middle of a step"):
            for number in range(num_steps):
                asked = time.monotonic()
                parts = next(batches)
                got.append((asked, time.monotonic()))
                batch = {key: self._of_parts([part[key] for part in parts], 0) for key in parts[0]}
                self._held, row = self._step(self._held, batch)
                rows.append(row)
                ended.append(self._waiting.submit(_time_when_ready, row))
                if number >= _AHEAD:
                    ended[number - _AHEAD].result()
            table = np.stack([np.asarray(row.addressable_shards[0].data) for row in rows])
        # A step waits for its batch from when it asks and the one before it has ended.
        before = [asked for asked, _ in got[:1]] + [one.result() for one in ended[:-1]]
        waits = [max(0.0, there - max(asked, end)) for (asked, there), end in zip(got, before, strict=True)]
        return np.concatenate([table, np.array(waits, np.float32)[:, None]], axis=1)

    def value(self, name: str) -> np.ndarray:
        return jax_devices.whole(self._held[name])

    def put(self, name: str, value: np.ndarray) -> None:
        self._held[name] = self._placed(name, value)

    def bring_home(self) -> None:
        if not self.holds:
            return
        assert self._lowered is not None
        state = self.session.trainer.state
        values = {name: self.value(name) for name in self._lowered.variables}
        self.holds, self._held = False, {}
        named = state.variables()
        state.restore({name: value for name, value in values.items() if name in named})
        for name, variable in self._lowered.variables.items():
            if name not in named:
                variable.assign(values[name])

    def _take_state(self) -> None:
        if self.holds:
            return
        self.prepare()
        assert self._lowered is not None
        values = self.session.trainer.state.snapshot()
        rest = {name: one.numpy() for name, one in self._lowered.variables.items() if name not in values}
        values |= rest | self._lowered.constants
        self._held = {
            name: self._placed(name, values[name]) for name, one in self._arguments.items() if one.kind != "batch"
        }
        self.holds = True

    def _placed(self, name: str, value: np.ndarray) -> Any:
        """A whole value on every device, or each replica's part of it on its own."""
        axis, first, local = self._arguments[name].axis, self._devices.first, len(self._devices.local)
        if axis is None:
            return self._global([value] * local, None, value.shape)
        return self._of_parts(np.split(value, self.num_replicas, axis)[first : first + local], axis)

    def _of_parts(self, parts: Sequence[np.ndarray], axis: int) -> Any:
        one = parts[0].shape
        shape = tuple(size * self.num_replicas if place == axis else size for place, size in enumerate(one))
        return self._global(parts, axis, shape)

    def _global(self, parts: Sequence[np.ndarray], axis: int | None, shape: tuple[int, ...]) -> Any:
        from jax.sharding import NamedSharding

        jax = self._devices.jax
        # An array that shares the host's memory would be no memory that a step can write its results to.
        pairs = zip(parts, self._devices.local, strict=True)
        on = [jax.device_put(part, device, may_alias=False) for part, device in pairs]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self._mesh, _spec(axis)), on)

    def _over_processes(self, value: npt.ArrayLike) -> np.ndarray:
        from jax.experimental import multihost_utils

        with self._devices.peer_failures(""):
            return np.sum(multihost_utils.process_allgather(np.asarray(value)), axis=0)


def _in_turn(dataset: tf.data.Dataset, local: int) -> Iterator[list[dict[str, np.ndarray]]]:
    parts = dataset.as_numpy_iterator()
    while True:
        yield [next(parts) for _ in range(local)]


def _time_when_ready(row: Any) -> float:
    row.block_until_ready()
    return time.monotonic()


def _spec(axis: int | None) -> Any:
    from jax.sharding import PartitionSpec

    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, _REPLICA)


def _compiled(program: StepProgram, devices: JaxDevices, mesh: Any) -> Callable[..., Any]:
    """(held arrays, batch) -> (held arrays, report): the step of all replicas, which takes the arrays' memory."""
    jax = devices.jax
    from jax import export

    def spec(one: Argument) -> Any:
        return jax.ShapeDtypeStruct(one.shape, jax.numpy.dtype(one.dtype))

    def shell(*arguments: Any) -> list[Any]:
        return [jax.numpy.zeros(one.shape, one.dtype) for one in program.results]

    # A record of a function of this signature, in which the module takes the place of the function's own.
    made = export.export(jax.jit(shell, keep_unused=True), platforms=[devices.all[0].platform])
    exported = dataclasses.replace(
        made(*map(spec, program.arguments)),
        mlir_module_serialized=pod_module.of_partitions(jax_parts.load(), program.stablehlo),
        _get_vjp=None,
    )
    variables = [one for one in program.arguments if one.kind != "batch"]

    def step(held: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        found = exported.call(*[(batch if one.kind == "batch" else held)[one.name] for one in program.arguments])
        report = [value for one, value in zip(program.results, found, strict=True) if one.kind == "report"]
        new = {one.name: value for one, value in zip(program.results, found, strict=True) if one.kind == "variable"}
        return {**held, **new}, jax.numpy.stack(report)

    specs = {one.name: _spec(one.axis) for one in variables}
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, _spec(0)), out_specs=(specs, _spec(None)), check_vma=False)
    return jax.jit(mapped, donate_argnums=0)
