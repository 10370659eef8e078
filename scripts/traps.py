#!/usr/bin/env python3
"""Tells which traps of docs/traps.md the installed versions have: one small check a row, without Launcher.

    python scripts/traps.py
    python scripts/traps.py --only=sentinel        # a row, by its name in the table
    python scripts/traps.py --list

Each row is one line: holds, mended or cannot tell, its name, and what was seen. "Cannot tell" is what needs a package
that is not installed, a compiler that cannot be started here, or another way of asking than these versions have.
Rows of one package run in one process, which may end without the others.

Exit code 0: as docs/traps.md says; 1: a row is mended in versions of which the page does not say so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 400.0  # for the rows of one process
SHOWN = ("tensorflow", "keras", "jax", "jaxlib", "libtpu", "numpy", "tensorflow-datasets", "safetensors", "optax",
         "grain", "orbax-checkpoint", "mlflow", "keras-rs")  # fmt: skip
ANOTHER_NAME = {  # the distributions that bring a module, where they are called otherwise
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
    "keras": ("keras", "keras-nightly"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      needs: modules that have to be there; the first says in which process it runs.
      check: returns what was seen, and whether the trap is there; raises CannotTell.
    """

    name: str
    needs: tuple[str, ...]
    check: Callable[[], tuple[str, bool]]


class CannotTell(Exception):
    """Raised by a check that these versions give no answer to."""


ROWS: dict[str, Row] = {}
KNOWN = {  # rows that do not hold in versions that docs/traps.md names
    "metric-variable": lambda has: _before(has.get("keras", ""), (3, 14)),
    "tpu-lookup-text": lambda has: not _before(has.get("jaxlib", ""), (0, 12)),
}


def row(*needs: str) -> Callable[[Callable[[], tuple[str, bool]]], Callable[[], tuple[str, bool]]]:
    """Makes a row of a function of its name."""

    def made(check: Callable[[], tuple[str, bool]]) -> Callable[[], tuple[str, bool]]:
        name = check.__name__.replace("_", "-")
        ROWS[name] = Row(name, needs, check)
        return check

    return made


# ------------------------------------------------------------------------------------------------------------- 16 bits


@row("tensorflow")
def bias_gradient() -> tuple[str, bool]:
    import tensorflow as tf

    with tf.device("CPU:0"):
        found = float(tf.raw_ops.BiasAddGrad(out_backprop=tf.ones([8192, 4], tf.bfloat16))[0])
    return f"8,192 ones add up to {found:g}", found != 8192


@row("tensorflow", "keras")
def head() -> tuple[str, bool]:
    import keras
    import numpy as np

    def trained(dtype: str) -> float:
        last = keras.layers.Dense(1, "sigmoid", use_bias=False, kernel_initializer="ones", dtype=dtype)
        model = keras.Sequential([keras.Input((1,)), last])
        model.compile(keras.optimizers.SGD(1.0), "binary_crossentropy")
        return float(np.ravel(model.train_on_batch(np.full((1, 1), 12.0), np.zeros((1, 1))))[0])

    narrow, wide = trained("mixed_bfloat16"), trained("float32")
    return f"loss {narrow:.2f}, in float32 {wide:.2f}", abs(narrow - wide) > 1


@row("tensorflow")
def float16_softmax() -> tuple[str, bool]:
    import tensorflow as tf

    compiled = tf.function(tf.nn.softmax, jit_compile=True)
    largest = float(tf.reduce_max(compiled(tf.zeros([1, 70000], tf.float16))))
    return f"the largest share of 70,000 is {largest:g}", largest == 0


@row("tensorflow", "keras")
def sentinel() -> tuple[str, bool]:
    import keras
    import numpy as np

    steps = np.full((1, 2, 3), -9999.0, "float32")
    kept = {
        dtype: bool(np.any(keras.layers.Masking(-9999.0, dtype=dtype).compute_mask(keras.ops.cast(steps, dtype))))
        for dtype in ("float32", "float16", "bfloat16")
    }
    return f"masked {[dtype for dtype, is_kept in kept.items() if not is_kept]}", kept["float16"] or kept["bfloat16"]


@row("tensorflow", "keras")
def ids() -> tuple[str, bool]:
    import keras
    import numpy as np

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__(dtype="mixed_bfloat16")
            self.table = keras.layers.Embedding(300, 1, dtype="float32")

        def call(self, inputs: Any) -> Any:
            return self.table(inputs)

    model = Own()
    model(np.zeros((1, 1), "float32"))
    model.table.embeddings.assign(np.arange(300.0)[:, None])
    found = float(np.ravel(model(np.array([[257.0]], "float32")))[0])
    return f"id 257 looks {found:g} up", found != 257


@row("tensorflow", "keras")
def dropout_share() -> tuple[str, bool]:
    import keras
    import numpy as np

    layer = keras.layers.Dropout(0.01, seed=1, dtype="mixed_bfloat16")
    share = float(np.mean(np.asarray(keras.ops.cast(layer(np.ones(2**20, "float32"), training=True), "float32")) == 0))
    return f"rate 0.01 drops {share:.4f}", abs(share - 0.01) > 0.001


