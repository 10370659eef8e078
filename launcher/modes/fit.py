"""`launcher.fit`: one run from Python, in the place of Keras's `model.fit`."""

import contextlib
import dataclasses
import functools
import gc
import numbers
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from launcher.config import old_bindings
from launcher.config.bound_types import check_value, parameters
from launcher.data.kinds import DataInTurn
from launcher.data.pipeline import steps_per_epoch as epoch_of
from launcher.data.python_batches import is_python
from launcher.data.structure import as_tuple
from launcher.errors import EXIT_PREEMPTED, EXIT_RETRY, Interrupted, UsageError, advice, excepthook, failures
from launcher.errors.user_code import Place
from launcher.machine import cluster as cluster_lib
from launcher.machine import strategy as strategy_lib
from launcher.machine.exit_barrier import chief_last
from launcher.machine.runtime_kinds import KINDS
from launcher.modes import Request, fit_folders, fit_workers
from launcher.modes.history import History
from launcher.modes.train import train_on
from launcher.run import programs
from launcher.run.actions.keras_callbacks import OF_CALLBACK
from launcher.run.loading import Machine
from launcher.run.plan import RunPlan
from launcher.run.programs import FitCall
from launcher.run.recipe import Recipe
from launcher.run.start.value_text import text_of
from launcher.runtime.tensorflow import TfRuntime
from launcher.tasks import keras_callbacks, keras_private, keras_tracing
from launcher.tasks.keras_model import KerasTask, is_function

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing since Python 3.11

    from launcher.modes.fit_settings import FitSettings

_BATCH_SIZE = 32  # Keras's


class _Rebuilt:
    """A model that is made already, as what builds one: each call makes its variables anew, as they were at first.

    Args:
      place: what messages name in the place of a function's.
    """

    def __init__(self, model: keras.Model, place: Place):
        self._model, self.place = model, place
        self._held = keras_private.Held(model)

    def __call__(self) -> keras.Model:
        self._held.make()
        return self._model


