"""Context and sums of a replica that works together with the others."""

import tensorflow as tf


def context_of_several() -> tf.distribute.ReplicaContext | None:
    """The replica's context where there are others; None of one alone, and outside of replicas."""
    context = tf.distribute.get_replica_context()
    return None if context is None or context.num_replicas_in_sync == 1 else context


def sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    """The sum of what each replica has."""
    # Without the copy, a value that was not made inside the replica cannot be reduced.
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))
