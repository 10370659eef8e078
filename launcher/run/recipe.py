"""The recipe of a run: the keyword arguments that every gin file binds as `train.…`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gin

from launcher.checkpoints.saver import ON_ERROR
from launcher.config.bound_types import check_least, check_value, one_of
from launcher.config.gin_bindings import missing_bindings
from launcher.data.pipeline import Data, steps_per_epoch
from launcher.errors import UsageError
from launcher.machine.runtime_kinds import KINDS, TENSORFLOW
from launcher.models.transformer.attention_form import FORMS
from launcher.optimizers import Optimizer
from launcher.reporting import trackers  # noqa: F401  (recipes bind its sinks)
from launcher.reporting.sinks import Sink
from launcher.run.actions.early_stopping import EarlyStopping
from launcher.run.actions.precision_watch import PrecisionWatch
from launcher.run.actions.spikes import Spikes
from launcher.run.start.start_weights import StartFrom
from launcher.step import freezing, layer_policies
from launcher.step.clipping import Clipping
from launcher.step.regularization import Penalty
from launcher.tasks.base import complete

SAVE_MODEL = ("best", "last", "none")
BATCH_NORM = ("auto", "global", "local")
SHARD = ("none", "optimizer", "all")


def _check_known(configurable: str, settings: Any, known: Mapping[str, Sequence[Any]]) -> None:
    for name, values in known.items():
        value = getattr(settings, name)
        check_value(f"{configurable}.{name}", value, value in values, one_of(values))


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Settings of how checkpoints are written and kept, and what they leave behind.

    Attributes:
      every_minutes: minutes between checkpoints, besides `train.checkpoint_every`; 0 for never.
      keep: newest checkpoints kept, besides the best.
      keep_every_hours: besides those, checkpoints written at least so many hours apart are kept for ever, the first one
        included; 0 for none.
      asynchronous: write them in a thread while training goes on, at the price of one copy of the state in the host's
        memory.
      on_error: what a checkpoint that cannot be written means before the end: "stop", or "continue" and try again at
        the next one.
      on_changed_data: what it means that the training data is not what it was when the checkpoint was written that the
        run goes on from: "stop", or "continue" with the data that is there now.
      on_changed_program: what it means that the program is not the one that wrote this checkpoint, in what decides what
        is trained: "stop", "continue" with what it is now, or "fresh" to begin anew, with what is in the folder moved
        to `before_1` in it. A learning rate, a dropout and the like may change in any case, from there on.
      save_model: whose weights MODEL_DIR/model.keras gets when training ends: "best" (the best checkpoint's, else the
        last one's), "last", or "none" to write no such file. They are averaged where `train.evaluate_ema` evaluates
        averages.
    """

    every_minutes: float = 10.0
    keep: int = 3
    keep_every_hours: float = 0.0
    asynchronous: bool = True
    on_error: str = "stop"
    on_changed_data: str = "stop"
    on_changed_program: str = "stop"
    save_model: str = "best"

    def __post_init__(self) -> None:
        check_least("Checkpoints", self, keep=1, every_minutes=0, keep_every_hours=0)
        known = {"on_error": ON_ERROR, "on_changed_data": ON_ERROR, "on_changed_program": (*ON_ERROR, "fresh")}
        _check_known("Checkpoints", self, {**known, "save_model": SAVE_MODEL})