def fit(
    build: Callable[[], keras.Model] | keras.Model,
    *data: Any,
    train: Any = None,
    validation: Any = None,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    validation_data: Any = None,
    epochs: float = 1,
    batch_size: int | None = None,
    model_dir: str | os.PathLike[str] | None = None,
    strategy: str | tf.distribute.Strategy = "auto",
    replicas: int | None = None,
    workers: int | None = None,
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = (),
    class_weight: Mapping[int, float] | None = None,
    shuffle: bool = True,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_split: float = 0.0,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    initial_epoch: int = 0,
    verbose: int | str = "auto",
    **others: "Unpack[FitSettings]",
) -> History:
    """Trains a compiled Keras model, as Keras's `fit` on one device would, on any devices.

        history = launcher.fit(build, train_ds, validation=val_ds, epochs=10, model_dir="runs/mine")
        history = launcher.fit(model, x, y, validation_data=(x_val, y_val), epochs=10)  # for model.fit(x, y, …)

    With a `model_dir`, the same call goes on where it was interrupted. `python -m launcher.main --gin_file=PROGRAM.py`
    runs a program that calls this with the launcher's flags: on several replicas, on several workers, or in another
    mode.

    Args:
      build: returns a compiled model; called under the strategy's scope. Or a compiled model, which is trained from
        the state that it has, and is in this process as any other afterwards.
      data: train and validation; or x and y, as in Keras's fit, where both are arrays.
      train: (x, y) or (x, y, sample_weight) as arrays or nests of them; a `tf.data.Dataset` of batches; a PyDataset, a
        generator or whatever gives batches in turn; or a function that returns it.
      validation: the same, or None.
      x, y, sample_weight, validation_data: in the place of train and validation, as in Keras's fit.
      epochs: passes over the training data; unless `steps` is among the settings.
      batch_size: examples of a step over all replicas, of arrays; 32 unless said. What gives batches has its own.
      model_dir: where all that the run writes goes, and from where the same call goes on; unless said, a fresh folder
        for each call in runs/fit, of which the newest 20 are kept, see `launcher.modes.fit_folders`.
      strategy: a name, as for `--strategy`, or a `tf.distribute.Strategy`; unless said, the one under which a model was
        made, as in Keras.
      replicas: as `--replicas`, in each worker.
      workers: train in so many processes of this machine, which are started, watched and restarted as by
        `launcher.launch --workers`; None for this process. What they need is sent to them by cloudpickle. A program
        that the launcher runs has the workers that its command line says.
      callbacks: see `launcher.run.actions.keras_callbacks`.
      class_weight, shuffle, steps_per_epoch, validation_steps, validation_split, validation_batch_size,
        validation_freq: as in Keras's fit.
      initial_epoch: the number of the first epoch, counted from 0; `epochs` is that of the last one, counted from 1.
        It is about numbers alone: the same call goes on by itself.
      verbose: 0 to show nothing.
      others: what a recipe binds as `train.…`, such as `checkpoint_every=1000`; what it binds as `Clipping.…`,
        `StartFrom.…` or `Checkpoints.…` in a dict, such as `clipping={"global_norm": 1.0}`.

    Returns:
      Keras's History of the epochs, with the trained `model`, the run's `model_dir` and `report()`, which shows the
      report in a notebook.

    Raises:
      UsageError: an argument or the data is wrong.
      LauncherError: the run failed, or was asked to stop.
      KeyboardInterrupt: it was asked to by Ctrl-C, and has saved. What a callback raises comes as it is.
    """
    settings = old_bindings.of_fit({**others}, programs.GROUPS)
    kinds: list[tuple[str, Any, Any, str]] = [
        ("epochs", epochs, numbers.Real, "a number above 0"),
        ("batch_size", batch_size, numbers.Integral, "a whole number above 0"),
        ("steps_per_epoch", steps_per_epoch, numbers.Integral, "a whole number above 0"),
        ("validation_steps", validation_steps, numbers.Integral, "a whole number above 0"),
        ("shuffle", shuffle or None, bool, "True or False"),
        ("model_dir", model_dir, str | os.PathLike, "the path of a folder"),
        ("strategy", strategy, str | tf.distribute.Strategy, "a name or a tf.distribute.Strategy"),
        ("class_weight", class_weight, Mapping, "a dict such as {0: 1.0, 1: 5.0}"),
    ]
    for name, value, kind, says in kinds:
        holds = value is None or (isinstance(value, kind) and (bool(value) or kind is Mapping))
        check_value(f"fit: {name}", value, holds, says)
    model_dir = None if model_dir is None else os.fspath(model_dir)
    _check_settings(settings)
    if not callable(build):
        raise UsageError(f"fit: expected a compiled model, or a function that returns one; got {type(build).__name__}")
    model = build if isinstance(build, keras.Model) else None
    train, validation = _data(model is not None, data, train, validation, (x, y, sample_weight))
    validation = as_tuple(validation if validation_data is None else validation_data)
    at = sys._getframe(1)  # the call of this, which messages name
    rebuilt = None if model is None else _Rebuilt(model, Place(at.f_code.co_filename, at.f_lineno, "<module>"))
    of_task: dict[str, Any] = {
        "train": train,
        "validation": validation,
        "class_weight": class_weight,
        "shuffle": shuffle,
        "steps_per_epoch": steps_per_epoch,
        "validation_steps": validation_steps,
        "validation_split": validation_split,
        "initial_epoch": initial_epoch,
        "validation_freq": validation_freq,
        "verbose": verbose,
    }
    handler, unnamed = programs.handler(), None
    # Those of a program without a seed are others in each process.
    first = [] if model is None or keras_private.seed_of_program() is None else model.weights
    first_weights = text_of([one.numpy() for one in first]) if first else ""
    if model_dir is None and handler is None:
        model_dir = unnamed = fit_folders.chosen()
        settings = {"checkpoints": {"keep": 1, "save_model": "none"}, **settings}  # the weights once, and the best
    settings = {"seed": keras_private.seed_of_program() or 0, **settings}
    check_value("fit: seed", settings["seed"], isinstance(settings["seed"], int), "a whole number")
    strategy = _chosen(strategy, model if replicas is None else None, is_program=handler is not None)
    if workers is not None and handler is None:
        if model is not None:
            raise UsageError("fit: workers=N starts other processes: give a function that builds the model there")
        with _ends(unnamed):
            return fit_workers.fit(
                build=build,
                epochs=epochs,
                batch_size=batch_size,
                model_dir=str(model_dir),
                strategy=strategy,
                replicas=replicas,
                workers=workers,
                callbacks=callbacks,
                validation_batch_size=validation_batch_size,
                **of_task,
                **settings,
            )
    # Devices are set up before a function makes the data: here, or before the program's first line.
    if handler is None:
        handler = functools.partial(_train_here, machine=_set_up(strategy, replicas, settings.get("engine")))
    history = History()
    if model is not None:
        model.history = history  # also of a training that does not end
    all_callbacks = (*keras_callbacks.flat(callbacks), history)
    task = KerasTask(build=build if rebuilt is None else rebuilt, callbacks=all_callbacks, **of_task)
    task.keras_fit = dataclasses.replace(task.keras_fit, has_model=model is not None, first_weights=first_weights)
    with keras_tracing.drawn_from(settings["seed"]):
        source = task.data()
        size = task.tried = source.batch_size if isinstance(source, DataInTurn) else int(batch_size or _BATCH_SIZE)
    if initial_epoch >= epochs and initial_epoch:
        raise UsageError(f"fit: initial_epoch = {initial_epoch} and epochs = {epochs}: no epoch lies between them")
    an_epoch = epoch_of(task.data(), size)
    backups = [one.save_freq for one in all_callbacks if isinstance(one, keras_callbacks.BACKUPS)]
    policy = keras.config.dtype_policy()
    call = FitCall(
        settings={
            "task": task,
            "global_batch_size": size,
            **({} if settings.get("steps") else {"epochs": epochs - initial_epoch}),
            "evaluate_every": an_epoch,
            "eval_batch_size": validation_batch_size,
            # What a BackupAndRestore is for, the run's own checkpoints do.
            **({"checkpoint_every": an_epoch if backups[0] == "epoch" else int(backups[0])} if backups else {}),
            # A program that is not changed computes as it did.
            "precision": policy.name,
            "strategy": strategy if isinstance(strategy, str) else "auto",
            **settings,
        },
        model_dir=model_dir,
        replicas=replicas,
    )
    try:
        with _ends(unnamed):
            history.model_dir = handler(call)
    finally:
        keras.config.set_dtype_policy(policy)  # what comes after is the program's, also another call
        if model is not None:
            keras_private.Held(model).make()
        gc.collect()  # graphs are in cycles, which Python by itself lets gather over many fits
    return history


