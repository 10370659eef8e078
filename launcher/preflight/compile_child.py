"""The child process in which a compiler of XLA runs: it may take all memory, hang or abort, and harm nobody else.

    python -m launcher.preflight.compile_child FOLDER

FOLDER has what `compiler` put there. XLA's compilers for TPUs and for GPUs are called by way of JAX, on a machine that
has neither. JAX has no public function that compiles StableHLO for a topology; what its own `jit` calls is called here.
Tried with jax, jaxlib and jax-cuda12-pjrt 0.10.2 and 0.12.0 and libtpu 0.0.51 and 0.0.52. Nothing else may do this:
libtpu takes hold of the process, and a compiler may end it.
"""

import gzip
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.errors import EXIT_DONE
from launcher.machine import child_process
from launcher.machine.accelerators import WITHOUT_TRITON, xla_options

OUTCOME, _DUMP = "outcome.json.gz", "dump"

# XLA's dump of a GPU's program at the moment before its convolutions become calls of cuDNN, which cannot be counted: by
# then it is simplified and its loops' turns are known. The flag that asks for it, and how the file's name ends.
DUMP_BEFORE_LIBRARIES, _BEFORE_LIBRARIES = "--xla_dump_hlo_pass_re=conv-rewriter", ".before_conv-rewriter.hlo.pb"


# What XLA says when it has done everything but to turn its kernels into machine code, for which it looks for programs
# of the CUDA toolkit: the program is optimised, its memory assigned, and both are dumped by then.
# Leans on jaxlib: a missing assembler for GPUs is named in these words. Noticed by
# tests/preflight/test_gpu_preflight.py. Then: take the new words; preflight for GPUs needs them.
_NOT_ASSEMBLED = re.compile(r"No PTX compilation provider|libdevice not found|ptxas", re.IGNORECASE)


def main(argv: list[str]) -> int:
    """Compiles what the folder asks for and leaves the outcome there."""
    folder, request = Path(argv[1]), child_process.request_in(argv[1])
    dump = [f"--xla_dump_to={folder / _DUMP}", "--xla_dump_hlo_as_proto"]
    os.environ["XLA_FLAGS"] = " ".join([*dump, *request.pop("xla_flags")])
    outcome = _outcome(folder / _DUMP, request)
    with gzip.open(folder / OUTCOME, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(outcome, file)
    return EXIT_DONE


def _outcome(dump: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `compiled.Compilation`, and "unsupported": why these versions cannot be used, or None."""
    outcome: dict[str, Any] = {"error": None, "unsupported": None, "memory": {}, "cost": {}}
    started = time.monotonic()
    try:
        outcome |= _compile(**request, overrides=[*xla_options(request["stablehlo"]).items()])
        if request["platform"] == "cuda" and (refusal := outcome["error"]):
            # Without a GPU to try on, XLA may take tiles for a product of which Triton makes no kernel.
            shutil.rmtree(dump, ignore_errors=True)
            outcome |= {"error": None} | _compile(**request, overrides=[WITHOUT_TRITON])
            outcome |= {"error": refusal} if outcome["error"] else {"without_triton": refusal}
    except (ImportError, AttributeError, TypeError) as error:  # JAX has changed
        outcome["unsupported"] = f"{type(error).__name__}: {error}"
    outcome["seconds"] = time.monotonic() - started
    outcome |= _dumped(dump, request["platform"])
    failed = outcome["error"] is not None or outcome["unsupported"] is not None
    if not failed and not outcome["hlo"]:
        outcome["unsupported"] = "it left no optimised program"
    return outcome


# Leans on jaxlib: a program is compiled for a topology by these modules of jax and jaxlib. Noticed by
# tests/preflight/test_compiler.py. Then: see what `jax.jit` calls in the new version; preflight needs it.
def _compile(
    *,
    stablehlo: str,
    platform: str,
    topology: Mapping[str, Any],
    num_replicas: int,
    overrides: Sequence[tuple[str, bool]] = (),
) -> dict[str, Any]:
    """Answer of the compiler on a program for all devices of a topology; of one for GPUs all else is in XLA's dump."""
    import jax
    from jax.experimental import topologies
    from jax.interpreters.mlir import make_ir_context
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    context = make_ir_context()
    devices: Any = topologies.get_topology_desc(platform=platform, **topology).devices
    if len(devices) != num_replicas:
        return {"unsupported": f"{topology} has {len(devices)} devices, not {num_replicas}"}
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = num_replicas, 1
    options.env_option_overrides = list(overrides)
    assignment = np.arange(num_replicas, dtype=np.int32)[:, np.newaxis]
    options.device_assignment = xla_client.DeviceAssignment.create(assignment)
    device_list = xla_client.DeviceList(tuple(devices))
    try:
        with context:
            module = ir.Module.parse(stablehlo)
        made = devices[0].client.compile(module, executable_devices=device_list, compile_options=options)
    except (jax.errors.JaxRuntimeError, ir.MLIRError) as error:
        is_compiled = platform == "cuda" and _NOT_ASSEMBLED.search(str(error))
        return {} if is_compiled else {"error": str(error)}
    return _described(made) if platform == "tpu" else {}


def _described(made: Any) -> dict[str, Any]:
    statistics, cost = made.get_compiled_memory_stats(), made.cost_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {
        "memory": {name: int(getattr(statistics, f"{name}_size_in_bytes")) for name in names},
        "cost": {name: float(cost[name]) for name in ("flops", "bytes accessed") if name in cost},
    }


def _dumped(folder: Path, platform: str) -> dict[str, str]:
    """Dumps by XLA of the program, also of one that does not fit, a character a byte; "" where it wrote nothing."""

    def read(*endings: str) -> str:
        found = [path for ending in endings for path in sorted(folder.glob(f"*{ending}"))]
        return found[0].read_bytes().decode("latin-1") if found else ""

    # A GPU's have "_gpu" in front. A TPU's has cycles at the very end alone, and its buffers only before that.
    optimised, is_tpu = "[._]after_optimizations.hlo.pb", platform == "tpu"
    return {
        "hlo": read(".after_codegen.hlo.pb", optimised, ".oom_intermediate_module.hlo.pb"),
        "buffers": read(optimised) if is_tpu else "",
        "before_libraries": read(_BEFORE_LIBRARIES, ".before_optimizations.hlo.pb") if not is_tpu else "",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv))
