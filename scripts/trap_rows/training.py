"""Rows about 16 bits, replicas, optimizers and metrics."""

from __future__ import annotations

from typing import Any

from trap_rows import CannotTell, row, saved

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
    with saved(model) as path:
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