def _chosen(
    strategy: str | tf.distribute.Strategy, model: keras.Model | None, *, is_program: bool
) -> str | tf.distribute.Strategy:
    """The strategy that was asked for, or the one that the program has made its model under, as Keras's fit has it."""
    within = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    if within is not None and (is_program or model is None or strategy not in ("auto", within)):
        chooses = "the launcher's command line" if is_program else "fit itself" if model is None else f"{strategy=}"
        raise UsageError(
            f"fit: called in the scope of a {type(within).__name__}, but {chooses} says what the model is made and "
            "trained on: call fit outside of `with strategy.scope():`"
        )
    if is_program or model is None or strategy != "auto":
        return strategy
    return within or keras_private.strategy_of(model) or strategy


def _data(is_model: bool, data: Sequence[Any], train: Any, validation: Any, of_keras: tuple[Any, ...]) -> list[Any]:
    """Training and validation data from what was given by position and by Keras's names."""
    if len(data) > 2:
        raise UsageError(f"fit: say by its name what {data[2]!r} is, such as batch_size")
    given = [*data, None, None][:2]
    x, y, weight = of_keras
    if y is not None or weight is not None or not any(_is_whole(one, is_model) for one in given):
        (x, y), given = (given[0] if x is None else x, given[1] if y is None else y), [None, None]
    if train is not None and (x is not None or given[0] is not None):
        raise UsageError("fit: what to train on is given twice: leave train= out")
    if x is not None:
        train = x if y is None and weight is None else (x, y, weight)[: 2 + (weight is not None)]
    return [other if one is None else one for one, other in zip(given, (train, validation), strict=True)]


