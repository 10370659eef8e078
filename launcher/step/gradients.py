"""From one replica's scaled gradients to the ones every replica applies.

    cast to reduce dtype -> bucket -> reduce (SUM) -> float32 -> unscale and weight -> check

Everything here runs in replica context. There is one collective a bucket, and one of a single number where each replica
squares another part for the norm, none of them inside a conditional, and one check after all of them, so replicas
can neither disagree nor wait for each other.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as tfxla

from launcher.data.pipeline import WEIGHT, Batch
from launcher.machine.no_autograph import no_autograph

# A bucket waits for the last of its gradients, and the last bucket for the end of the backward pass: of 64 MiB, it
# would be a third of a ResNet-50. Each bucket costs a few rounds over the network, too: see `benchmarks/wire.py`.
DEFAULT_BUCKET_BYTES = 16 * 2**20
# Each tensor alone: XLA merges collectives by itself, and to flatten a tensor is a copy on a TPU.
TPU_BUCKET_BYTES = 1
# Elements of a gradient whose squares cost less to sum than it costs to begin.
_SMALL = 4096
# Elements of a gradient that a GPU passes over in about the time that it takes to begin.
_TOGETHER = 2**20

Tensors = Sequence[tf.Tensor]


class Checked(NamedTuple):
    """Gradients ready to be applied, and the check of them.

    Attributes:
      gradients: float32, of the mean loss over the true weight of the global batch.
      norm: float32 scalar, their global norm.
      finite: bool scalar, whether they are finite, which is what a loss scale learns from.
      empty: bool scalar, whether the global batch has no weight, so that there is no mean loss.
      applied: bool scalar, whether they may be applied: finite, not of an empty batch, and `within` the limits.
      squares: float32 [gradients], the sum of the squares of each, where it was computed by itself; else None.
    """

    gradients: list[tf.Tensor]
    norm: tf.Tensor
    finite: tf.Tensor
    empty: tf.Tensor
    applied: tf.Tensor
    squares: tf.Tensor | None = None


@no_autograph
def dense(gradient: tf.Tensor | tf.IndexedSlices, shape: tf.TensorShape) -> tf.Tensor:
    """The gradient by a variable of this shape as one float32 tensor: bfloat16 IndexedSlices cannot be reduced, and
    sums need duplicates added. One that a Python function has made has no static shape of its own.
    """
    found = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
    return found if found.shape.is_fully_defined() else tf.ensure_shape(found, shape)


def plan_buckets(sizes: Sequence[int], dtypes: Sequence[tf.DType], bucket_bytes: int) -> list[list[int]]:
    """Groups tensors that travel together: of one dtype, as TensorFlow refuses to reduce mixed ones, and of at most
    `bucket_bytes` unless one tensor alone is larger.

    Args:
      sizes: number of elements of each tensor.

    Returns:
      Indices of the tensors of each bucket. The last tensors come first: their gradients are ready first.
    """
    buckets: list[list[int]] = []
    open_bucket: dict[tf.DType, tuple[list[int], int]] = {}
    for index in reversed(range(len(sizes))):
        dtype, size = dtypes[index], sizes[index] * dtypes[index].size
        bucket, filled = open_bucket.get(dtype, ([], 0))
        if not bucket or filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_bucket[dtype] = (bucket, filled + size)
    return buckets


@no_autograph
def to_reduce_dtype(gradients: Tensors, dtype: tf.DType) -> list[tf.Tensor]:
    """Gradients in the dtype that they are reduced in; on one replica too, so that the topology changes no result."""
    return [tf.cast(gradient, dtype) for gradient in gradients]


@no_autograph
def reduce_sum(tensors: Any, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Any:
    """Sums this replica's tensors, of static shapes, in any structure, over all replicas in their dtypes, one
    collective a bucket.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tensors
    reduced = tf.nest.flatten(tensors)
    sizes = [tensor.shape.num_elements() for tensor in reduced]
    for bucket in plan_buckets(sizes, [tensor.dtype for tensor in reduced], bucket_bytes):
        if len(bucket) == 1:  # in its own shape: XLA would copy a large one into another layout
            (index,) = bucket
            # A tensor of its own on each replica: TensorFlow takes one that all share for a sum that was made already.
            reduced[index] = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(reduced[index]))
            continue
        flat = tf.concat([tf.reshape(reduced[index], [-1]) for index in bucket], axis=0)
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, flat)
        parts = tf.split(total, [sizes[index] for index in bucket])
        for index, part in zip(bucket, parts, strict=True):
            reduced[index] = tf.reshape(part, reduced[index].shape)
    return tf.nest.pack_sequence_as(tensors, reduced)


