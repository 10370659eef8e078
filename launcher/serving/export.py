"""Export of a SavedModel that answers text with text, or images with classes, without this package."""

from __future__ import annotations

import os

import tensorflow as tf

from launcher.errors import UsageError
from launcher.run.plan import RunPlan
from launcher.serving import trained
from launcher.tasks.base import Serves


def run(plan: RunPlan, model_dir: str, *, export_dir: str) -> int:
    """Writes the SavedModel; returns the step of its weights.

    It has one signature, "serving_default". Nothing but TensorFlow is needed to load it:

        serve = tf.saved_model.load(export_dir).signatures["serving_default"]
        serve(text=tf.constant(["twenty-one"]))["text"]

    Raises:
      UsageError: the task cannot be exported, there are no weights, or `export_dir` is not empty or not writable.
    """
    task = plan.recipe.task
    if not isinstance(task, Serves):
        raise UsageError(f"--mode=export: {type(task).__name__} cannot be exported; it has no method served()")
    if tf.io.gfile.exists(export_dir) and (not tf.io.gfile.isdir(export_dir) or tf.io.gfile.listdir(export_dir)):
        raise UsageError(f"--export_dir={export_dir} exists and is not an empty folder; choose another")
    with trained(plan, model_dir, "export") as (made, step):
        served = task.served(made.model)
        spec = tf.TensorSpec([None], tf.string, name=served.input_name)
        function = tf.function(served.function, input_signature=[spec])
        module = tf.Module(name="served")
        # Not the Keras model itself, which would bring its own functions and, to be loaded, its own classes.
        module.variables_read = [variable.value for variable in made.model.variables]
        module.resources = served.resources
        module.serve = function
        partial = f"{export_dir.rstrip(os.sep)}.partial"
        try:
            tf.saved_model.save(module, partial, signatures={"serving_default": function})
            if tf.io.gfile.exists(export_dir):
                tf.io.gfile.rmtree(export_dir)
            tf.io.gfile.rename(partial, export_dir)
        except (OSError, tf.errors.OpError) as error:
            raise UsageError(f"--export_dir={export_dir} cannot be written: {error}; choose another") from None
        finally:
            if tf.io.gfile.exists(partial):
                tf.io.gfile.rmtree(partial)
    return step