@row("tensorflow")
def float16_mean() -> tuple[str, bool]:
    import tensorflow as tf

    with tf.device("CPU:0"):
        found = {count: float(tf.reduce_mean(tf.ones([count], tf.float16))) for count in (8192, 70000, 200000)}
    return f"means of ones: {found}", any(mean != 1 for mean in found.values())


@row("tensorflow", "keras")
def policy_bfloat16() -> tuple[str, bool]:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="bfloat16")])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    before = np.asarray(model.get_weights()[0], "float32")
    for _ in range(5):
        model.train_on_batch(np.ones((8, 4), "float32"), np.full((8, 1), 5.0, "float32"))
    moved = float(np.max(np.abs(np.asarray(model.get_weights()[0], "float32") - before)))
    return f"Adam moved {moved:g} in 5 steps at rate 0.1", moved == 0


@row("tensorflow", "keras")
def no_loss_scale_from_a_file() -> tuple[str, bool]:
    import keras

    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    with _saved(model) as path:
        loaded = keras.saving.load_model(path)
    kinds = [type(one.optimizer).__name__ for one in (model, loaded)]
    return f"saved with {kinds[0]}, loaded with {kinds[1]}", kinds[0] != kinds[1]


@row("tensorflow")
def random_under_xla() -> tuple[str, bool]:
    import tensorflow as tf

    def draw(alg: str) -> Any:
        return tf.random.stateless_uniform([8], [1, 2], alg=alg)

    apart = {}
    for alg in ("auto_select", "philox"):
        compiled = tf.function(lambda alg=alg: draw(alg), jit_compile=True)()
        apart[alg] = float(tf.reduce_max(tf.abs(draw(alg) - compiled)))
    return f"largest differences {apart}", apart["auto_select"] > 0


# ------------------------------------------------------------------------------------------------------------ replicas


@row("tensorflow", "keras")
def masked_batch_norm() -> tuple[str, bool]:
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0, synchronized=True)
        layer.build((None, 3, 1))

    def replica(masked: bool) -> None:
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        layer(tf.fill([2, 3, 1], 10 * number), training=True, mask=tf.ones([2, 3], tf.bool) if masked else None)

    seen = {}
    for masked in (False, True):
        strategy.run(tf.function(lambda masked=masked: replica(masked)))
        copies = strategy.experimental_local_results(layer.moving_mean.value)
        seen[masked] = [float(np.ravel(one)[0]) for one in copies]
    return f"moving means of 0 and 10: {seen[False]}, with a mask {seen[True]}", seen[True] != seen[False]


# ---------------------------------------------------------------------------------------------- optimizers and metrics


@row("tensorflow", "keras")
def accumulation() -> tuple[str, bool]:
    import keras
    import numpy as np

    rates = keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.0])
    optimizer = keras.optimizers.SGD(rates, gradient_accumulation_steps=4)
    weight = keras.Variable(np.zeros(1, "float32"))
    optimizer.build([weight])
    for _ in range(8):
        optimizer.apply([keras.ops.ones(1)])
    moved = -float(np.ravel(weight)[0])
    return f"2 updates of 1 at a rate that ends after 2 updates: {moved:g}", moved != 2


