"""The record in a checkpoint of the program and the data that wrote it, and what it means that others go on from it.

A program's items are texts by name, of two kinds. Where one of "stop" is another now, what was trained is not what is
asked for. One of "note" takes effect from here on. What changes no result is in neither: replicas, workers,
microbatches, the engine, when something is logged, evaluated or saved. Other versions tell a program in other words.
"""

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

import launcher
from launcher.checkpoints import DATA, PROGRAM, CheckpointReadError, CheckpointStore
from launcher.checkpoints.errors import shorten
from launcher.config.gin_bindings import loaded, short_name
from launcher.config.gin_private import internals
from launcher.data.kinds import identity_of
from launcher.errors import UsageError
from launcher.run.plan import RunPlan
from launcher.run.recipe import Checkpoints
from launcher.run.start.starting_point import FromChief
from launcher.run.start.value_text import of_layers, settings_of, text_of
from launcher.step.layers import layers_of
from launcher.step.trainer import Trainer
from launcher.tasks import keras_private
from launcher.tasks.keras_callbacks import fit_of
from launcher.tasks.keras_model import KerasTask

_OF_RECIPE = (
    "clipping",
    "penalty",
    "ema_decay",
    "freeze",
    "rate_multipliers",
    "precision_overrides",
    "early_stopping",
    "lazy_embeddings",
)
_REGULARISES = re.compile(r"Dropout|Noise|ActivityRegularization")  # layers that do nothing else
_STRENGTH = re.compile(
    r"\.[^.]*(dropout|regularizer|stddev|noise)|\.(rate|trainable)$"
)  # settings of those and of others
# Of where a run takes place, of what evaluations and predictions write, and where data is; and what is told elsewhere.
_ELSEWHERE = re.compile(
    r"task\.(data|model|beam_size|length_penalty|decode|max_new|temperature|top_p|sampling)"
    r"|\.[^.]*(synchronized|remat|attention|layers|path|dir|file|build|tensor)"
)
_FIRST, _POLICY = "model.first_weights", "train.precision"
# Configurables whose settings are told by now.
_TOLD = re.compile(r"gin\.|keras\.|launcher\.(?!data|gin_configs|models|optimizers)")
# What a run leaves in its folder, the checkpoints last: as long as they are there, they say what is to be done.
_LEFT = (
    *("attempts.jsonl", "metrics.jsonl", "summary.json", "run.json", "config.gin", "report.html", "samples.json"),
    *("started_from.txt", "assets", "tensorboard", "model.keras", "model.weights.h5", "checkpoints"),
)
_used: set[str] = set()  # folders, by this process


def described(plan: RunPlan, trainer: Trainer, folder: str) -> dict[str, Any]:
    """The items of the program that trains in a folder, and the versions that tell them."""
    recipe, task = plan.recipe, plan.recipe.task
    stop = {"seed": plan.seed, "global_batch_size": recipe.global_batch_size, "task": type(task).__name__}
    note = {f"train.{name}": getattr(recipe, name) for name in _OF_RECIPE}
    note |= {_POLICY: plan.policy, "train.steps": plan.total_steps, "callbacks": task.callbacks()}
    note["validation data"] = plan.data.num_eval_examples, identity_of(getattr(plan.data, "evaluation", None))
    if recipe.precision != "auto":  # which is by the devices
        stop[_POLICY] = plan.policy
    if (first_weights := fit_of(task).first_weights) and folder not in _used:
        stop[_FIRST] = first_weights
    _used.add(folder)
    for name, is_noted, value in _items(plan, trainer):
        if not _ELSEWHERE.search(name):
            (note if is_noted or _STRENGTH.search(name) else stop)[name] = value
    told = [{name: text_of(value) for name, value in items.items()} for items in (stop, note)]
    versions = [*sys.version_info[:2], keras.__version__, launcher.__version__]
    return {"versions": versions, "stop": told[0], "note": told[1]}


def _items(plan: RunPlan, trainer: Trainer) -> Iterator[tuple[str, bool, Any]]:
    """Items of the task, layers, optimizers and bindings, each with whether it is only noted."""
    task, model, of_task = plan.recipe.task, trainer.model, settings_of(plan.recipe.task)
    for (scope, selector), values in [*internals().operative.items()] if loaded.bound else ():
        if not _TOLD.match(selector):
            for name, value in values.items():
                is_noted = not selector.startswith("launcher.models.")
                yield f"{scope and f'{scope}/'}{short_name(selector)}.{name}", is_noted, value
    if isinstance(task, KerasTask):
        yield "class_weight", True, of_task["class_weight"]
        yield "loss", False, model.loss
    else:
        yield "task.loss", False, task.loss
        for name, value in of_task.items():
            if isinstance(value, float | int):  # others name data, or hold it
                yield f"task.{name}", False, value
    with contextlib.suppress(Exception):  # of what Keras cannot tell as a config
        yield "loss_weights", False, model.get_compile_config().get("loss_weights")
    metrics = keras_private.given_metrics(model)
    yield "metrics", True, metrics
    for kind in (metric if hasattr(metric, "__name__") else type(metric) for metric in metrics):
        if "{code" in text_of(kind):
            yield f"metric.{kind.__name__}", False, kind
    for kind, layer, settings in of_layers(model):
        inside = dict | keras.layers.Layer  # of which the layers that it has tell
        settings = {name: setting for name, setting in settings.items() if not isinstance(setting, inside)}
        own_policy = layer.dtype_policy.name if layer.dtype_policy.name != plan.policy else None
        settings |= {"trainable": layer.trainable, "policy": own_policy}
        for name, value in {"": type(layer), **{f".{name}": value for name, value in settings.items()}}.items():
            yield f"{kind}{name}", name == ".policy" or bool(_REGULARISES.search(kind)), value
    yield "model.calls", False, [keras_private.calls_of(layer) for layer in layers_of(model)]
    for number, optimizer in enumerate((part.keras_optimizer for part in trainer.optimizer.parts), 1):
        yield f"optimizer {number}", False, type(optimizer)
        for name, value in settings_of(optimizer).items():
            yield f"optimizer {number}.{name}", True, value