@no_autograph
def of_each_replica(tensor: tf.Tensor) -> tf.Tensor:
    """Tensors of all replicas, finite float32, on all of them: [replicas, ...]."""
    context = tf.distribute.get_replica_context()
    mine = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync)
    return reduce_sum([tf.reshape(mine, [-1, *[1] * tensor.shape.rank]) * tensor[None]])[0]


@no_autograph
def by_rows(loss: tf.Tensor, weight: tf.Tensor, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums over all replicas as they are where the weight of their mean is the number of their rows."""
    (rows,) = reduce_sum([tf.reduce_sum(batch[WEIGHT])])
    return tf.math.divide_no_nan(loss, weight) * rows, rows


@no_autograph
def gather(parts: Tensors, axes: Sequence[int], *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> list[tf.Tensor]:
    """Puts together tensors of which each replica holds a part of a static shape, one collective a bucket.

    Args:
      axes: the dimension of each along which the parts lie in the order of the replicas.
      bucket_bytes: upper bound on what one collective puts together.
    """
    context = tf.distribute.get_replica_context()
    count = context.num_replicas_in_sync
    sizes = [part.shape.num_elements() for part in parts]
    whole: list[tf.Tensor] = list(parts)
    for bucket in plan_buckets(sizes, [part.dtype for part in parts], max(1, bucket_bytes // count)):
        if len(bucket) == 1:  # in its own shape: XLA would copy a large one into another layout
            (index,) = bucket
            shape = parts[index].shape.as_list()
            shape[axes[index]] *= count
            gathered = context.all_gather(tf.identity(parts[index]), axis=axes[index])
            whole[index] = tf.reshape(gathered, shape)
            continue
        flat = tf.concat([tf.reshape(parts[index], [-1]) for index in bucket], axis=0)
        of_all = tf.reshape(context.all_gather(flat, axis=0), [count, -1])
        for index, of_one in zip(bucket, tf.split(of_all, [sizes[index] for index in bucket], axis=1), strict=True):
            axis, shape = axes[index], parts[index].shape.as_list()
            stacked = tf.reshape(of_one, [count, *shape])
            side_by_side = tf.transpose(stacked, [*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)])
            shape[axis] *= count
            whole[index] = tf.reshape(side_by_side, shape)
    return whole


@no_autograph
def unscale_and_check(
    reduced: Tensors,
    *,
    scale: tf.Tensor,
    nominal_weight: float,
    true_weight: tf.Tensor,
    shards: Collection[int] = (),
    divides: bool = False,
    each: bool = False,
) -> Checked:
    """Unscales reduced gradients, corrects them to the true weight and tests them once.

    Args:
      reduced: gradients of `scale * sum(losses) / nominal_weight`, summed over replicas, in the reduce dtype.
      scale: float32 scalar, the loss scale they were computed with.
      nominal_weight: the static weight the loss was divided by before differentiation.
      true_weight: float32 scalar, sum of the real examples' weights over all replicas.
      shards: places of those of which each replica has another part; the norm is that of the wholes.
      divides: whether each replica squares a share of what all of them have, too: less to read, and one number to wait
        for.
      each: whether the squares of each are summed by itself, of none that are shards.
    """
    factor = tf.math.divide_no_nan(tf.constant(nominal_weight, tf.float32), scale * true_weight)
    gradients, squares = [tf.cast(gradient, tf.float32) for gradient in reduced], None
    if each:
        # In pairs and in threes, so that XLA takes them for two factors: kernels that sum squares would else write the
        # products for others to read, which then read no factor.
        squares, gradients = _squares(_times(gradients, factor, 2)), _times(gradients, factor, 3)
    else:
        gradients = [gradient * factor for gradient in gradients]
    norm = _norm(gradients, reduced, factor, shards, divides) if squares is None else tf.sqrt(tf.reduce_sum(squares))
    finite, empty = tf.math.is_finite(norm), tf.equal(true_weight, 0.0)
    return Checked(gradients, norm, finite, empty, tf.logical_and(finite, tf.logical_not(empty)), squares)


def _times(tensors: Tensors, factor: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Products with a number; for GPUs, XLA then makes one kernel of what is done to several of one shape.

    It does so where operations read one tensor that has more than one element, here `count` times the number, and adds
    no bytes.
    """
    # Leans on TensorFlow: XLA's barrier has this wrapper in Python; without it XLA sees that all are one number.
    # Noticed by tests/preflight/test_kernels.py. Then: multiply by `factor`, in a kernel for each.
    (same,) = tfxla.optimization_barrier(tf.fill([count], factor))
    return [one * (same[0] if one.shape.num_elements() <= _TOGETHER else factor) for one in tensors]


def _squares(gradients: Tensors) -> tf.Tensor:
    """The sum of squares of each of `gradients`, by rows of matrices, each of which is one kernel's work.

    In a row are the squares of a small one, or those of a large one, summed over its last axis.
    """

    squares = [tf.square(gradient) for gradient in gradients]
    rows = [tf.reshape(one if _is_small(one) else tf.reduce_sum(one, axis=-1), [-1]) for one in squares]
    sizes = [one.shape[0] for one in rows]
    sums: dict[int, tf.Tensor] = {}
    for _, places in itertools.groupby(sorted(range(len(rows)), key=sizes.__getitem__), sizes.__getitem__):
        same = [*places]
        of_each = tf.reduce_sum(tf.stack([rows[place] for place in same]), axis=1)
        sums |= zip(same, tf.unstack(of_each), strict=True)
    return tf.stack([sums[place] for place in range(len(rows))])


def _norm(
    gradients: Tensors,
    reduced: Tensors,
    factor: tf.Tensor,
    shards: Collection[int],
    divides: bool,
) -> tf.Tensor:
    """The global norm of `gradients`; what a replica squares alone is summed by one small reduction.

    Small ones are joined, and shares taken, of what was reduced: XLA would else write each gradient twice.
    """

    vector = tf.constant([-1])

    def sums_of_squares(places: Sequence[int]) -> list[tf.Tensor]:
        small = [index for index in places if _is_small(gradients[index])]
        vectors = [tf.reshape(tf.cast(reduced[index], tf.float32), vector) for index in small]
        joined = [tf.concat(vectors, axis=0) * factor] if small else []
        return [2 * tf.nn.l2_loss(one) for one in joined + [gradients[index] for index in places if index not in small]]

    wholes, own = [], sums_of_squares(list(shards)) if shards else []
    for index in range(len(gradients)):
        share, weight = _share(reduced[index]) if divides and index not in shards else (None, 1.0)
        if share is not None:
            own.append(weight * 2 * tf.nn.l2_loss(tf.cast(share, tf.float32) * factor))
        elif index not in shards:
            wholes.append(index)
    squares = sums_of_squares(wholes)
    if own:
        squares += reduce_sum([tf.reduce_sum(tf.stack(own))])
    # Not `add_n`, which begins with whichever number it may overwrite: on a busy machine another one on each worker.
    # Neither additions, which TensorFlow makes one `add_n` of.
    return tf.sqrt(tf.reduce_sum(tf.stack(squares)))


def _share(tensor: tf.Tensor) -> tuple[tf.Tensor | None, float]:
    """This replica's share of a tensor that all have, and the share's weight in a sum over the replicas.

    Shares are whole tiles of a TPU's memory, 8 x 128 of the last two dimensions. Where there are fewer of them than
    replicas, several have the same one, for less than 1. None of small tensors, and of those that cannot be divided.
    """
    context = tf.distribute.get_replica_context()
    replicas, shape = context.num_replicas_in_sync, tensor.shape.as_list()
    tiles = [1] * len(shape) + [8, 128]
    counts = [
        1 if size % tile else math.gcd(size // tile, replicas)
        for size, tile in zip(shape, tiles[-len(shape) :], strict=True)
    ]
    count = max(counts, default=1)
    if count == 1 or _is_small(tensor):
        return None, 1.0
    axis = counts.index(count)
    shape[axis] //= count
    begin = [0] * len(shape)
    begin[axis] = tf.math.floormod(context.replica_id_in_sync_group, count) * shape[axis]
    return tf.slice(tensor, begin, shape), count / replicas


def _is_small(gradient: tf.Tensor) -> bool:
    count = gradient.shape.num_elements()  # not known of rows of a table
    return count is not None and count <= _SMALL


@no_autograph
def within(checked: Checked, loss: tf.Tensor, limits: tf.Tensor) -> Checked:
    """Has gradients not applied where the mean loss or their norm is above its limit; `limits` is float32 [2], of the
    loss and of the norm, infinity for none.
    """
    is_within = tf.logical_and(loss <= limits[0], checked.norm <= limits[1])
    return checked._replace(applied=tf.logical_and(checked.applied, is_within))
