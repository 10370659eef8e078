"""A run's model as one file of Keras's, MODEL_DIR/model.keras: written when training ends, and opened again."""

import contextlib
import functools
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras

from launcher.checkpoints import CheckpointStore, weight_files
from launcher.checkpoints.disk import sync
from launcher.config import gin_bindings
from launcher.config.bound_types import check_value, one_of
from launcher.errors import UsageError, user_code
from launcher.machine import strategy as strategy_lib
from launcher.machine import versions
from launcher.machine.cluster import resolve as resolve_cluster
from launcher.run import loading, session
from launcher.run.plan import policy_of
from launcher.run.recipe import Recipe
from launcher.run.start import assets, start_weights
from launcher.serving import read_back, weights
from launcher.serving.weights import Weights
from launcher.step.state import MODEL, unique_name
from launcher.tasks.keras_private import as_if_first, forget_names

MODEL_FILE, WEIGHTS_FILE = "model.keras", "model.weights.h5"
AS_TRAINED = "model.safetensors"  # where a model's file does not give back the model
_WHICH = ("best", "last", "averaged")

_CONFIG = "config.json"  # how Keras builds the model
_ABOUT = "launcher.json"  # a member of model.keras, which Keras does not look at: whose weights it holds


def save(model: keras.Model, store: CheckpointStore, model_dir: str, which: str, *, averaged: bool) -> str:
    """Writes MODEL_DIR/model.keras, whole or not at all, for the chief alone: there is no collective in it.

    Args:
      model: of the run, with variables of any strategy; it has its own weights again afterwards.
      which: "best" or "last", see `weights.step_of`.
      averaged: take the moving averages, where there are any.

    Returns:
      What a person should know of it. A model that Keras cannot save has its weights written to model.weights.h5; that
      this fails, too, is only said, as the checkpoint is whole.
    """
    step = weights.step_of(store, which)
    if step is None:
        return f"{MODEL_FILE} was not written: there is no checkpoint in {model_dir}"
    chosen = weights.read(store, step, model, averaged=averaged)
    of = f"the weights of step {step}{' (averaged)' if chosen.averaged else ''}"
    with weights.lent(model, chosen.arrays), _whole_slots(model, store, step):
        try:
            otherwise: list[str] = []
            _written(
                os.path.join(model_dir, MODEL_FILE),
                lambda path: otherwise.append(save_keras(model, path, which, chosen)),
            )
            note = f"{MODEL_FILE} holds the model with {of}"
            return note if not otherwise[0] else f"{note}; {otherwise[0]}{written_as_trained(model_dir, chosen)}"
        except Exception as error:  # of the user's get_config() or the disk's; not worth a week's training
            why = user_code.summary(error).rstrip(".")
        try:
            _written(os.path.join(model_dir, WEIGHTS_FILE), model.save_weights)
        except Exception as error:
            return (
                f"neither {MODEL_FILE} ({why}) nor {WEIGHTS_FILE} ({user_code.summary(error)}) could be written to "
                f"{model_dir}; the checkpoints are whole: --mode=export --export_format=keras writes the model later"
            )
    return (
        f"{MODEL_FILE} was not written, because Keras cannot save this model: {why}. {WEIGHTS_FILE} has {of}, for "
        "load_weights() of a model that is built anew; give the model's own classes a get_config() and --mode=export "
        "--export_format=keras writes the whole"
    )


@contextlib.contextmanager
def _whole_slots(model: keras.Model, store: CheckpointStore, step: int) -> Iterator[None]:
    """A block in which Keras saves the whole of an optimizer's state, also where a replica has its part alone."""
    optimizer, names = getattr(model, "optimizer", None), dict[str, Any]()
    if optimizer is None:  # as of a model that is not compiled
        yield
        return
    for variable in optimizer.variables:
        names[unique_name(as_if_first(f"optimizer/{variable.path}", model), names)] = variable
    stored = store.stored(step, names.__contains__)
    wholes = {id(names[name]): one for name, one in stored.items() if one.shape != tuple(names[name].shape)}

    def save(into: Any) -> None:
        for place, variable in enumerate(optimizer.variables):
            whole = wholes.get(id(variable))
            into[str(place)] = variable.numpy() if whole is None else whole(None)

    if wholes:
        optimizer.save_own_variables = save
    try:
        yield
    finally:
        if wholes:
            del optimizer.save_own_variables


