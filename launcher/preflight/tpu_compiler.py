"""The TPU compiler by way of JAX, on a machine without a TPU.

JAX has no public function that compiles StableHLO for a topology; what its own `jit` calls is called here. Tried with
jax and jaxlib 0.10.2 and libtpu 0.0.51. Only `compile_child` may import this: libtpu takes hold of the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


class UnsupportedVersionError(Exception):
    """These versions of jax, jaxlib and libtpu have not what is needed."""


class CompileError(Exception):
    """The compiler refuses the program; the text is its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executable:
    """What the compiler says of the program it made.

    Attributes:
      memory: bytes a device, by the names of XLA's CompiledMemoryStats without "_size_in_bytes".
      cost: XLA's cost analysis.
      hlo: the optimised program; empty where jaxlib cannot read it, which then is to be had from XLA's dump alone.
    """

    memory: dict[str, int]
    cost: dict[str, float]
    hlo: str


def compile_program(
    stablehlo: str, *, topology_name: str, topology_options: Mapping[str, Any], num_replicas: int
) -> Executable:
    """Compiles one program for all devices of a topology.

    Args:
      stablehlo: MLIR text.
      topology_name, topology_options: as `slices.Slice` has them.
      num_replicas: devices of the topology.

    Raises:
      CompileError: the program does not compile or does not fit.
      UnsupportedVersionError: JAX has changed.
    """
    try:
        import jax
        from jax.experimental import topologies
        from jax.interpreters.mlir import make_ir_context
        from jaxlib import xla_client
        from jaxlib.mlir import ir

        context = make_ir_context()
        devices: Any = topologies.get_topology_desc(
            platform="tpu", topology_name=topology_name, **dict(topology_options)
        ).devices
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = num_replicas, 1
        assignment = np.arange(num_replicas, dtype=np.int32)[:, np.newaxis]
        options.device_assignment = xla_client.DeviceAssignment.create(assignment)
        device_list = xla_client.DeviceList(tuple(devices))
        compile_ = devices[0].client.compile
        refusal = jax.errors.JaxRuntimeError
    except (ImportError, AttributeError, TypeError) as error:
        raise UnsupportedVersionError(f"{type(error).__name__}: {error}") from error
    if len(devices) != num_replicas:
        raise UnsupportedVersionError(f"{topology_name} has {len(devices)} devices, not {num_replicas}")
    try:
        with context:
            module = ir.Module.parse(stablehlo)
        made = compile_(module, executable_devices=device_list, compile_options=options)
    except (refusal, ir.MLIRError) as error:
        raise CompileError(str(error)) from error
    return _described(made)


def _described(made: Any) -> Executable:
    try:
        statistics = made.get_compiled_memory_stats()
        names = ("argument", "output", "alias", "temp", "generated_code")
        memory = {name: int(getattr(statistics, f"{name}_size_in_bytes")) for name in names}
        cost = made.cost_analysis()
        return Executable(
            memory=memory,
            cost={name: float(cost[name]) for name in ("flops", "bytes accessed") if name in cost},
            hlo=_text(made),
        )
    except (AttributeError, TypeError) as error:
        raise UnsupportedVersionError(f"{type(error).__name__}: {error}") from error


def _text(made: Any) -> str:
    import jax

    try:
        return made.hlo_modules()[0].to_string()
    except jax.errors.JaxRuntimeError:
        # jaxlib 0.10.2 refuses programs of libtpu 0.0.51 that update an asynchronous operation, as those for v6e do.
        return ""
