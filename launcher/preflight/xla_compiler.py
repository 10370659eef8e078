"""The compilers of XLA for TPUs and for GPUs by way of JAX, on a machine that has neither.

JAX has no public function that compiles StableHLO for a topology; what its own `jit` calls is called here. Tried with
jax, jaxlib and jax-cuda12-pjrt 0.10.2 and libtpu 0.0.51. Only `compile_child` may import this: libtpu takes hold of
the process, and a compiler may end it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np


# Leans on jaxlib: a program is compiled for a topology by these modules of jax and jaxlib. Noticed by
# tests/preflight/test_compiler.py. Then: see what `jax.jit` calls in the new version; preflight needs it.
class UnsupportedVersionError(Exception):
    """These versions of jax, jaxlib and the compiler have not what is needed."""


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


# XLA's dump of a GPU's program at the moment before its convolutions become calls of cuDNN, which cannot be counted: by
# then it is simplified and its loops' turns are known. The flag that asks for it, and how the file's name ends.
DUMP_BEFORE_LIBRARIES, BEFORE_LIBRARIES = "--xla_dump_hlo_pass_re=conv-rewriter", ".before_conv-rewriter.txt"

_NOTHING_SAID = Executable(memory={}, cost={}, hlo="")

# What XLA says when it has done everything but to turn its kernels into machine code, for which it looks for programs
# of the CUDA toolkit: the program is optimised, its memory assigned, and both are dumped by then.
# Leans on jaxlib: a missing assembler for GPUs is named in these words. Noticed by
# tests/preflight/test_gpu_preflight.py. Then: take the new words; preflight for GPUs needs them.
_NOT_ASSEMBLED = re.compile(r"No PTX compilation provider|libdevice not found|ptxas", re.IGNORECASE)


def compile_program(stablehlo: str, *, platform: str, topology: Mapping[str, Any], num_replicas: int) -> Executable:
    """Compiles one program for all devices of a topology.

    Args:
      stablehlo: MLIR text.
      platform: "tpu" or "cuda".
      topology: what JAX's get_topology_desc is to be told of it.
      num_replicas: devices of the topology.

    Returns:
      What the compiler says of it; of a GPU nothing, all that is to be had is in XLA's dump.

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
        devices: Any = topologies.get_topology_desc(platform=platform, **dict(topology)).devices
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
        raise UnsupportedVersionError(f"{topology} has {len(devices)} devices, not {num_replicas}")
    try:
        with context:
            module = ir.Module.parse(stablehlo)
        made = compile_(module, executable_devices=device_list, compile_options=options)
    except (refusal, ir.MLIRError) as error:
        if platform == "cuda" and _NOT_ASSEMBLED.search(str(error)):
            return _NOTHING_SAID
        raise CompileError(str(error)) from error
    return _described(made) if platform == "tpu" else _NOTHING_SAID


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