@row("tensorflow", "keras")
def own_step_loss() -> tuple[str, bool]:
    import keras
    import numpy as np

    class Own(keras.Sequential):
        def train_step(self, data):
            return {"loss": keras.ops.mean(self(data[0]) - data[1]) + 3.0}

    model = Own([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    told = model.fit(np.zeros((2, 1), "float32"), np.zeros((2, 1), "float32"), verbose=0).history["loss"][0]
    return f"a step that returns a loss of 3 is told as {told:g}", told != 3


@row("tensorflow", "keras")
def nadam() -> tuple[str, bool]:
    import keras
    import numpy as np

    optimizer, weight = keras.optimizers.Nadam(1.0, epsilon=0.0), keras.Variable(np.zeros(1, "float32"))
    optimizer.build([weight])
    random, apart = np.random.default_rng(0), []
    ours, m, v, product = 0.0, 0.0, 0.0, 1.0
    for step in range(1, 101):
        gradient = float(random.normal())
        optimizer.apply([keras.ops.convert_to_tensor([gradient], "float32")])
        now, after = (0.9 * (1 - 0.5 * 0.96 ** (one * 0.004)) for one in (step, step + 1))  # of Dozat's paper
        product *= now
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        hat = after * m / (1 - product * after) + (1 - now) * gradient / (1 - product)
        ours -= hat / np.sqrt(v / (1 - 0.999**step))
        apart.append(abs(float(np.ravel(weight)[0]) - ours))
    return f"after 100 steps {apart[-1]:.3g} from the paper's weight", apart[-1] > 1e-3


@row("tensorflow", "keras")
def muon() -> tuple[str, bool]:
    import keras

    if not hasattr(keras.optimizers, "Muon"):
        raise CannotTell("this Keras has no Muon")
    layer = keras.layers.MultiHeadAttention(2, 4)
    layer.build((None, 3, 8), (None, 3, 8))
    optimizer = keras.optimizers.Muon()
    optimizer.build(layer.trainable_variables)
    try:
        by_muon = [one.path for one in layer.trainable_variables if not optimizer._should_use_adamw(one)]
    except AttributeError:
        raise CannotTell("it does not say which weights it orthogonalises") from None
    return f"orthogonalised: {', '.join(by_muon)}", any("bias" in path for path in by_muon)


@row("tensorflow", "keras")
def metric_variable() -> tuple[str, bool]:
    import keras
    import numpy as np

    class Counts(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="counts")
            self.total = self.add_weight(name="total", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float32")))

        def result(self) -> Any:
            return self.total

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Counts()])
    ones = np.ones((4, 1), "float32")
    told = model.fit(ones, ones, validation_data=(ones, 15 * ones), verbose=0).history
    found = float(np.ravel(told["counts"])[0])
    return f"training's sum of 4 ones is {found:g}, validation's {float(np.ravel(told['val_counts'])[0]):g}", found != 4


@row("tensorflow", "keras")
def random_crop() -> tuple[str, bool]:
    import keras
    import numpy as np

    shape = tuple(keras.layers.RandomCrop(4, 4)(np.ones((1, 12, 12, 3), "float32"), training=False).shape)
    return f"outside of training a crop to 4 x 4 gives {shape[1]} x {shape[2]}", shape[1:3] != (4, 4)


# --------------------------------------------------------------------------------------------------------------- files


@row("tensorflow", "keras")
def forgotten_exclusion() -> tuple[str, bool]:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(), "mse")
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.optimizer.build(model.trainable_variables)
    with _saved(model) as path:
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
    with _saved(model) as path:
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


# ---------------------------------------------------------------------------------------------------------- the running


@contextlib.contextmanager
def _saved(model: Any) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/of.keras")
        yield f"{folder}/of.keras"


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in SHOWN:
        for distribution in ANOTHER_NAME.get(name, (name,)):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(name, importlib.metadata.version(distribution))
    return found


def _before(version: str, other: tuple[int, int]) -> bool:
    return tuple(map(int, version.split(".")[:2])) < other if version else False


def told(one: Row) -> tuple[str, str]:
    """holds, mended or cannot tell, and why."""
    missing = [module for module in one.needs if importlib.util.find_spec(module) is None]
    if missing:
        return "cannot tell", f"{', '.join(missing)} is not installed"
    try:
        seen, holds = one.check()
    except CannotTell as why:
        return "cannot tell", str(why)
    except Exception as error:  # another interface, most likely
        return "cannot tell", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
    return ("holds" if holds else "mended"), seen


def run_here(names: list[str], file: Path) -> None:
    """In a process of its own: writes a line a row."""
    if any(ROWS[name].needs[0] == "tensorflow" for name in names):
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[:1]
        tf.config.set_logical_device_configuration(cpu[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    with file.open("a") as lines:
        for name in names:
            lines.write(json.dumps([name, *told(ROWS[name])]) + "\n")
            lines.flush()


def run(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """What becomes of each row, in order."""
    first = dict.fromkeys(ROWS[name].needs[0] for name in names)
    environ = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    environ |= {"JAX_PLATFORMS": "cpu", "TF_ENABLE_ONEDNN_OPTS": environ.get("TF_ENABLE_ONEDNN_OPTS", "1")}
    for package in first:
        own = [name for name in names if ROWS[name].needs[0] == package]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows")
            file.touch()
            command = [sys.executable, os.path.abspath(__file__), f"--only={','.join(own)}", f"--write={file}"]
            why = ""
            try:
                done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
                why = f"the process ended with {done.returncode}"
            except subprocess.TimeoutExpired:
                why = f"not within {SECONDS:.0f} s"
            answers = {name: rest for name, *rest in map(json.loads, file.read_text().splitlines())}
        for name in own:
            state, seen = answers.get(name, ["cannot tell", why])
            yield name, state, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="rows, with commas between them; all unless said")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{one.name:28} needs {', '.join(one.needs)}" for one in ROWS.values()))
        return 0
    names = options.only.split(",") if options.only else list(ROWS)
    for name in names:
        if name not in ROWS:
            parser.error(f"--only={options.only}: there is no row {name!r}; --list prints them")
    if options.write:
        run_here(names, options.write)
        return 0
    has = versions()
    print(", ".join(f"{name} {version}" for name, version in has.items()), flush=True)
    states, news = [], []
    for name, state, seen in run(names):
        states.append(state)
        if state == "mended" and not KNOWN.get(name, lambda has: False)(has):
            news.append(name)
        print(f"{state:11} {name:28} {seen}", flush=True)
    print(", ".join(f"{states.count(one)} {one}" for one in ("holds", "mended", "cannot tell")))
    if news:
        print(f"docs/traps.md does not say so yet: {', '.join(news)}")
    return int(bool(news))


if __name__ == "__main__":
    sys.exit(main())