@gin.configurable("train")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run, as the gin files describe it.

    Attributes:
      task: model, data and loss (`launcher.tasks.base.Task`), e.g. `@image_classification()`.
      optimizer: builder called under the strategy's scope, a reference without parentheses, e.g. `@momentum`. None for
        the one that comes with the task's model, if it does.
      global_batch_size: examples a step, over all replicas and microbatches.
      steps: length of the run in steps. Bind it or `epochs`; of the two, the one that is bound last counts.
      epochs: length of the run in passes over the training examples.
      microbatches: parts each replica's batch is split in, to fit a larger batch in the same memory; "auto" for the
        fewest that fit, which are tried on the devices when training starts.
      rematerialize: whether layers that can, such as the blocks of transformers, compute their activations again in the
        backward pass instead of keeping them: less memory, about a third more arithmetic. None for what the model's own
        arguments say; "auto" for only if the step does not fit without, tried as for `microbatches`.
      steps_per_loop: most steps that the device takes before the host looks again; as many as take about a second,
        by their time so far, on all workers alike. It changes no number.
      strategy: what `--strategy` means when the flag is not given; or a function, a reference without parentheses, that
        returns a `tf.distribute.Strategy` or a `TfRuntime` of one's own.
      engine: what runs the steps unless `--engine` says it: "tensorflow", or "pjrt" for JAX's runtime.
      precision: "auto", "float32", "mixed_float16", "mixed_bfloat16" or "mixed_float8".
      precision_overrides: policies of single layers by a regular expression on their path, such as
        {'stage3_.*': 'float32'}; see `launcher.step.layer_policies.apply`.
      attention: "plain" for the scores of all positions at once, "blocks" for attention whose memory does not grow with
        the square of the length, "kernel" for JAX's splash attention on TPUs and cuDNN's on NVIDIA GPUs, "auto" for
        blocks where rows are long enough for them; of transformers. "plain" and "kernel" also of layers of Keras on
        GPUs with --engine=pjrt.
      batch_norm: what batch normalisation takes its statistics over in training: "global" for the global batch, "local"
        for each microbatch of each replica by itself, whose moving statistics are averaged; "auto" for "global" in a
        compiled Keras model, else for what its layers were made for. "global" on several replicas works neither with
        several `microbatches` nor, but on TPUs, with `jit_compile`.
      precision_watch: `@PrecisionWatch()` to sample what float16 does to the gradients during training, or None.
      replay_every: steps between two passes over one batch whose gradients are compared bit by bit, on each replica, to
        find devices that compute wrong numbers; 0 for never. On GPUs it needs `--deterministic`.
      sinks: where events go besides the console, metrics.jsonl and TensorBoard: `[@WandbSink()]`, `[@MlflowSink()]` or
        your own; see `launcher.reporting.sinks.Sink`.
      loss_scale: "auto", "none", `@DynamicLossScale()` or `@FixedLossScale()`.
      reduce_dtype: dtype gradients are reduced in: "auto", "float16", "bfloat16" or "float32".
      bucket_bytes: upper bound on one gradient collective; None for 16 MiB, and on a TPU for each gradient by itself,
        as the compiler merges them there.
      clipping: bounds of gradients; see `launcher.step.clipping.Clipping`.
      shard: what is shared out over the replicas: "none"; "optimizer", the optimizer's state: each replica keeps the
        state of its part of every large weight, updates that part, and all put the parts together; "all", the weights
        as well: a replica has no more than its part of them, and those of a layer are put together while it is
        computed. Trains to the same weights.
      penalty: penalty on weights by layer type, `@penalty()`, or None.
      start: the weights it starts with; see `launcher.run.start.start_weights.StartFrom`.
      freeze: regular expressions on whole paths of layers and weights that are not trained, such as ('base/.*',); see
        `launcher.step.freezing.freeze`.
      rate_multipliers: what multiplies the learning rate of layers and weights, by a regular expression on their whole
        path, such as {'base/.*': 0.1}.
      lazy_embeddings: whether optimizers with momentum or decay, such as Adam, leave rows of a table alone that a batch
        does not look up, as LazyAdam and PyTorch's SparseAdam do: faster, and another function than Keras's. Plain
        descent and Adagrad never move such rows.
      ema_decay: decay of an exponential moving average of the weights and moving statistics, such as 0.9999; None for
        no average.
      evaluate_ema: evaluate the averaged weights, when there are any.
      jit_compile: compile each replica's forward and backward pass with XLA.
      loss_chunks: pieces of the tokens for which a loss over a vocabulary is computed, one after another, instead of
        from whole logits. 1 for whole logits; "auto" for pieces where the logits of a microbatch are more than 256 MiB
        (4 GiB on a GPU) and the model can give features instead, on a TPU of about 1,024 tokens.
      spikes: what is done about spikes of loss or gradient norm, `@Spikes()`, or None; see
        `launcher.run.actions.spikes.Spikes`.
      early_stopping: `@EarlyStopping()` to end a run that no longer gets better, or None; see
        `launcher.run.actions.early_stopping.EarlyStopping`.
      skip_batches: first and last batch of each range that is not trained on, such as [(120, 122)]. Batches count from
        1, as steps do; the batches that follow move up.
      max_consecutive_overflows: consecutive non-finite steps, at a scale that can fall no further, that end the run.
      seed: base of all random numbers, unless `--seed` is given.
      log_every: steps between log events.
      evaluate_every: steps between evaluations; 0 for only at the end.
      checkpoint_every: steps between checkpoints; 0 for only those by time, of best evaluations and at the end.
      checkpoints: what else there is to say of them; see `Checkpoints`.
      best_metric: evaluation metric the best checkpoint is chosen by: the lowest value of loss, perplexity and
        bits_per_byte, the highest of any other.
      eval_batch_size: examples of an evaluation batch over all replicas; None for `global_batch_size`.
    """

    task: Any = gin.REQUIRED
    optimizer: Callable[..., Optimizer] | None = None
    global_batch_size: int = gin.REQUIRED
    steps: int | None = None
    epochs: float | None = None
    microbatches: int | Literal["auto"] = 1
    rematerialize: bool | Literal["auto"] | None = None
    steps_per_loop: int | Literal["auto"] = "auto"
    strategy: str | Callable[[], Any] = "auto"
    engine: str = TENSORFLOW.name
    precision: str = "auto"
    precision_overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention: str = "auto"
    batch_norm: str = "auto"
    precision_watch: PrecisionWatch | None = None
    replay_every: int = 0
    sinks: Sequence[Any] = ()
    loss_scale: Any = "auto"
    reduce_dtype: str = "auto"
    bucket_bytes: int | None = None
    clipping: Clipping = dataclasses.field(default_factory=Clipping)
    shard: str = "none"
    penalty: Penalty | None = None
    start: StartFrom = dataclasses.field(default_factory=StartFrom)
    freeze: Sequence[str] = ()
    rate_multipliers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    lazy_embeddings: bool = False
    ema_decay: float | None = None
    evaluate_ema: bool = True
    jit_compile: bool = False
    loss_chunks: int | Literal["auto"] = "auto"
    spikes: Spikes | None = None
    early_stopping: EarlyStopping | None = None
    skip_batches: Sequence[Sequence[int]] = ()
    max_consecutive_overflows: int = 20
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 0
    checkpoint_every: int = 0
    checkpoints: Checkpoints = dataclasses.field(default_factory=Checkpoints)
    best_metric: str = "loss"
    eval_batch_size: int | None = None

    def __post_init__(self) -> None:
        task = complete(self.task)
        if self.optimizer is None:
            if task.optimizer is None:
                raise missing_bindings("train", ["optimizer"])
        elif not callable(self.optimizer):
            raise UsageError(f"train.optimizer = {self.optimizer!r}: expected a reference, such as @momentum")
        KINDS.asked(self.engine, f"train.engine = {self.engine!r}")
        check_least("train", self, global_batch_size=1, log_every=1, max_consecutive_overflows=1)
        check_least("train", self, evaluate_every=0, checkpoint_every=0, replay_every=0)
        for name in ("steps_per_loop", "microbatches", "loss_chunks"):
            if getattr(self, name) != "auto":
                check_least("train", self, **{name: 1})
        if self.loss_chunks != "auto" and task.logits_shape is None:
            raise UsageError(f"train.loss_chunks = {self.loss_chunks}: only a task of text has it; leave it out")
        known = {"attention": FORMS, "batch_norm": BATCH_NORM, "shard": SHARD}
        _check_known("train", self, {**known, "rematerialize": (True, False, "auto", None)})
        for name in ("steps", "epochs", "eval_batch_size", "bucket_bytes"):
            value = getattr(self, name)
            check_value(f"train.{name}", value, value is None or value > 0, "more than 0")
        decay = self.ema_decay
        check_value("train.ema_decay", decay, decay is None or 0 < decay < 1, "between 0 and 1")
        for sink in self.sinks:
            if not isinstance(sink, Sink):
                raise UsageError(f"train.sinks: {sink!r} is not a Sink; bind objects, as in [@WandbSink()]")
        for batches in self.skip_batches:
            if len(batches) != 2 or not 1 <= batches[0] <= batches[1]:
                raise UsageError(
                    f"train.skip_batches: {batches!r} must be a first and a last batch, as in [(120, 122)]"
                )
        spikes, keep = self.spikes, self.checkpoints.keep
        if spikes is not None and spikes.action == "rewind" and spikes.rewind_checkpoints > keep:
            raise UsageError(f"Checkpoints.keep = {keep}: Spikes.rewind_checkpoints needs {spikes.rewind_checkpoints}")
        if self.early_stopping is not None and not self.evaluate_every:
            raise UsageError("train.early_stopping needs evaluations, and train.evaluate_every = 0: bind it, too")
        layer_policies.check(self.precision_overrides)
        freezing.check(self.freeze, self.rate_multipliers)
        if self.steps is None and self.epochs is None:
            raise UsageError("bind train.steps or train.epochs: how long to train")
        if self.steps is not None and self.epochs is not None:
            raise UsageError(f"train.steps = {self.steps} and train.epochs = {self.epochs}: bind one of them")

    def total_steps(self, data: Data) -> int:
        """Steps of the whole run on some data; UsageError where it is in epochs, and their size is not known."""
        if self.steps is not None:
            return self.steps
        if self.epochs is not None and (an_epoch := steps_per_epoch(data, self.global_batch_size)):
            return max(1, round(self.epochs * an_epoch))
        num_train_examples = data.num_train_examples
        if not num_train_examples or self.epochs is None:
            raise UsageError(f"train.epochs = {self.epochs}: how many examples one has is not known; bind train.steps")
        return max(1, round(self.epochs * num_train_examples / self.global_batch_size))
