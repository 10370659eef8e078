"""State of a run on JAX's devices: whole on each, or in parts, and at home in TensorFlow's variables in between."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.machine import jax_devices
from launcher.machine.array_parts import Part, Range, Source, value_of, whole_of
from launcher.machine.jax_devices import JaxDevices
from launcher.optimizers.weight_shards import WeightShard
from launcher.runtime.initial_values import FirstValues
from launcher.runtime.tensorflow import plain
from launcher.runtime.traits import Held, Variable
from launcher.step_program import device_arrays, lowering
from launcher.step_program.lowering import Argument

_REPLICA = "replica"


class DeviceState:
    """The `RunState` of devices, one a replica.

    Args:
      divides_weights: each device has a part of the weights, too.

    Attributes:
      arrays: that the devices hold, by the names of variables.
      parts: how it is divided, by the name of what is.
    """

    def __init__(self, devices: JaxDevices, *, divides_weights: bool):
        self._devices, self.is_away = devices, False
        self.first_values: FirstValues | None = {} if divides_weights else None
        self.averages: Mapping[int, Variable] = {}
        self.arrays: dict[str, Any] = {}
        self.parts: dict[str, WeightShard] = {}
        self._sources: dict[str, Source] = {}  # of what variables at home have no value of
        self._variables: dict[str, tf.Variable] = {}

    @functools.cached_property
    def mesh(self) -> Any:
        return self._devices.jax.sharding.Mesh(np.array(self._devices.all), (_REPLICA,))

    def hold(self, held: Held) -> None:
        self.held, self._variables = held, held.all_variables()
        self._names = {id(variable): name for name, variable in self._variables.items()}
        self.parts = lowering.parts(held, divides_weights=self.divides_weights)
        first = self.first_values or {}
        made = {name: first[id(one)].make for name, one in self._variables.items() if id(one) in first}
        self._sources = {name: whole_of(make) for name, make in made.items()}

    @property
    def divides_weights(self) -> bool:
        return self.first_values is not None

    def read(self, variable: Variable) -> np.ndarray:
        name = self._names[id(plain(variable))]
        return jax_devices.whole(self.arrays[name]) if self.is_away else self.source(name)(None)

    def read_part(self, variable: Variable) -> np.ndarray | Part:
        self.take()
        name = self._names[id(plain(variable))]
        array, shard = self.arrays[name], self.parts.get(name)
        if shard is None or array.is_fully_addressable:
            return self.read(variable)
        axis, size = shard.axis, shard.shape[shard.axis]
        mine = np.concatenate([np.asarray(one.data) for one in device_arrays.in_order(array, axis)], axis)
        return Part(mine, Range(axis, self._devices.first * size, mine.shape[axis]), array.shape)

    def write(self, variable: Variable, value: np.ndarray | Source) -> None:
        name, source = self._names[id(plain(variable))], value if callable(value) else value_of(value)
        if self.is_away:
            self.arrays[name] = self._placed(name, source)
        elif callable(value) or variable.shape != value.shape:  # of which the variable is a part
            self._sources[name] = source
        else:
            self._sources.pop(name, None)
            variable.assign(value)

    def source(self, name: str) -> Source:
        """What makes a variable's value, on whatever it is beside the variable."""
        if name in self._sources:
            return self._sources[name]
        variable, shard = self._variables[name], self.parts.get(name)
        if shard is None or variable.shape == shard.whole.shape:
            return whole_of(variable.numpy)
        # The optimizer has made one part, and they begin alike.
        return whole_of(lambda: np.concatenate([variable.numpy()] * shard.count, shard.axis))

    def take(self) -> None:
        if self.is_away:
            return
        with self._devices.peer_failures(" as the weights and the optimizer's state were put there"):
            for name in self._variables:
                self.arrays[name] = self._placed(name, self.source(name))
        self.is_away = True
        self._sources.clear()
        for variable in self._variables.values():
            if self.first_values and (first := self.first_values.get(id(variable))) is not None:
                first.forget(variable)

    def bring_home(self, but: Iterable[Variable] = ()) -> None:
        if not self.is_away:
            return
        left = {id(plain(variable)) for variable in but}
        self.is_away = False
        for name, variable in self._variables.items():
            if id(variable) not in left:
                self.write(variable, jax_devices.whole(self.arrays[name]))
        self.arrays = {}

    def taken(self, variables: Iterable[Argument], changed: Collection[str]) -> dict[str, Any]:
        """The variables that a program takes, for an evaluation: others where it may change them."""
        return {one.name: self._in_evaluation(one, one.name in changed) for one in variables}

    def _in_evaluation(self, one: Argument, changes: bool) -> Any:
        if not self.is_away:
            return self._placed(one.name, self.source(one.name))
        average = self.averages.get(id(self._variables[one.name]))
        name = one.name if average is None else self._names[id(average)]
        there, part = self.arrays[name], self.parts.get(name)
        axis = None if part is None else part.axis
        if not changes and (there.dtype.name, axis) == (one.dtype, one.axis):
            return there
        as_wanted = self._devices.jax.sharding.NamedSharding(self.mesh, spec_of(one.axis))
        return self._devices.jax.jit(lambda value: value.astype(one.dtype), out_shardings=as_wanted)(there)

    def _placed(self, name: str, source: Source) -> Any:
        """A whole value on every device, or each replica's part of it on its own."""
        first, local, shard = self._devices.first, len(self._devices.local), self.parts.get(name)
        if shard is None:
            return self.everywhere(source(None))
        size = shard.shape[shard.axis]
        mine = source(Range(shard.axis, first * size, local * size))
        return self.of_parts(np.split(mine, local, shard.axis), shard.axis)

    def everywhere(self, value: np.ndarray) -> Any:
        return self._global([value] * len(self._devices.local), None, value.shape)

    def of_parts(self, parts: Sequence[np.ndarray], axis: int) -> Any:
        one = parts[0].shape
        shape = tuple(size * len(self._devices.all) if place == axis else size for place, size in enumerate(one))
        return self._global(parts, axis, shape)

    def _global(self, parts: Sequence[np.ndarray], axis: int | None, shape: tuple[int, ...]) -> Any:
        jax = self._devices.jax
        # An array that shares the host's memory would be no memory that a step can write its results to.
        pairs = zip(parts, self._devices.local, strict=True)
        on = [jax.device_put(part, device, may_alias=False) for part, device in pairs]
        return jax.make_array_from_single_device_arrays(shape, jax.sharding.NamedSharding(self.mesh, spec_of(axis)), on)


def spec_of(axis: int | None) -> Any:
    from jax.sharding import PartitionSpec

    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, _REPLICA)