def written_as_trained(model_dir: str, chosen: Weights) -> str:
    """Writes the weights as they are, where a model's file is not the model; returns what a person should know."""
    arrays = {name.removeprefix(MODEL): functools.partial(source, None) for name, source in chosen.arrays.items()}
    _written(os.path.join(model_dir, AS_TRAINED), lambda path: weight_files.write_safetensors(path, arrays))
    return f". {AS_TRAINED} has them as they were trained, for launcher.load and StartFrom.path"


def save_keras(model: keras.Model, path: str, which: str, chosen: Weights) -> str:
    """Saves a model to a local path that ends with .keras, with a note in it of whose weights it has.

    Returns:
      How the file is not the model, see `launcher.serving.read_back`.
    """
    model.save(path)
    otherwise = read_back.difference(model, path)
    with zipfile.ZipFile(path, "a") as file:
        config = versions.without_later_arguments(json.loads(file.read(_CONFIG)))
        # Leans on Python: a zipfile's directory is these two. Noticed by tests/machine/test_versions.py. Then: write
        # all members to another file; here one is written anew, not twice, and the weights stay where they are.
        file.filelist.remove(file.NameToInfo.pop(_CONFIG))
        file.writestr(_CONFIG, json.dumps(config))
        about = {"which": which, "step": chosen.step, "averaged": chosen.averaged, "otherwise": otherwise}
        file.writestr(_ABOUT, json.dumps(about))
    return otherwise


def load(model_dir: str, which: str = "best", trust: bool = False) -> keras.Model:
    """Loads the Keras model of a run, of no strategy, for a notebook or a program of one's own.

        model = launcher.load("runs/resnet_cpu")
        model.predict(images)

    It comes from MODEL_DIR/model.keras where that has the weights asked for. Else it is built from MODEL_DIR/config.gin
    under the dtype policy for this machine, and gets the checkpoint's weights. Python that came with the folder is not
    run: not what a Lambda layer holds, and no module that lies in it.

    Args:
      model_dir: the folder of a run.
      which: "best" for the best checkpoint, or the last one where none was recorded as best; "last"; both averaged if
        the recipe evaluates the average (`train.evaluate_ema`). "averaged": as "best", and an error where the run kept
        no average.
      trust: also run the Python in the folder: give it for a folder of your own, or of somebody whom you trust.

    Raises:
      UsageError: there is no such run, or no such weights in it, or its recipe cannot be read here or needs `trust`.
    """
    check_value("which", which, which in _WHICH, one_of(_WHICH))
    if not os.path.isdir(model_dir):
        raise UsageError(f"launcher.load: there is no folder {model_dir}")
    if keras.backend.backend() != "tensorflow":
        raise UsageError(f"launcher.load: Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow first")
    store = weights.checkpoints_of(model_dir)
    step = weights.step_of(store, which)
    path = os.path.join(model_dir, MODEL_FILE)
    held = _about(path)
    opens = trust or versions.opens_models_safely()
    if not opens and held is not None and (step is None or _is_of_fit(model_dir)):
        raise UsageError(
            f"launcher.load: {path} is not opened, as Keras {keras.__version__} may run Python that a file holds: "
            "install keras 3.12 or later, or say trust=True for a folder of your own"
        )
    if opens and held is not None and _is_wanted(held, which, step):
        loading.import_builtins()  # registers the classes of models/
        try:
            found = keras.saving.load_model(path, safe_mode=not trust)
        except Exception as error:  # a class that is not imported here, a Lambda layer, or a damaged file
            if step is None:
                raise UsageError(f"{path} cannot be loaded: {user_code.summary(error)}") from error
        else:
            return _as_trained(found, model_dir, held)
    if step is None:
        raise UsageError(f"launcher.load: no checkpoint and no {MODEL_FILE} with such weights in {model_dir}")
    return _built(model_dir, store, step, averaged=which == "averaged", trust=trust)


