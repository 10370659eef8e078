"""`--engine=pjrt`: the step that TensorFlow traced, run by JAX on its own devices, one a replica.

The program is that of `lowering`, for as many replicas as there are devices. It is called inside a `jax.jit` over a
mesh of them, where what TensorFlow calls a replica is a partition: collectives are over the numbers of the devices.
Parts of JAX that promise little (`jax.export`'s record of a module) were tried with 0.10.2.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from launcher.data.distributed import batches_of_host
from launcher.data.order import ALL_IN, LeftOut
from launcher.data.pipeline import Batch, Shard
from launcher.errors import UsageError
from launcher.machine import jax_devices
from launcher.machine.array_parts import Part, Range, Source, value_of, whole_of
from launcher.machine.jax_devices import JaxDevices
from launcher.run import session as session_lib
from launcher.run.plan import RunPlan
from launcher.run.session import Session
from launcher.step.initial_values import FirstValues
from launcher.step.state import State
from launcher.step.workers import Workers
from launcher.step_program import device_memory, jax_parts, lowering, pod_module
from launcher.step_program.lowering import Argument, Lowered, StepProgram

# Steps that are handed to the devices before the first of them has ended.
_AHEAD = 2
# Between two looks at whether devices are ready, where there are several.
_LOOK_SECONDS = 1e-4
_REPLICA = "replica"


def build(plan: RunPlan, *, compile_cache: str | None, from_chief: bool, trains: bool = True) -> Session:
    """The session of a plan of `jax_devices.plan`, whose steps JAX runs; the next two as `training.Order` has them.

    Raises:
      UsageError: JAX is missing or has other devices, or the recipe needs TensorFlow's own runtime.
      PeerError: a peer did not come.
    """
    _check(plan, from_chief, trains)
    devices = jax_devices.start(plan.strategy, plan.cluster, compile_cache)
    engine = PjrtEngine(devices, divides_weights=plan.recipe.shard == "all")
    engine.session = built = session_lib.build(plan, engine)
    return built


def _check(plan: RunPlan, from_chief: bool, trains: bool) -> None:
    recipe = plan.recipe
    if recipe.task.step_assigns is not None:
        raise UsageError(
            "--engine=pjrt: the model has a train_step of its own, which runs in TensorFlow alone; leave --engine out"
        )
    if from_chief:
        raise UsageError(
            "--restore_from_chief is for --engine=tensorflow: give every worker --model_dir on a disk that all share"
        )
    if trains and "auto" in (recipe.microbatches, recipe.rematerialize):
        raise UsageError(
            "--engine=pjrt tries no settings: give train.microbatches and train.rematerialize values, such as those "
            "that --mode=preflight finds"
        )


class PjrtEngine:
    """An `Engine` on JAX's devices; `session` is what it runs the step of, given once it is built."""

    session: Session

    def __init__(self, devices: JaxDevices, *, divides_weights: bool = False):
        from jax.sharding import Mesh

        self.num_replicas, self.holds = len(devices.all), False
        self._devices, self._on_tpu = devices, devices.all[0].platform == "tpu"
        self._mesh = Mesh(np.array(devices.all), (_REPLICA,))
        several = devices.num_processes > 1
        self.workers = Workers(self._over_processes, devices.num_processes, are_several=several)
        self.first_values: FirstValues | None = {} if divides_weights else None
        self.averages: Mapping[str, str] = {}
        self._held: dict[str, Any] = {}
        self._answers: dict[str, tuple[_Compiled, dict[str, Any], Any]] = {}
        self._lowered: Lowered | None = None
        self._step: _Compiled | None = None
        self._arguments: dict[str, Argument] = {}
        self._waiting, self._arriving = ThreadPoolExecutor(1, "steps"), ThreadPoolExecutor(1, "batches")

    def distribute(
        self, make: Callable[[Shard], tf.data.Dataset], *, left_out: LeftOut = ALL_IN, **batches: Any
    ) -> Iterable:
        local = len(self._devices.local)
        place = {"num_replicas": self.num_replicas, "first_replica": self._devices.first, "local_replicas": local}
        place["as_stored"] = self.session.plan.finish_stored is not None
        return _InTurn(batches_of_host(make, Shard(**{"seed": 0, **batches, **place}), left_out), local)

    def prepare(self) -> tf.Graph:
        if self._lowered is None:
            self._lowered = lowering.lower_session(self.session, for_tpu=self._on_tpu)
            self._arguments = {one.name: one for one in self._lowered.program.arguments}
            program, plan = self._lowered.program, self.session.plan
            self._step = _Compiled(program, self._devices, self._mesh, plan)
            self._step.check = lambda found: device_memory.check(found, program, plan, self._devices.memory_bytes)
        return self._lowered.graph

    def run(self, batches: Iterator, num_steps: int) -> np.ndarray:
        self.take_state()
        assert self._step is not None
        rows: list[Any] = []
        put: deque[dict[str, Any]] = deque()
        got: list[tuple[float, Future[float]]] = []
        ended: list[Future[float]] = []
        with self._devices.peer_failures(" in the middle of a step"):
            for number in range(num_steps):
                # A GPU copies a batch after all that it was given before: each is put there ahead of the step before.
                while len(got) < min(number + 2, num_steps):
                    asked = time.monotonic()
                    put.append(self._batch(next(batches)))
                    got.append((asked, self._arriving.submit(_time_when_ready, *put[-1].values())))
                rows.append(self._step(self._held, put.popleft()))
                ended.append(self._waiting.submit(_time_when_ready, rows[-1]))
                if number >= _AHEAD:
                    ended[number - _AHEAD].result()
            table = _table(rows)
        # A step waits until its batch is on the devices, from when that is asked for and the one before it has ended.
        before = [asked for asked, _ in got[:1]] + [one.result() for one in ended[:-1]]
        waits = [max(0.0, there.result() - max(asked, end)) for (asked, there), end in zip(got, before, strict=True)]
        return np.concatenate([table, np.array(waits, np.float32)[:, None]], axis=1)

    def forward(
        self, function: Callable[[Batch], tf.Tensor], batches: Iterable, *, of_rows: bool
    ) -> Callable[[], Callable[[Iterator, int], Any]]:
        assert isinstance(batches, _InTurn)
        lowered, program = self._forward(function, batches.dataset.element_spec, of_rows=of_rows)

        def begin() -> Callable[[Iterator, int], Any]:
            held = self._held_for(lowered)
            return partial(self._rows_of, program, held) if of_rows else partial(self._sums_of, program, held)

        return begin

    def answer(self, function: Callable[[dict[str, tf.Tensor]], Any], inputs: Mapping[str, np.ndarray]) -> Any:
        rows = len(next(iter(inputs.values()))) // self.num_replicas
        spec = {name: tf.TensorSpec([rows, *array.shape[1:]], array.dtype) for name, array in inputs.items()}
        if str(spec) not in self._answers:
            made: list[Any] = []

            def noted(batch: Batch) -> Any:
                made.append(function(batch))
                return made[-1]

            lowered, program = self._forward(noted, spec, of_rows=True)
            if not self.holds:  # from here on, for the programs of all shapes
                self._held, self.holds = self._held_for(lowered), True
                self._arguments = {one.name: one for one in lowered.program.arguments}
            self._answers[str(spec)] = program, self._held_for(lowered), made[-1]
        program, held, structure = self._answers[str(spec)]
        parts = zip(*(np.split(array, self.num_replicas) for array in inputs.values()), strict=True)
        with self._devices.peer_failures(" in an answer"):
            found = program(held, self._batch([dict(zip(inputs, part, strict=True)) for part in parts]))
            return tf.nest.pack_sequence_as(structure, [jax_devices.whole(one) for one in found])

    def _forward(self, function: Callable[[Batch], Any], spec: Any, *, of_rows: bool) -> tuple[Lowered, _Compiled]:
        lowered = lowering.lower_forward(self.session, function, spec, of_rows=of_rows, for_tpu=self._on_tpu)
        return lowered, _Compiled(lowered.program, self._devices, self._mesh, self.session.plan)

    def _held_for(self, lowered: Lowered) -> dict[str, Any]:
        """The arguments of a forward pass, but for the batch."""
        arguments, state = lowered.program.arguments, self.session.trainer.state
        return {one.name: self._in_evaluation(one, lowered, state) for one in arguments if one.kind != "batch"}

    def _sums_of(self, program: _Compiled, held: dict[str, Any], batches: Iterator, num_batches: int) -> np.ndarray:
        rows: list[Any] = []
        with self._devices.peer_failures(" in the middle of an evaluation"):
            for number in range(num_batches):
                rows.append(program(held, self._batch(next(batches))))
                if number >= _AHEAD:
                    _wait(rows[number - _AHEAD])
            return _table(rows)

    def _rows_of(self, program: _Compiled, held: dict[str, Any], batches: Iterator, num_batches: int) -> Any:
        batch = self._batch(next(batches))
        with self._devices.peer_failures(" in the middle of an evaluation"):
            result = program(held, batch)[0]
            _wait(result)
            return tuple(jax_devices.whole(one) for one in (batch["example"], batch["weight"], result))

    def _in_evaluation(self, one: Argument, lowered: Lowered, state: State) -> Any:
        """An argument's value on the devices: what they hold, another one if the evaluation may change it."""
        if one.kind == "constant":
            return self._everywhere(lowered.constants[one.name])
        name = self.averages.get(one.name, one.name)
        if not self.holds or name not in self._held:
            return self._placed(one, state.sources().get(one.name) or whole_of(lowered.variables[one.name].numpy))
        there, program = self._held[name], lowered.program
        is_changed = any(result.name == one.name for result in program.results if result.kind == "variable")
        if not is_changed and (there.dtype.name, self._arguments[name].axis) == (one.dtype, one.axis):
            return there
        as_wanted = self._devices.jax.sharding.NamedSharding(self._mesh, _spec(one.axis))
        return self._devices.jax.jit(lambda value: value.astype(one.dtype), out_shardings=as_wanted)(there)

    def value(self, name: str) -> np.ndarray:
        return jax_devices.whole(self._held[name])

    def own(self, name: str) -> np.ndarray | Part:
        array, axis = self._held[name], self._arguments[name].axis
        if axis is None or array.is_fully_addressable:
            return self.value(name)
        mine = np.concatenate([np.asarray(shard.data) for shard in _in_order(array, axis)], axis)
        size = array.shape[axis] // self.num_replicas
        return Part(mine, Range(axis, self._devices.first * size, mine.shape[axis]), array.shape)

    def put(self, name: str, value: np.ndarray) -> None:
        self._held[name] = self._placed(self._arguments[name], value_of(value))

    def bring_home(self, but: Collection[str] = ()) -> None:
        if not self.holds:
            return
        assert self._lowered is not None
        state = self.session.trainer.state
        named = state.variables().keys()
        self.holds = False
        state.put_all((name, self.value(name)) for name in self._lowered.variables if name in named - but)
        for name, variable in self._lowered.variables.items():
            if name not in named:
                variable.assign(self.value(name))
        self._held = {}

    def take_state(self) -> None:
        if self.holds:
            return
        self.prepare()
        assert self._lowered is not None
        state, lowered = self.session.trainer.state, self._lowered
        sources = state.sources()
        values = {name: whole_of(one.numpy) for name, one in lowered.variables.items() if name not in sources}
        constants = {name: value_of(value) for name, value in lowered.constants.items()}
        sources |= values | constants
        with self._devices.peer_failures(" as the weights and the optimizer's state were put there"):
            for name, one in self._arguments.items():
                if one.kind != "batch":
                    self._held[name] = self._placed(one, sources[name])
        self.holds = True
        state.let_go()

    def _placed(self, one: Argument, source: Source) -> Any:
        """A whole value on every device, or each replica's part of it on its own."""
        first, local = self._devices.first, len(self._devices.local)
        if one.axis is None:
            return self._everywhere(source(None))
        size = one.shape[one.axis]
        mine = source(Range(one.axis, first * size, local * size))
        return self._of_parts(np.split(mine, local, one.axis), one.axis)

    def _everywhere(self, value: np.ndarray) -> Any:
        return self._global([value] * len(self._devices.local), None, value.shape)

    def _batch(self, parts: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
        return {key: self._of_parts([part[key] for part in parts], 0) for key in parts[0]}

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


@dataclasses.dataclass(frozen=True)
class _InTurn:
    """The batches of one replica after the other, for all `local` ones of this process at once."""

    dataset: tf.data.Dataset
    local: int

    def __iter__(self) -> Iterator[list[dict[str, np.ndarray]]]:
        parts = self.dataset.as_numpy_iterator()
        while True:
            yield [next(parts) for _ in range(self.local)]


def _table(rows: Sequence[Any]) -> np.ndarray:
    """What each row has on all devices, once it is there."""
    for row in rows[-_AHEAD:]:
        _wait(row)
    return np.stack([np.asarray(row.addressable_shards[0].data) for row in rows])


def _time_when_ready(*arrays: Any) -> float:
    for one in arrays:
        _wait(one)
    return time.monotonic()


def _wait(row: Any) -> None:
    """Until every device of this process has its part, or one has failed: others may wait for that one without end."""
    parts = [shard.data for shard in row.addressable_shards]
    while len(parts) > 1:
        ready = [part.is_ready() for part in parts]
        for part, is_ready in zip(parts, ready, strict=True):
            if is_ready:
                part.block_until_ready()  # raises what has failed
        parts = [part for part, is_ready in zip(parts, ready, strict=True) if not is_ready]
        time.sleep(_LOOK_SECONDS)
    for part in parts:
        part.block_until_ready()


def _spec(axis: int | None) -> Any:
    from jax.sharding import PartitionSpec

    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, _REPLICA)


