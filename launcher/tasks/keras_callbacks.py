"""Kinds of Keras callbacks: which of them only write, and which have to be told of every batch.

Tried with Keras 3.8.0 to 3.15.1.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from launcher.config.bound_types import check_value
from launcher.errors import UsageError

_BACKUP, _CHECKPOINT, _EVENTS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)
BACKUPS = (_BACKUP,)
WRITERS = (
    _BACKUP,
    _CHECKPOINT,
    _EVENTS,
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
)
"""Those that decide nothing: they are called on the chief alone."""
TRAINED = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TESTED = ("on_test_batch_begin", "on_test_batch_end")


def flat(callbacks: Any) -> tuple[Any, ...]:
    """Callbacks as Keras's fit takes them: one, None, a nest of them or a CallbackList."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return tuple(one for one in keras.tree.flatten(callbacks) if one is not None)


def check(callbacks: Sequence[Any]) -> None:
    """Raises UsageError for what is no callback, or cannot work here."""
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UsageError(f"callbacks: {callback!r} is not a keras.callbacks.Callback")
        # By name, as it needs a package that may be missing.
        if any(base.__name__ == "OrbaxCheckpoint" for base in type(callback).__mro__):
            name = type(callback).__name__
            raise UsageError(f"callbacks: {name} is not supported: take a ModelCheckpoint, or train.checkpoint_every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """What a call of Keras's fit says besides its model and data; `KerasTask.keras_fit` has it, other tasks have none.

    Attributes:
      initial_epoch: the number that callbacks know the first epoch by.
      validation_freq: which of the evaluations at ends of epochs are made: each of so many, or those of the epochs of
        these numbers, counted from 1.
      verbose: 0 where the run is to show nothing; callbacks are told of it.
      has_model: whether the task gives a model that the program has made already.
      first_weights: a digest of the weights of such a model, where the program makes the same ones each time.
    """

    initial_epoch: int = 0
    validation_freq: int | Sequence[int] = 1
    verbose: int = 1
    has_model: bool = False
    first_weights: str = ""


def fit_of(task: Any) -> Fit:
    """The call of Keras's fit that a task is of, or what such a call says by default."""
    return getattr(task, "keras_fit", Fit())


def checked_fit(initial_epoch: Any, validation_freq: Any, verbose: Any) -> Fit:
    """These arguments of Keras's fit; UsageError for what they cannot be."""
    if not isinstance(initial_epoch, int) or initial_epoch < 0:
        raise UsageError(f"initial_epoch = {initial_epoch!r}: must be the number of an epoch, 0 or more")
    numbers = [validation_freq] if isinstance(validation_freq, int) else validation_freq
    if not isinstance(numbers, list | tuple | set | range) or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise UsageError(f"validation_freq = {validation_freq!r}: must be a number of epochs, or a list from 1 on")
    check_value("verbose", verbose, verbose in ("auto", 0, 1, 2), "0 (show nothing), 1, 2 or 'auto'")
    frequency = validation_freq if isinstance(validation_freq, int) else tuple(numbers)
    verbose = 1 if verbose == "auto" else int(verbose)
    return Fit(initial_epoch=initial_epoch, validation_freq=frequency, verbose=verbose)


def notes(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """Notes of what the run does besides what callbacks do."""
    beside = {
        (_CHECKPOINT, _BACKUP): "keeps checkpoints, the best too, from which the same call goes on",
        (_EVENTS,): "writes events for TensorBoard",
    }
    found = [(one, does) for kinds, does in beside.items() for one in callbacks if isinstance(one, kinds)]
    if not found:
        return []
    names, does = dict.fromkeys(type(one).__name__ for one, _ in found), dict.fromkeys(what for _, what in found)
    return [f"{', '.join(names)}: called as in Keras, on the chief; the run itself {' and '.join(does)}, in its folder"]


def answers(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Whether a callback does something at an event, by its class or, as a LambdaCallback, by itself."""
    inherited = getattr(type(callback), hook) is getattr(keras.callbacks.Callback, hook)
    # A LambdaCallback sets those that it was not given, too.
    given = hook in vars(callback) and not isinstance(callback, keras.callbacks.LambdaCallback)
    if isinstance(callback, keras.callbacks.LambdaCallback):
        given = getattr(vars(callback).get(hook), "__module__", "").split(".")[0] not in ("keras", "")
    return given or not inherited


def works_by_batches(callback: Any, hooks: Sequence[str]) -> bool:
    """Whether a callback does something at one of these events of batches, set as it is."""
    return any(answers(callback, hook) and not _is_idle(callback, hook) for hook in hooks)


def _is_idle(callback: Any, hook: str) -> bool:
    """Whether a hook is one of Keras's own that does nothing, the way that the callback is set."""

    def is_of(*kinds: type) -> bool:
        return any(isinstance(callback, one) and getattr(type(callback), hook) is getattr(one, hook) for one in kinds)

    if is_of(_CHECKPOINT, _BACKUP):
        return callback.save_freq == "epoch"
    if is_of(_EVENTS):
        # Leans on Keras: what `profile_batch` was. Noticed by tests/modes/test_callbacks.py. Then: each step is told.
        traces = getattr(callback, "_should_trace", True) and hook in TRAINED
        return callback.update_freq == "epoch" and not callback.write_steps_per_second and not traces
    return is_of(keras.callbacks.ProgbarLogger) and hook in TESTED
