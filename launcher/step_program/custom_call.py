"""XLA custom calls out of a TensorFlow graph.

TensorFlow has no public operation for them; its own Python wrapper is used, as TensorFlow 2.21.0 has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from launcher.errors import UsageError


# Leans on TensorFlow: XLA's custom calls have this wrapper in Python. Noticed by tests/step_program/test_lowering.py,
# tests/step_program/test_simulated_pod.py. Then: use the operation XlaCustomCallV2 by its new wrapper; preflight and
# export_step need it.
def custom_call(target: str, operands: Sequence[tf.Tensor], result: tf.TensorSpec) -> tf.Tensor:
    """A call that stands in the HLO under the name `target`; it can be compiled to HLO and not be run.

    Args:
      target: `call_target_name` of the HLO instruction.
      operands: of static shapes.
      result: static shape and dtype of the only result.

    Raises:
      UsageError: this TensorFlow has no such operation.
    """
    try:
        from tensorflow.compiler.tf2xla.python.xla import custom_call_v2
    except ImportError:
        raise UsageError(
            f"TensorFlow {tf.__version__} has no XlaCustomCallV2, by which a training step becomes a program for "
            "several replicas; install 2.21, which has it"
        ) from None
    (value,) = custom_call_v2(target, list(operands), [result])
    return tf.ensure_shape(value, result.shape)
