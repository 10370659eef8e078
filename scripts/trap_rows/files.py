"""Rows about files and trackers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

from trap_rows import CannotTell, row, saved

# --------------------------------------------------------------------------------------------------------------- files


@row("tensorflow", "keras")
def forgotten_exclusion() -> tuple[str, bool]:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(), "mse")
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.optimizer.build(model.trainable_variables)
    with saved(model) as path:
        loaded = keras.saving.load_model(path)
    bias = loaded.layers[-1].bias
    try:
        decays = [model.optimizer._use_weight_decay(model.layers[-1].bias), loaded.optimizer._use_weight_decay(bias)]
    except AttributeError:
        raise CannotTell("it does not say which weights it decays") from None
    return f"the bias is decayed: {decays[0]}, and loaded: {decays[1]}", decays == [False, True]


@row("tensorflow", "keras")
def lora_file() -> tuple[str, bool]:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.layers[0].enable_lora(2)
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/of.weights.h5")
        model.load_weights(f"{folder}/of.weights.h5")
    largest = [float(np.max(np.abs(one))) for one in (model.layers[0].lora_kernel_a, model.layers[0].lora_kernel_b)]
    return f"after reading, the largest of each matrix is {largest[0]:.2g} and {largest[1]:.2g}", not any(largest)


@row("tensorflow", "keras")
def quantized_lora_file() -> tuple[str, bool]:
    import keras
    import numpy as np

    random = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    try:
        model.quantize("int4")
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise CannotTell(f"no int4: {error}") from None
    model.layers[0].enable_lora(2)
    x = random.normal(size=(16, 64)).astype("float32")
    base = np.asarray(model(x))
    model.layers[0].lora_kernel_b.assign(1e-2 * random.normal(size=model.layers[0].lora_kernel_b.shape))
    trained = np.asarray(model(x))
    with saved(model) as path:
        loaded = np.asarray(keras.saving.load_model(path)(x))
    learned, lost = np.abs(trained - base).mean(), np.abs(loaded - trained).mean()
    return f"what was learned is {learned:.2g} of outputs, what is lost by the file {lost:.2g}", bool(
        lost > 0.3 * learned
    )


@row("tensorflow", "keras")
def slots_by_number() -> tuple[str, bool]:
    import keras
    import numpy as np
    import tensorflow as tf

    def made(order: tuple[int, int]) -> tuple[Any, list[Any]]:
        weights = [keras.Variable(np.zeros(2, "float32"), name=name) for name in ("first", "second")]
        optimizer = keras.optimizers.SGD(0.0, momentum=0.9)
        optimizer.build([weights[one] for one in order])
        return optimizer, weights

    optimizer, _ = made((0, 1))
    optimizer.learning_rate = 1.0
    optimizer.apply([keras.ops.zeros(2), keras.ops.ones(2)])
    other, _ = made((1, 0))
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(optimizer=optimizer).write(f"{folder}/saved")
        tf.train.Checkpoint(optimizer=other).read(path).assert_consumed()
    slots = {one.path: float(np.ravel(one)[0]) for one in other.variables if "momentum" in one.path}
    taken = [value for name, value in slots.items() if "first" in name]
    return f"after assert_consumed the slots are {slots}", any(taken)


@row("tensorflow")
def bmp_palette() -> tuple[str, bool]:
    import struct

    import tensorflow as tf

    palette = struct.pack("<256I", *(0xFF0000 if number == 1 else 0 for number in range(256)))  # 1 is red
    pixels = bytes([1, 1, 0, 0])
    header = struct.pack("<2sIHHI", b"BM", 54 + len(palette) + len(pixels), 0, 0, 54 + len(palette))
    header += struct.pack("<IiiHHIIiiII", 40, 4, 1, 1, 8, 0, len(pixels), 0, 0, 256, 0)
    found = tf.io.decode_image(header + palette + pixels).numpy()
    return f"a red pixel of a palette is {found[0, 0].tolist()}", found[0, 0].tolist() != [255, 0, 0]


@row("tensorflow", "tensorflow_datasets")
def tfds_float64() -> tuple[str, bool]:
    import numpy as np
    import tensorflow as tf
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict({"x": tfds.features.Scalar(tf.float64), "n": tfds.features.Scalar(tf.int64)})
    with contextlib.suppress(TypeError, ValueError):
        encoded = features.serialize_example(features.encode_example({"x": 1 / 3, "n": 2}))
        found = float(features.deserialize_example(encoded)["x"])
        return f"1/3 comes back {abs(found - 1 / 3):.1g} off as {np.float64.__name__}", found != 1 / 3
    raise CannotTell("features do not serialise")


@row("safetensors", "numpy")
def safetensors_order() -> tuple[str, bool]:
    import numpy as np
    from safetensors.numpy import load, save

    array = np.arange(6.0).reshape(2, 3).T
    found = load(save({"a": array}))["a"]
    return f"{array[:, 0].tolist()} comes back as {found[:, 0].tolist()}", not np.array_equal(found, array)


@row("jax", "keras", "tensorflow")
def jax_export() -> tuple[str, bool]:
    os.environ["KERAS_BACKEND"] = "jax"  # no other row of this process imports Keras
    import keras
    import numpy as np
    import tensorflow as tf

    class TopTwo(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return keras.ops.top_k(inputs, 2)[0]

    said = {}
    for name, more in (("dense", []), ("with top_k", [TopTwo()])):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), *more])
        with tempfile.TemporaryDirectory() as folder:
            model.export(folder)
            try:
                loaded = tf.saved_model.load(folder)
                loaded.serve(np.ones((2, 4), "float32"))
                said[name] = "answers"
            except Exception as error:
                said[name] = type(error).__name__
    return f"called by TensorFlow: {said}", set(said.values()) != {"answers"}


# ------------------------------------------------------------------------------------------------------------ trackers


@row("tensorboard", "tensorboard_data_server", "tensorflow")
def tensorboard_loader() -> tuple[str, bool]:
    import tensorflow as tf
    from tensorboard import context
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.data import server_ingester
    from tensorboard.util import grpc_util

    def scalars(folder: str) -> list[int]:
        server = server_ingester.SubprocessServerDataIngester(
            server_binary=server_ingester.get_server_binary(),
            logdir=folder,
            reload_interval=3600,
            channel_creds_type=grpc_util.ChannelCredsType.LOCAL,
        )
        server.start()  # which has read the folder once
        asked = context.RequestContext()
        found = server.data_provider.read_scalars(asked, experiment_id="", plugin_name="scalars", downsample=1000)
        return [point.step for runs in found.values() for points in runs.values() for point in points]

    with tempfile.TemporaryDirectory() as folder:
        with tf.summary.create_file_writer(folder).as_default():
            for step in (1, 2, 3, 4, 5, 3):
                tf.summary.scalar("loss", 0.0, step)
        every = EventAccumulator(folder)
        every.Reload()
        shown, kept = scalars(folder), [event.step for event in every.Tensors("loss")]
    return f"of steps 1 to 5 and 3 again it shows {shown}, EventAccumulator {kept}", shown == [1, 2, 3] != kept


@row("mlflow")
def mlflow_step() -> tuple[str, bool]:
    import mlflow
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/of.db")
        with mlflow.start_run():
            said = []
            for step in (np.int64(1), 2):
                try:
                    mlflow.log_metric("loss", 1.0, step=step)
                    said.append("kept")
                except Exception as error:
                    said.append(type(error).__name__)
    return f"a NumPy step, then a plain one: {said}", said != ["kept", "kept"]


@row("keras_rs")
def accidental_hits() -> tuple[str, bool]:
    import keras_rs
    import numpy as np

    layer = keras_rs.layers.RemoveAccidentalHits()
    logits = layer(np.zeros((1, 3), "float32"), np.array([[1, 0, 0]]), np.array([7, 7, 8]))
    found = np.ravel(np.asarray(logits)).tolist()
    return f"the logit of an accidental hit is {found[1]:.3g}", found[1] > -1


@row("orbax")
def orbax_nan() -> tuple[str, bool]:
    import numpy as np
    import orbax.checkpoint as ocp

    with tempfile.TemporaryDirectory() as folder:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda one: one["loss"], best_mode="min")
        with ocp.CheckpointManager(folder, options=options) as manager:
            for step, loss in enumerate([1.0, 3.0, float("nan"), 2.0]):
                manager.save(step, args=ocp.args.StandardSave({"w": np.zeros(1)}), metrics={"loss": loss})
                manager.wait_until_finished()
            kept = manager.all_steps()
    return f"losses 1, 3, NaN, 2: kept steps {list(kept)}", 0 not in kept


@row("grain")
def grain_window() -> tuple[str, bool]:
    import grain

    try:
        shuffled = grain.experimental.WindowShuffleMapDataset(grain.MapDataset.range(10), window_size=4, seed=0)
    except AttributeError:
        raise CannotTell("no WindowShuffleMapDataset") from None
    found = [shuffled[number] for number in range(10)]
    return f"ten numbers come as {[int(one) for one in found]}", sorted(map(int, found)) != list(range(10))
