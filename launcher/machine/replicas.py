"""Context and sums of a replica that works together with the others."""

import tensorflow as tf

from launcher.machine.no_autograph import no_autograph


def context_of_several() -> tf.distribute.ReplicaContext | None:
    """The replica's context where there are others; None of one alone, and outside of replicas."""
    context = tf.distribute.get_replica_context()
    return None if context is None or context.num_replicas_in_sync == 1 else context


def sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    """The sum of what each replica has."""
    # Without the copy, a value that was not made inside the replica cannot be reduced.
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))


@no_autograph
def read_rows(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Rows of this replica's copy of a variable, [*ids.shape, ...]; in replica context, without a read of the whole."""
    return tf.raw_ops.ResourceGather(resource=table.handle, indices=ids, dtype=table.dtype)


@no_autograph
def write_rows(table: tf.Variable, ids: tf.Tensor, values: tf.Tensor) -> None:
    """Assigns values [n, ...] to the rows `ids` [n] of this replica's copy; where one stands twice, they are equal."""
    tf.raw_ops.ResourceScatterUpdate(resource=table.handle, indices=ids, updates=values)
