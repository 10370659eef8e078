"""Export of a trained model that runs without this package: a SavedModel or a .keras file."""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from launcher.errors import UsageError, user_code
from launcher.run.plan import RunPlan
from launcher.run.session import Session
from launcher.serving import interface, model_file
from launcher.serving.weights import Weights, trained
from launcher.step.layers import layers_of


def run(plan: RunPlan, model_dir: str, *, export_dir: str, export_format: str = "saved_model") -> int:
    """Writes the model; returns the step of its weights.

    A SavedModel has one signature, "serving_default". Nothing but TensorFlow is needed to load it:

        serve = tf.saved_model.load(export_dir).signatures["serving_default"]
        serve(text=tf.constant(["twenty-one"]))["text"]

    It takes what the task's `served()` takes, such as the bytes of an image file, and where a task has no such method
    the model's own inputs, by their names. The format "keras" holds the model alone, as `model.keras`.

    Raises:
      UsageError: the model cannot be exported so, there are no weights, or `export_dir` is not empty or not writable.
    """
    if tf.io.gfile.exists(export_dir) and (not tf.io.gfile.isdir(export_dir) or tf.io.gfile.listdir(export_dir)):
        raise UsageError(f"--export_dir={export_dir} exists and is not an empty folder; choose another")
    if plan.strategy.num_replicas > 1:
        raise UsageError(
            f"--mode=export runs in one process on one device, and here are {plan.strategy.num_replicas} replicas; "
            "leave --replicas out"
        )
    made, weights = trained(plan, model_dir, "export")
    partial = f"{export_dir.rstrip(os.sep)}.partial"
    try:
        WRITERS[export_format](made, weights, partial)
        if tf.io.gfile.exists(export_dir):
            tf.io.gfile.rmtree(export_dir)
        tf.io.gfile.rename(partial, export_dir)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(f"--export_dir={export_dir} cannot be written: {error}; choose another") from None
    finally:
        if tf.io.gfile.exists(partial):
            tf.io.gfile.rmtree(partial)
    return weights.step


def _saved_model(made: Session, weights: Weights, folder: str) -> None:
    served = made.plan.recipe.task.served(made.model)
    function: Callable[..., Any]
    if served is not None:
        function, resources = served.function, list(served.resources)
        specs = [tf.TensorSpec([None], tf.string, name=served.input_name)]
    else:
        own = interface.of(made.model, made.plan)

        def function(*tensors: tf.Tensor) -> Mapping[str, tf.Tensor]:
            outputs = own.call(dict(zip(own.inputs, tensors, strict=True)))
            # A signature must not give back what it was given, nor one tensor twice.
            return {name: tf.identity(tensor) for name, tensor in outputs.items()}

        specs, resources = list(own.inputs.values()), _tables(made.model)
    module = tf.Module(name="served")
    # Not the Keras model itself, which would bring its own functions and, to be loaded, its own classes.
    module.variables_read = [variable.value for variable in made.model.variables]
    module.resources = resources
    module.serve = tf.function(function, input_signature=specs)
    tf.saved_model.save(module, folder, signatures={"serving_default": module.serve})


def _tables(model: keras.Model) -> list[Any]:
    """Tables of the model's own preprocessing layers, which are no variables."""
    return [
        value
        for layer in layers_of(model)
        for value in vars(layer).values()
        if isinstance(value, tf.saved_model.experimental.TrackableResource)
    ]


def _keras_file(made: Session, weights: Weights, folder: str) -> None:
    with tempfile.TemporaryDirectory() as local:  # Keras writes to a disk, and --export_dir may be a bucket
        path = os.path.join(local, model_file.MODEL_FILE)
        try:
            otherwise = model_file.save_keras(made.model, path, "best", weights)
        except OSError:
            raise
        except Exception as error:  # of the user's get_config()
            raise UsageError(
                f"--export_format=keras: Keras cannot save this model: {user_code.summary(error).rstrip('.')}; give "
                "its own classes a get_config(), or use --export_format=saved_model"
            ) from error
        tf.io.gfile.makedirs(folder)
        tf.io.gfile.copy(path, os.path.join(folder, model_file.MODEL_FILE), overwrite=True)
        if otherwise:
            told = model_file.written_as_trained(local, weights)
            sys.stderr.write(f"note: {model_file.MODEL_FILE}: {otherwise}{told}\n")
            name = model_file.AS_TRAINED
            tf.io.gfile.copy(os.path.join(local, name), os.path.join(folder, name), overwrite=True)


WRITERS: dict[str, Callable[[Session, Weights, str], None]] = {"saved_model": _saved_model, "keras": _keras_file}
