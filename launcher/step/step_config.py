"""StepConfig: what one training step does, apart from the model; StepParts: all that it works on."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from launcher.data.pipeline import Batch
from launcher.step.clipping import Clipping
from launcher.step.moving_average import MovingAverage
from launcher.step.precision import Counters, LossScale
from launcher.step.regularization import Penalty
from launcher.step.statistics import Statistic
from launcher.tasks.base import Task
from launcher.tasks.cross_entropy import WHOLE, LossChunks


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Settings of one step: all that it does, apart from the model.

    Attributes:
      global_batch_size: examples of one step over all replicas and microbatches.
      microbatches: parts a replica's batch is split in; gradients add up in float32.
      rows: of one such part, padding included.
      shared_by: the workers of the whole job, where fewer cannot share its global batch evenly; else 0.
      nominal_weight: static weight the loss is divided by before differentiation; the true one follows the reduction.
      reduce_dtype: dtype gradients are reduced in, on one replica too, so that the topology does not change the result.
      bucket_bytes: upper bound on the payload of one collective.
      clipping: how the unscaled mean gradient is bounded.
      penalty: penalty on weights by layer type, or None.
      ema_decay: decay of the moving average of weights and moving statistics, or None for no average.
      jit_compile: compile the replica-local forward and backward pass with XLA.
      compiled: whether XLA compiles that pass: by `jit_compile`, or because a TPU runs nothing else.
      finish_stored: makes the numbers of a batch that came as it is stored, and leaves another as it is; or None.
      loss_chunks: whether a loss over a vocabulary is computed in pieces.
      one_program: whether XLA compiles the whole step for GPUs: it computes both branches of a conditional, too, and
        small kernels take longer to begin than to run.
      seed: base of all random numbers drawn inside the model.
      selects: whether `tf.where` keeps what a skipped step must not change, instead of `tf.cond`: on a TPU, where both
        branches of a conditional are computed, and where the update has collectives of its own.
      one_copy: whether all replicas have one copy of each variable, which the first of them changes.
      shards: replicas among which the optimizer's state is shared out; 1 where each holds all of it.
      lazy_embeddings: whether rows of tables that a batch does not look up stay as they are, whatever the optimizer.
      has_limits: whether steps are skipped whose loss or gradient norm is above what `Trainer.limit` says.
    """

    global_batch_size: int
    microbatches: int
    rows: int
    shared_by: int = 0
    nominal_weight: float
    reduce_dtype: tf.DType
    bucket_bytes: int
    clipping: Clipping
    ema_decay: float | None
    penalty: Penalty | None = None
    jit_compile: bool
    compiled: bool = False
    finish_stored: Callable[[Batch], Batch] | None = None
    loss_chunks: LossChunks = WHOLE
    one_program: bool = False
    seed: int
    selects: bool = False
    one_copy: bool = False
    shards: int = 1
    lazy_embeddings: bool = False
    has_limits: bool = False

    def num_parts(self, num_replicas: int) -> int:
        """Parts of the global batch with anything but padding in them: all, or all but the last ones."""
        return min(num_replicas * self.microbatches, -(-self.global_batch_size // self.rows))

    @property
    def checks_shards(self) -> bool:
        """Whether a replica checks and clips its part alone of a gradient whose weight it updates a part of.

        Of a sum that is used as a whole nowhere, a TPU's compiler reduces each replica's part alone.
        """
        return self.selects and not self.clipping.needs_wholes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """All that one step works on.

    Attributes:
      optimizer: an `Optimizer`, or `Optimizers` of a model that has a step of its own.
      statistics: what the model's forward pass assigns, see `launcher.step.statistics`.
    """

    task: Task
    model: keras.Model
    optimizer: Any
    loss_scale: LossScale
    counters: Counters
    ema: MovingAverage
    config: StepConfig
    statistics: Sequence[Statistic]
