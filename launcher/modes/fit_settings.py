"""Settings of `launcher.fit` as types: what editors complete and checkers know. At run time the recipe checks them.

`launcher.run.recipe` says what each means; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from launcher.optimizers import Optimizer
from launcher.run.actions.early_stopping import EarlyStopping
from launcher.run.actions.precision_watch import PrecisionWatch
from launcher.run.actions.spikes import Spikes
from launcher.run.recipe import Checkpoints
from launcher.run.start.start_weights import StartFrom
from launcher.step.clipping import Clipping
from launcher.step.regularization import Penalty


class CheckpointSettings(TypedDict, total=False):
    """Settings of `Checkpoints`, as a dict."""

    every_minutes: float
    keep: int
    keep_every_hours: float
    asynchronous: bool
    on_error: str
    on_changed_data: str
    on_changed_program: str
    save_model: str


class ClippingSettings(TypedDict, total=False):
    """Settings of `Clipping`, as a dict."""

    global_norm: float | None
    value: float | None
    layer_norm: float | None
    adaptive: float | None


class StartSettings(TypedDict, total=False):
    """Settings of `StartFrom`, as a dict."""

    path: str | None
    which: str
    averaged: bool
    optimizer: bool
    allow_missing: Sequence[str]


class FitSettings(TypedDict, total=False):
    """Settings that `launcher.fit` takes by the names of `train.…`, besides those that it has itself."""

    optimizer: Callable[..., Optimizer] | None
    global_batch_size: int
    steps: int | None
    microbatches: int | Literal["auto"]
    rematerialize: bool | Literal["auto"] | None
    steps_per_loop: int | Literal["auto"]
    engine: str
    precision: str
    precision_overrides: Mapping[str, str]
    attention: str
    batch_norm: str
    precision_watch: PrecisionWatch | None
    replay_every: int
    sinks: Sequence[Any]
    loss_scale: Any
    reduce_dtype: str
    bucket_bytes: int | None
    clipping: Clipping | ClippingSettings
    shard: str
    penalty: Penalty | None
    start: StartFrom | StartSettings
    freeze: Sequence[str]
    rate_multipliers: Mapping[str, float]
    lazy_embeddings: bool
    ema_decay: float | None
    evaluate_ema: bool
    jit_compile: bool
    loss_chunks: int | Literal["auto"]
    spikes: Spikes | None
    early_stopping: EarlyStopping | None
    skip_batches: Sequence[Sequence[int]]
    max_consecutive_overflows: int
    seed: int
    log_every: int
    evaluate_every: int
    checkpoint_every: int
    checkpoints: Checkpoints | CheckpointSettings
    best_metric: str
    eval_batch_size: int | None
