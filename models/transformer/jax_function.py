"""Functions of JAX called from TensorFlow, forward and backward, by its operation XlaCallModule.

A function is exported for a platform, for which no device is needed, and XLA compiles it with the step around it.
TensorFlow has the operation for `jax2tf` and promises nothing of it: tried with TensorFlow 2.20, 2.21 and JAX 0.10.2,
and TensorFlow 2.21 and JAX 0.11.2.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as tfxla

# 2.18 and 2.19 do not know all of the StableHLO that JAX 0.10.2 writes ("Cannot deserialize computation").
_OLDEST = (2, 20)
_STABLEHLO = "1.13.0"
_TAKES = {"version", "platforms", "disabled_checks"}


def missing() -> str:
    """Why this TensorFlow cannot call functions of JAX; "" where it can. Does not import JAX."""
    call = getattr(tfxla, "call_module", None)
    new = tuple(map(int, tf.__version__.split(".")[:2])) >= _OLDEST
    if new and call is not None and set(inspect.signature(call).parameters) >= _TAKES:
        return ""
    return f"TensorFlow {tf.__version__} cannot call functions that JAX 0.10.2 exports; 2.20 and 2.21 can"


def differentiable(
    function: Callable[..., Any], arguments: Sequence[tf.TensorSpec], platform: str, *, trained: int
) -> Callable[..., tf.Tensor]:
    """A function of JAX as one of TensorFlow, with its gradient.

    Args:
        function: Of arrays to one array.
        arguments: Static shapes and dtypes of what it is given.
        platform: JAX's name of what it is to run on, such as "tpu".
        trained: How many of the arguments, the first ones, have a gradient.

    Returns:
        A function of tensors of these shapes, to be called while XLA compiles.
    """
    import jax

    config: Any = jax.config
    if config.jax_platforms is None:  # --engine=pjrt has set it; without, devices are TensorFlow's, and JAX gets none
        config.update("jax_platforms", "cpu")
    structure: Any = None

    def forward(*values: Any) -> Any:
        nonlocal structure
        result, pull = jax.vjp(lambda *first: function(*first, *values[trained:]), *values[:trained])
        kept, structure = jax.tree.flatten(pull)
        return [result, *kept]

    def backward(upstream: Any, *kept: Any) -> Any:
        return list(jax.tree.unflatten(structure, kept)(upstream))

    specs = [jax.ShapeDtypeStruct(one.shape, one.dtype.as_numpy_dtype) for one in arguments]
    ahead = _exported(forward, specs, platform)
    back = _exported(backward, [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in ahead.out_avals], platform)

    def called(*values: tf.Tensor) -> tf.Tensor:
        others, scope = values[trained:], tf.get_current_name_scope()

        def gradients(upstream: tf.Tensor, *kept: tf.Tensor) -> tuple[tf.Tensor, ...]:
            with tf.name_scope(f"gradient_tape/{scope}/"):  # as TensorFlow names gradients of its own operations
                return tuple(_call(back, [upstream, *kept]))

        @tf.custom_gradient
        def run(*values: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            result, *kept = _call(ahead, [*values, *others])
            return result, lambda upstream: gradients(upstream, *kept)

        return run(*values[:trained])

    return called


def _exported(function: Callable[..., Any], specs: Sequence[Any], platform: str) -> Any:
    import jax
    from jax import export

    with jax.enable_x64(False):  # kernels of Pallas are written without; --engine=pjrt turns it on
        return export.export(jax.jit(function, keep_unused=True), platforms=[platform])(*specs)


def _call(exported: Any, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    results = exported.out_avals
    # Leans on TensorFlow: `call_module` of a private module takes what jax.export makes. Noticed by
    # tests/models/test_attention_kernel.py. Then: see what jax2tf calls in the new version; train.attention = 'kernel'
    # needs it.
    found = tfxla.call_module(
        values,
        version=exported.calling_convention_version,
        module=_older(exported.mlir_module_serialized),
        Tout=[tf.dtypes.as_dtype(one.dtype.name) for one in results],
        Sout=[one.shape for one in results],
        platforms=[platform.upper() for platform in exported.platforms],
        disabled_checks=("platform",),  # a step for a TPU or GPU is lowered on a CPU
    )
    return [tf.ensure_shape(one, of.shape) for one, of in zip(found, results, strict=True)]


def _older(module: bytes) -> bytes:
    """The module in a version of StableHLO that TensorFlow 2.20 knows; JAX 0.11 writes a newer one."""
    from jax.extend import mlir
    from jax.interpreters.mlir import make_ir_context

    with make_ir_context() as context:
        return mlir.serialize_portable_artifact(mlir.deserialize_portable_artifact(module, context), _STABLEHLO)