def _is_whole(source: Any, is_model: bool) -> bool:
    """Whether this is all to train or validate on; a tuple is, but what a model is given as in Keras."""
    kinds = tf.data.Dataset if is_model else tf.data.Dataset | tuple
    return isinstance(source, kinds) or is_python(source) or is_function(source)


def _check_settings(settings: Mapping[str, Any]) -> None:
    known, _ = parameters(Recipe)
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"fit: there is no argument {name!r}{advice(name, known)}")
        if isinstance(known[name].default, bool) and (problem := known[name].problem_with(value)):
            raise UsageError(f"fit: {name} = {value!r}: {problem}")
        if (make := programs.GROUPS.get(name)) is not None:
            check_value(f"fit: {name}", value, value is None or isinstance(value, Mapping | make), "a dict of settings")


def _set_up(strategy: str | tf.distribute.Strategy, replicas: int | None, engine: str | None) -> Machine:
    """The machine with its devices set up, in a process that the launcher did not start, such as a notebook's."""
    runtime = None if engine is None else KINDS.asked(engine, f"fit: engine={engine!r}")
    has_devices = runtime is not None and runtime.has_devices
    if has_devices and strategy != "auto":
        raise UsageError(f"fit: engine={engine!r} has devices of its own: leave strategy={strategy!r} out")
    if not isinstance(strategy, str):
        return Machine(
            environ=os.environ, replicas=replicas, on=strategy_lib.describe(strategy), made=TfRuntime(strategy)
        )
    asked = None if has_devices else strategy
    machine = Machine(environ=os.environ, strategy=asked, replicas=replicas, runtime=runtime)
    machine.set_up()
    return machine


def _train_here(call: FitCall, machine: Machine) -> str:
    """Trains in such a process, and returns the folder."""
    evaluates = bool(call.settings["task"].data().num_eval_examples)
    request = Request(
        mode="train_and_eval" if evaluates else "train",
        model_dir=call.model_dir,
        replicas=call.replicas,
        engine=None if machine.runtime is None else machine.runtime.name,
    )

    def plan() -> RunPlan:
        fit_folders.tidy()  # the folder is there and held
        return machine.plan_of(call.recipe())

    with chief_last(cluster_lib.resolve(os.environ)):
        train_on(request, plan)
    return request.run_dir


@contextlib.contextmanager
def _ends(unnamed: str | None) -> Iterator[None]:
    """Tells the program how a call ended: by Ctrl-C, by an exception of its own callback, or by a `LauncherError`.

    Args:
      unnamed: the folder, if nobody has named it.
    """
    try:
        yield
    except Exception as error:
        told = failures.explained(error)
        if unnamed and failures.exit_code(told) in (EXIT_PREEMPTED, EXIT_RETRY):
            told.args = (f'{told}, with model_dir="{unnamed}"',)
        if getattr(told, "signal", None) == signal.SIGINT and programs.handler() is None:
            raise Interrupted(str(told)) from None
        if hasattr(error, OF_CALLBACK):
            raise
        if told is error:
            setattr(error, excepthook.CODE, failures.exit_code(error))
            raise
        raise told from error
    finally:
        if unnamed:
            fit_folders.tidy()