def _as_trained(model: keras.Model, model_dir: str, held: Mapping[str, Any]) -> keras.Model:
    """The model of a file, with the weights beside it where the file's are not those that were trained."""
    if held.get("otherwise"):
        beside = start_weights.read(start_weights.StartFrom(path=os.path.join(model_dir, AS_TRAINED)), model, None)
        for weight in model.weights:
            weight.assign(beside.weights.get(id(weight), weight))
    return model


def _is_of_fit(model_dir: str) -> bool:
    """Whether the run's model is one that only the program of its `launcher.fit` can build."""
    config = Path(model_dir, "config.gin")
    return config.is_file() and b"train.task" not in config.read_bytes()


def _is_wanted(held: dict[str, Any], which: str, step: int | None) -> bool:
    if which == "averaged" and not held.get("averaged"):
        return False
    return held.get("step") == step or (step is None and which in (held.get("which"), "averaged"))


def _about(path: str) -> dict[str, Any] | None:
    """Note of `save_keras` in a file; None of any other file, UsageError for one that unpacks to far more."""
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file, weight_files.open_zip(file) as archive:
            return dict(json.loads(archive.read(_ABOUT)))
    except weight_files.TooLargeError as error:
        raise UsageError(f"launcher.load: {path} is not read: {error}") from None
    except Exception:  # zipfile and zlib have many kinds for a file that is none of Keras's
        return None


def _built(model_dir: str, store: CheckpointStore, step: int, *, averaged: bool, trust: bool) -> keras.Model:
    """The model that the run's recipe builds, with the weights of a checkpoint; those may be averaged anyhow."""
    config = os.path.join(model_dir, "config.gin")
    if not os.path.isfile(config):
        raise UsageError(f"launcher.load: {config} is missing, which says how the model is built")
    if _is_of_fit(model_dir):
        raise UsageError(
            f"launcher.load: {model_dir} is of a launcher.fit, whose model only its program can build, and there is no "
            f"{MODEL_FILE} with the weights asked for: python -m launcher.main --gin_file=PROGRAM.py --mode=export "
            "--export_format=keras writes them"
        )
    before = keras.config.dtype_policy()
    try:
        with gin_bindings.usage_errors():
            loading.load_bindings([config], [], foreign=None if trust else model_dir)
            recipe = Recipe()
            cluster = resolve_cluster({})
            devices = strategy_lib.plan(requested="one_device", replicas=None, tpu=None, cluster=cluster, environ={})
            recipe.task.use_assets(assets.read(model_dir))
            forget_names()
            model = session.model_of(recipe, policy=policy_of(recipe, devices)[0], seed=recipe.seed)
    finally:
        keras.config.set_dtype_policy(before)
        gin_bindings.reset()
    chosen = weights.read(store, step, model, averaged=averaged or recipe.evaluate_ema)
    if averaged and not chosen.averaged:
        raise UsageError(f"launcher.load: step {step} in {model_dir} has no averaged weights; load 'best' or 'last'")
    weights.put(model, chosen.arrays)
    return model


def _written(path: str, write: Callable[[str], None]) -> None:
    """Has a file written under another name and renames it when it is on the disk."""
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f"partial.{name}")  # Keras goes by how the name ends
    try:
        write(partial)
        sync(Path(partial))
        os.replace(partial, path)
        sync(Path(folder))
    finally:
        Path(partial).unlink(missing_ok=True)
