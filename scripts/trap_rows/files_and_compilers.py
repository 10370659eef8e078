"""Rows about files, trackers and compilers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
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


# ------------------------------------------------------------------------------------------------------------ trackers


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


# ----------------------------------------------------------------------------------------------------------- compilers


def _for_tpu(function: Callable[..., Any], *shapes: tuple[tuple[int, ...], str], kind: str = "v5e") -> Any:
    """What XLA makes of a function for one TPU."""
    import jax
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:2x2").devices
    except Exception as error:
        raise CannotTell(f"no compiler for TPUs: {str(error).splitlines()[0][:80]}") from None
    on = jax.sharding.SingleDeviceSharding(devices[0])
    inputs = [jax.ShapeDtypeStruct(shape, dtype, sharding=on) for shape, dtype in shapes]
    return jax.jit(function).lower(*inputs).compile()


@row("jax", "libtpu")
def scan_cast() -> tuple[str, bool]:
    import jax

    def layers(weights: Any, x: Any) -> Any:
        def one(carry: Any, weight: Any) -> tuple[Any, None]:
            return jax.numpy.tanh(carry @ weight.astype("bfloat16")), None

        return jax.lax.scan(jax.checkpoint(one), x, weights)[0].astype("float32").sum()

    compiled = _for_tpu(jax.grad(layers), ((8, 4096, 4096), "float32"), ((512, 4096), "bfloat16"))
    share = compiled.memory_analysis().temp_size_in_bytes / (8 * 4096 * 4096 * 4)
    return f"{share:.2f} of the weights' bytes are held beside them; a layer in 16 bits is 0.06", share > 0.4


@row("jax", "libtpu")
def tpu_lookup_bytes() -> tuple[str, bool]:
    compiled = _for_tpu(_lookup, ((4_000_000, 128), "float32"), ((8192,), "int32"), kind="v6e")
    counted, table = compiled.cost_analysis()["bytes accessed"], 4_000_000 * 128 * 4
    return f"{counted / 1e9:.2f} GB counted for a lookup of 0.01 in {table / 1e9:.2f}", counted > 0.5 * table


@row("jax", "libtpu")
def tpu_lookup_text() -> tuple[str, bool]:
    compiled = _for_tpu(_lookup, ((4_000_000, 128), "float32"), ((8192,), "int32"), kind="v6e")
    try:
        return f"a text of {len(compiled.as_text())} characters", False
    except Exception as error:
        return str(error).strip().splitlines()[0][-80:], True


def _lookup(table: Any, rows: Any) -> Any:
    return table[rows]


@row("jax", "numpy")
def bfloat16_categorical() -> tuple[str, bool]:
    import jax
    import numpy as np

    logits = jax.numpy.zeros([3000], "bfloat16")
    drawn = np.asarray(jax.random.categorical(jax.random.key(0), logits, shape=(2000,)))
    share = float(np.mean(drawn < 1000))
    return f"{share:.0%} of draws among the first third of equal logits", share > 0.5
