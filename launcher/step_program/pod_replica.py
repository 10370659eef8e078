"""A replica context to trace for a pod: its collectives are XLA custom calls that mark where real ones go.

TensorFlow has no public operation for custom calls; its own Python wrapper is used, as TensorFlow 2.21.0 has it.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from launcher.errors import UsageError

ALL_REDUCE = "launcher.all_reduce_sum"
ALL_GATHER = "launcher.all_gather_"  # and the dimension
REPLICA_ID = "launcher.replica_id"


# Leans on TensorFlow: XLA's custom calls have this wrapper in Python. Noticed by tests/step_program/test_lowering.py,
# tests/step_program/test_simulated_pod.py. Then: use the operation XlaCustomCallV2 by its new wrapper; preflight and
# --engine=pjrt need it.
def _custom_call(target: str, operands: Sequence[tf.Tensor], result: tf.TensorSpec) -> tf.Tensor:
    """A call that stands in the HLO under the name `target`; it can be compiled to HLO, from static shapes, not run."""
    try:
        from tensorflow.compiler.tf2xla.python.xla import custom_call_v2
    except ImportError:
        raise UsageError(
            f"TensorFlow {tf.__version__} has no XlaCustomCallV2, by which a training step becomes a program for "
            "several replicas; install 2.21, which has it"
        ) from None
    (value,) = custom_call_v2(target, list(operands), [result])
    return tf.ensure_shape(value, result.shape)


# Leans on TensorFlow: a subclass of ReplicaContext may answer `all_reduce` by itself. Noticed by
# tests/step_program/test_simulated_pod.py. Then: see what the new ReplicaContext calls; preflight and
# --engine=pjrt need it.
class PodReplica(tf.distribute.ReplicaContext):
    """Any one of the replicas of a pod, for tracing a step that is compiled and not run here.

    Inside `with PodReplica(...)`, `tf.distribute.get_replica_context()` is this context. A reduction becomes the custom
    call `ALL_REDUCE`, what puts parts together `ALL_GATHER`, and the replica's number the custom call `REPLICA_ID`.

    Args:
      strategy: under which the variables were made; of one device, so that variables are plain ones.
      num_replicas: of the pod.
      for_tpu: put parts together as TPUStrategy does, whose `all_gather` is a sum over replicas that each have zeros in
        place of the others' parts (TensorFlow 2.21).
    """

    def __init__(self, strategy: tf.distribute.Strategy, num_replicas: int, *, for_tpu: bool = False):
        super().__init__(strategy, replica_id_in_sync_group=0)
        self._num_replicas = num_replicas
        self._for_tpu = for_tpu

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of the pod."""
        return self._num_replicas

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """int32 scalar, not known before the program runs."""
        return _custom_call(REPLICA_ID, [], tf.TensorSpec([], tf.int32))

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Any, options: Any = None) -> Any:
        """As in `tf.distribute.ReplicaContext`, differentiable too; one custom call a tensor."""
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        reduced = [self._all_reduce_one(tf.convert_to_tensor(part), mean) for part in tf.nest.flatten(value)]
        return tf.nest.pack_sequence_as(value, reduced)

    def _all_reduce_one(self, tensor: tf.Tensor, mean: bool) -> tf.Tensor:
        def reduced(part: tf.Tensor) -> tf.Tensor:
            total = _custom_call(ALL_REDUCE, [part], tf.TensorSpec(part.shape, part.dtype))
            return total / self._num_replicas if mean else total

        # The gradient of a sum over replicas is the sum over replicas of the gradients.
        return tf.custom_gradient(lambda part: (reduced(part), reduced))(tensor)

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refused: there are no other replicas to merge with."""
        raise UsageError(
            "the model or the optimizer calls merge_call of its replica context, for which a step cannot be lowered; "
            "use all_reduce"
        )

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """As in `tf.distribute.ReplicaContext`, but not differentiable; one custom call a tensor."""
        return tf.nest.map_structure(lambda part: self._all_gather_one(tf.convert_to_tensor(part), axis), value)

    def _all_gather_one(self, tensor: tf.Tensor, axis: int) -> tf.Tensor:
        shape = tensor.shape.as_list()
        shape[axis] *= self._num_replicas
        if self._for_tpu:
            mine = tf.one_hot(self.replica_id_in_sync_group, self._num_replicas, dtype=tensor.dtype)
            mine = tf.reshape(mine, [self._num_replicas if place == axis else 1 for place in range(len(shape) + 1)])
            return tf.reshape(self._all_reduce_one(tf.expand_dims(tensor, axis) * mine, mean=False), shape)
        return _custom_call(f"{ALL_GATHER}{axis}", [tensor], tf.TensorSpec(shape, tensor.dtype))
