"""What is taken of JAX: MLIR, StableHLO and the way to it. Imported when it is first needed.

`jax.extend` and `jax.interpreters.mlir` promise less than the rest of JAX; tried with 0.10.2.
"""

import dataclasses
import os
from typing import Any

from launcher.errors import UsageError
from launcher.machine import installation


@dataclasses.dataclass(frozen=True, kw_only=True)
class JaxParts:
    """Modules of JAX, by their use here, and its version."""

    ir: Any
    stablehlo: Any
    mlir: Any  # conversion from HLO, portable artifacts
    new_context: Any  # makes an MLIR context that knows the dialects a step has
    version: str


def load() -> JaxParts:
    """Imports them.

    Raises:
      UsageError: JAX is not installed, or is one without these parts.
    """
    # Read when JAX is first imported. Nothing here runs on an accelerator, and JAX would keep it from others.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        import jax
    except ImportError:
        raise UsageError(
            "JAX is not installed, which makes a portable program of a training step: "
            f"{installation.jax_command('preflight')}"
        ) from None
    try:
        from jax.extend import mlir
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import stablehlo
        from jax.interpreters.mlir import make_ir_context

        parts = JaxParts(ir=ir, stablehlo=stablehlo, mlir=mlir, new_context=make_ir_context, version=jax.__version__)
        _ = mlir.hlo_to_stablehlo, mlir.serialize_portable_artifact
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"JAX {jax.__version__} lacks what makes a portable program of a training step ({error}): "
            "pip install 'jax>=0.10.2', with which it was tried"
        ) from None
    return parts