class _Compiled:
    """The step of all replicas: (held arrays, batch) -> its report, or a list of what has the rows of all replicas.

    The held arrays that it changes are others afterwards.

    The new arrays take the memory of the old ones.
    """

    check: Callable[[Any], None] | None = None  # told what memory it needs, before it is run

    def __init__(self, program: StepProgram, devices: JaxDevices, mesh: Any, plan: RunPlan):
        jax = devices.jax
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
        self._changed = {one.name for one in program.results if one.kind == "variable"}
        kept = {one.name for one in program.arguments if one.kind != "batch"} - self._changed
        specs = [
            {one.name: _spec(one.axis) for one in program.arguments if one.name in names}
            for names in (self._changed, kept)
        ]

        def step(changed: dict[str, Any], kept: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
            given = {**kept, **changed, **batch}
            found = list(
                zip(program.results, exported.call(*[given[one.name] for one in program.arguments]), strict=True)
            )
            report = [value for one, value in found if one.kind == "report"]
            new = {one.name: value for one, value in found if one.kind == "variable"}
            return new, report if of_rows else jax.numpy.stack(report)

        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(*specs, _spec(0)),
            out_specs=(specs[0], _spec(0 if of_rows else None)),
            check_vma=False,
        )
        self._run = jax.jit(mapped, donate_argnums=0)
        self._made: Any = None
        on_gpu = plan.strategy.accelerator == "gpu"
        self._options = {"xla_gpu_deterministic_ops": True} if plan.deterministic and on_gpu else None

    def __call__(self, held: dict[str, Any], batch: dict[str, Any]) -> Any:
        changed = {name: value for name, value in held.items() if name in self._changed}
        kept = {name: value for name, value in held.items() if name not in self._changed}
        if self._made is None:
            self._made = self._run.lower(changed, kept, batch).compile(self._options)
            if self.check is not None:
                self.check(self._made.memory_analysis())
        new, report = self._made(changed, kept, batch)
        held |= new
        return report


def _in_order(array: Any, axis: int) -> list[Any]:
    """What this process has of a global array, by its place."""
    return sorted(array.addressable_shards, key=lambda shard: shard.index[axis].start or 0)