def settle(
    store: CheckpointStore, trainer: Trainer, folder: str, settings: Checkpoints, from_chief: bool
) -> tuple[str, str, dict[str, np.ndarray]]:
    """Compares program and training data with what the newest checkpoint records of them, before that is restored.

    All workers come to the same end: a line for a person on each of the two, and what replaces the checkpoint's state
    of this name.

    Raises:
      UsageError: one is another, and the settings of checkpoints say "stop".
    """
    now: Mapping[str, Any] = store.run[PROGRAM]
    then = _recorded(store) if store.is_chief or not from_chief else {}
    if from_chief:
        then, _ = FromChief(trainer.runtime.host, is_chief=store.is_chief).share(then)
    stop, note = (_changes(then[kind], now[kind]) for kind in ("stop", "note"))
    if _FIRST in then["stop"]:
        now["stop"].setdefault(_FIRST, then["stop"][_FIRST])
    is_another = trainer.workers.any(bool(stop))
    changes = [*dict.fromkeys([*stop, *note])] or ["on another worker"] * is_another
    what = f"the program is not what it was at step {then['step']}"
    if is_another and settings.on_changed_program == "stop":
        raise UsageError(
            f"{what} of {folder}: {shorten(changes)}. Give it what it had; or choose another --model_dir; or bind "
            "Checkpoints.on_changed_program = 'continue' to go on with what it is now, or 'fresh' to begin anew, with "
            "what is there moved aside (launcher.fit: checkpoints={'on_changed_program': 'fresh'})"
        )
    if is_another and settings.on_changed_program == "fresh":
        aside = _set_aside(store, folder)
        trainer.workers.any(False)  # the others see the folder as the chief has left it
        return f"{what}: {shorten(changes)}. It begins anew, and what there was is in {aside}", "", {}
    of_data = _settled_data(then, store.run[DATA], trainer, settings.on_changed_data)
    if not changes:
        return then["why"], of_data, {}
    rates = trainer.state.variables().items() if any("learning_rate:" in change for change in note) else ()
    own = {name: trainer.runtime.state.read(variable) for name, variable in rates if name.endswith("/learning_rate")}
    return f"{what}, and what it is now counts from here on: {shorten(changes)}", of_data, own


def _settled_data(then: Mapping[str, Any], now: Mapping[str, Any], trainer: Trainer, on_changed: str) -> str:
    """The line on the training data; `now` is as `pipeline.described` says."""
    if then["step"] is None:
        return ""
    if (before := then[DATA]) is None:
        return "the checkpoint does not record its training data; going on with what is there, as if it were the same"
    change = ""
    if before["examples"] != now["examples"]:
        change = f"{before['examples']} examples then, {now['examples']} now"
    elif before["identity"] not in ("", now["identity"]):
        change = f"of the {now['examples']} examples some are others, or their order is another"
    if not trainer.workers.any(bool(change)):
        return ""
    what = f"the training data is not what it was at step {then['step']}: {change or 'another worker has other data'}"
    if on_changed == "stop":
        raise UsageError(
            f"{what}. The run would see other examples than those it has left. Give it the data that it had; "
            "or bind Checkpoints.on_changed_data = 'continue' to go on with what is there now; or choose "
            "another --model_dir"
        )
    return f"{what}; going on with what is there now"


def _recorded(store: CheckpointStore) -> dict[str, Any]:
    """Program and data as the newest checkpoint records them; the same where there is none, or it will be found
    damaged.
    """
    now = store.run[PROGRAM]
    with contextlib.suppress(CheckpointReadError):
        for step in store.steps()[-1:]:
            run, why = store.manifest(step).get("run") or {}, ""
            then = run.get(PROGRAM) or {}
            if then.get("versions") != now["versions"]:
                why = "the program of the checkpoint is not recorded, or by other versions; it is taken to be this one"
                then = {**now, "stop": now["stop"] | {name: text_of(run[name]) for name in now["stop"] if name in run}}
            stop = {_POLICY: then["note"][_POLICY], **then["stop"]}
            return {**then, "stop": stop, "step": step, "why": why, DATA: run.get(DATA)}
    return {**now, "step": None, "why": ""}


def _changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The items that are others now, with both values."""
    # A setting that one of them does not tell belongs to what is another by itself, or could not be told.
    names = [name for name in {**now, **then} if "." not in name or (name in then and name in now)]
    values = {name: (then.get(name, "none"), now.get(name, "none")) for name in names}
    return [f"{name}: {old} then, {new} now" for name, (old, new) in values.items() if old != new]


def _set_aside(store: CheckpointStore, folder: str) -> str:
    """Moves what a run has left in a folder to one inside of it; returns its path."""
    numbered = (os.path.join(folder, f"before_{number}") for number in itertools.count(1))
    aside = next(path for path in numbered if not os.path.exists(path))
    if store.is_chief:
        store.before_write()
        os.mkdir(aside)
        for name in _LEFT:
            with contextlib.suppress(FileNotFoundError):
                os.replace(os.path.join(folder, name), os.path.join(aside, name))
    return aside
