"""Keras callbacks: which of them can work in a run, and what takes the place of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from launcher.errors import UsageError

# By name, as some of them need packages that may be missing.
_REPLACED = {
    "ModelCheckpoint": "bind train.checkpoint_every; the best is kept, and model.keras is written at the end",
    "OrbaxCheckpoint": "bind train.checkpoint_every",
    "BackupAndRestore": "the same command goes on where the run stopped",
    "TensorBoard": "the run writes events for TensorBoard to its folder by itself",
    "ProgbarLogger": "the run shows its progress by itself; train.log_every says how often",
    "SwapEMAWeights": "bind train.ema_decay",
    "TerminateOnNaN": "bind train.max_skips_at_floor; steps that are not finite are skipped",
    "RemoteMonitor": "send what metrics.jsonl says, or use a LambdaCallback",
}
_NEVER = ("on_test_batch_begin", "on_test_batch_end", "on_predict_batch_begin", "on_predict_batch_end")


def check(callbacks: Sequence[Any]) -> None:
    """Raises UsageError for what is no callback, has a counterpart here, or waits for what does not happen."""
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, keras.callbacks.Callback):
            raise UsageError(f"callbacks: {callback!r} is not a keras.callbacks.Callback")
        for known, instead in _REPLACED.items():
            if any(base.__name__ == known for base in type(callback).__mro__):
                raise UsageError(f"callbacks: {name} is left out: {instead}")
        for hook in _NEVER:
            if answers(callback, hook):
                raise UsageError(f"callbacks: {name}.{hook} would never be called: evaluation runs on the device")


def answers(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Whether a callback does something at an event, by its class or, as a LambdaCallback, by itself."""
    inherited = getattr(type(callback), hook) is getattr(keras.callbacks.Callback, hook)
    # A LambdaCallback sets those that it was not given, too.
    given = hook in vars(callback) and not isinstance(callback, keras.callbacks.LambdaCallback)
    if isinstance(callback, keras.callbacks.LambdaCallback):
        given = getattr(vars(callback).get(hook), "__module__", "").split(".")[0] not in ("keras", "")
    return given or not inherited
