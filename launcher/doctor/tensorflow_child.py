"""TensorFlow's part of the doctor, run in a process of its own by `launcher.doctor.child`."""

import dataclasses
import os
import resource
import sys
import time
from typing import Any

from launcher.config import gin_bindings
from launcher.doctor import child
from launcher.machine.tensorflow_import import import_tensorflow


def _import(request: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    import_tensorflow()
    import keras
    import tensorflow as tf

    seconds = time.monotonic() - started
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "tensorflow": tf.__version__,
        "file": tf.__file__,
        "keras": keras.__version__,
        "tf_keras": tf.keras.__version__,
        "seconds": seconds,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }


def _build(request: dict[str, Any]) -> dict[str, Any]:
    import tensorflow as tf

    build = tf.sysconfig.get_build_info().items()
    return {name: value if isinstance(value, bool) else str(value) for name, value in build}


def _devices(request: dict[str, Any]) -> dict[str, Any]:
    from launcher.machine import devices

    return dataclasses.asdict(devices.discover())


def _recipe(request: dict[str, Any]) -> dict[str, Any] | None:
    """Loads the recipe; None without one."""
    if not request["gin_file"]:
        return None
    from launcher.machine import devices
    from launcher.run import loading

    def set_up() -> None:
        # Before the recipe's own modules use them, as a training does.
        devices.configure_gpus(len(devices.discover().gpus), devices.GpuOptions())

    with gin_bindings.usage_errors():
        recipe = request["recipe"] = loading.load(request["gin_file"], request["gin_param"], before_imports=set_up)
    return {"precision": recipe.precision}


def _data(request: dict[str, Any]) -> dict[str, Any] | None:
    if "recipe" not in request:
        return None
    from launcher.data.kinds import name_of
    from launcher.tasks.base import open_data

    with gin_bindings.usage_errors():
        data = open_data(request["recipe"].task)
        data.check()
        return {"name": name_of(data), "examples": data.num_train_examples}


def _model_dir(request: dict[str, Any]) -> dict[str, Any] | None:
    """Writes to a folder that is no path of this machine's; None for one that is."""
    folder = request["model_dir"]
    if not folder or "://" not in folder:
        return None
    import tensorflow as tf

    while not tf.io.gfile.exists(folder) and "/" in folder.partition("://")[2].strip("/"):
        folder = folder.rstrip("/").rpartition("/")[0]
    name = f"{folder.rstrip('/')}/.doctor-{os.getpid()}"
    try:
        with tf.io.gfile.GFile(name, "wb") as file:
            file.write(b"\n")
        return {}
    finally:
        if tf.io.gfile.exists(name):
            tf.io.gfile.remove(name)


def _gpus(request: dict[str, Any]) -> dict[str, Any] | None:
    """Sets the GPUs up as a training does and multiplies on each; None without GPUs."""
    import tensorflow as tf

    from launcher.machine import devices

    count = len(devices.discover().gpus)
    if not count:
        return None
    options = devices.GpuOptions()
    devices.configure_gpus(count, options)
    growth = [tf.config.experimental.get_memory_growth(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    for index in range(count):
        with tf.device(f"GPU:{index}"):
            total = float(tf.reduce_sum(tf.linalg.matmul(tf.ones((256, 256)), tf.ones((256, 256)))))
        if total != 256.0**3:
            raise RuntimeError(f"GPU:{index} multiplies wrongly: the sum is {total}, not {256.0**3}")
    return {"memory_growth": growth, "tf32": tf.config.experimental.tensor_float_32_execution_enabled()}


def _jax_gpus(request: dict[str, Any]) -> dict[str, Any] | None:
    """Starts JAX on the GPUs that TensorFlow does not list, as a training does; None where there are none.

    A product on each, added up over all, says whether they compute.
    """
    import numpy as np

    from launcher.machine import devices, jax_devices, nvidia
    from launcher.machine.cluster import resolve

    if devices.discover().gpus or not nvidia.visible(os.environ):
        return None
    alone = resolve({})
    gpus = jax_devices.start(jax_devices.plan(None, alone, os.environ, devices.Devices()), alone)
    jax, count = gpus.jax, len(gpus.all)
    ones = jax.device_put(np.ones((count, 256, 256), np.float32), jax_devices.spread(jax, gpus.all))
    if (total := float(jax.jit(lambda matrix: (matrix @ matrix).sum())(ones))) != count * 256.0**3:
        raise RuntimeError(f"the GPUs multiply or add up wrongly: the sum is {total}, not {count * 256.0**3}")
    return {"model": gpus.all[0].device_kind, "count": count, "bytes": gpus.memory_bytes}


def _model(request: dict[str, Any]) -> dict[str, Any] | None:
    """Traps that the recipe's model meets, of which no large weight is given a value; None where nobody asks."""
    if "recipe" not in request or (request["doctor_checks"] and "model" not in request["doctor_checks"]):
        return None
    from launcher.run import layer_lint, loading, session
    from launcher.runtime import initial_values

    recipe, here = request["recipe"], loading.Machine(environ={}, strategy="one_device", connect=False)
    with gin_bindings.usage_errors(), initial_values.left_out(), initial_values.scope(None):
        model = session.model_of(recipe, policy=here.plan_of(recipe).policy, seed=0)
        found = layer_lint.of_run(model, recipe.task, measured=True)
        return {"model": model.name, "traps": [dataclasses.asdict(one) for one in found]}


# By name, in the order in which they are taken.
TOPICS = {
    topic.__name__.removeprefix("_"): topic
    for topic in (_import, _build, _devices, _recipe, _data, _model_dir, _gpus, _jax_gpus, _model)
}


if __name__ == "__main__":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"  # which libraries are missing, and whether oneDNN is on, is only logged
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    sys.exit(child.answer_topics(sys.argv[1], TOPICS, essential="import"))
