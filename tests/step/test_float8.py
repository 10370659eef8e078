"""mixed_float8: which layers multiply in 8 bits, by Keras's own form of it, and the same on every topology."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from places import SMALL_DIGITS
from small_run import GivenTask, assert_replicas_equal, build, descent, train

from launcher.checkpoints import CheckpointStore
from launcher.errors import UsageError
from launcher.machine.strategy import FLOAT8_ON_CPU, StrategyPlan, set_up_float8
from launcher.models.transformer.decoder import language_model
from launcher.step import float8

pytestmark = pytest.mark.slow

STEPS = 4
X = np.random.default_rng(0).normal(size=(STEPS, 16, 32)).astype(np.float32)
TARGETS = X[..., :16]


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch):
    monkeypatch.setenv(FLOAT8_ON_CPU, "1")
    yield
    keras.config.set_dtype_policy("float32")


def model() -> keras.Model:
    layers = [keras.layers.Dense(64, "relu", name="one"), keras.layers.Dense(32, "relu", name="two")]
    return keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(16, dtype="float32", name="head")])


def task(made=model) -> GivenTask:
    def loss(model, batch, training):
        squares = tf.reduce_mean((tf.cast(model(batch["x"], training=training), tf.float32) - batch["y"]) ** 2, -1)
        return tf.reduce_sum(squares), tf.reduce_sum(batch["weight"]), {}

    return GivenTask({"x": X, "y": TARGETS, "weight": np.ones((STEPS, 16), np.float32)}, made, loss)


def scales(model: keras.Model) -> dict[str, np.ndarray]:
    named = {weight.path.removeprefix("sequential/"): weight for weight in model.weights}
    return {path: weight.numpy() for path, weight in named.items() if weight.overwrite_with_gradient}


def test_a_run_is_what_keras_makes_of_its_quantized_model():
    made = build(task(), optimizer=lambda: descent(0.1), precision="mixed_float8")
    first = made.model.get_weights()
    losses = train(made).loss
    keras.utils.clear_session()
    keras.config.set_dtype_policy("mixed_bfloat16")
    oracle = model()
    for name in ("one", "two"):
        oracle.get_layer(name).quantize("float8")
    oracle.set_weights(first)
    oracle.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)  # run eagerly, Keras has no gradient
    expected = [oracle.train_on_batch(x, y) for x, y in zip(X, TARGETS, strict=True)]
    np.testing.assert_allclose(losses / 16, expected, rtol=1e-3)
    wanted = scales(oracle)
    assert len(wanted) == 12
    assert np.count_nonzero(wanted["one/outputs_grad_amax_history"]) == STEPS
    for name, found in scales(made.model).items():
        np.testing.assert_allclose(found, wanted[name], rtol=2e-2, err_msg=name)


@pytest.mark.parametrize(("replicas", "microbatches"), repeated_but([(2, 2)], [(1, 2), (2, 1), (2, 2)]))
def test_parts_of_a_batch_have_the_largest_values_of_all(replicas, microbatches):
    def found(*parts):
        made = build(task(), *parts, precision="mixed_float8", optimizer=lambda: descent(0.1))
        losses = train(made).loss
        assert_replicas_equal(made)
        return losses, scales(made.model)

    (losses, whole), (of_parts, apart) = found(1, 1), found(replicas, microbatches)
    np.testing.assert_allclose(of_parts, losses, rtol=1e-3)
    assert whole.keys() == apart.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(apart[name], value, rtol=2e-2, err_msg=name)
    np.testing.assert_array_equal(apart["one/inputs_amax_history"], whole["one/inputs_amax_history"])


def odd() -> keras.Model:
    layers = [keras.layers.Dense(size, name=name) for size, name in ((24, "odd"), (32, "even"), (32, "wide"))]
    inputs = keras.Input((32,))
    features = layers[2](layers[1](inputs))
    return keras.Model(
        inputs, keras.layers.Dense(16, name="head")(keras.layers.Add()([features, layers[0](inputs)[:, :1]]))
    )


@pytest.mark.parametrize(
    ("settings", "taken", "said"),
    [
        (
            {"precision": "mixed_float8"},
            {"even", "wide"},
            "odd: 32 x 24 are no multiples of 16; head: makes the outputs",
        ),
        (
            {"precision": "mixed_float8", "precision_overrides": {"head": "mixed_float8", "even": "mixed_bfloat16"}},
            {"wide", "head"},
            "even: by its own policy",
        ),
        (
            {"precision": "mixed_bfloat16", "precision_overrides": {"wide": "mixed_float8"}},
            {"wide"},
            "1 of 4 Dense and EinsumDense layers multiply in 8 bits",
        ),
        ({"precision": "mixed_float8", "freeze": ("even",)}, {"wide"}, "even: frozen"),
    ],
)
def test_which_layers_multiply_in_8_bits_is_said_with_the_reason_of_the_others(settings, taken, said):
    made = build(task(odd), **settings)
    assert {one.name for one in made.model.layers if getattr(one, "quantization_mode", None)} == taken
    assert all(part in made.notes[0] for part in said.split("; "))
    assert np.isfinite(train(made, 1).loss).all()


@pytest.mark.parametrize(
    ("made", "overrides", "message"),
    [
        (odd, {"odd": "mixed_float8"}, "odd cannot multiply in float8: 32 x 24 are no multiples of 16"),
        (lambda: keras.Sequential([keras.Input((32,)), keras.layers.Dense(16)]), {}, "no layer of .* can multiply"),
    ],
)
def test_what_cannot_multiply_in_8_bits_is_refused(made, overrides, message):
    with pytest.raises(UsageError, match=message):
        build(task(made), precision="mixed_float8", precision_overrides=overrides)


def test_devices_without_8_bit_products_are_refused_and_xla_is_told_of_the_others():
    def of(kind: str, capability: tuple[int, int] | None = None) -> StrategyPlan:
        plan = StrategyPlan(kind="one_device", num_replicas=1, local_replicas=1, why="", devices=(), accelerator=kind)
        return dataclasses.replace(plan, compute_capability=capability)

    for plan, here in ((of("cpu"), "a CPU"), (of("tpu"), "a TPU"), (of("gpu", (8, 0)), "a GPU of 8.0")):
        with pytest.raises(UsageError, match=rf"and this is {here}: take 'mixed_bfloat16'"):
            set_up_float8(plan, {}, compiles=True)
    with pytest.raises(UsageError, match=r"train\.jit_compile = True, or --engine=pjrt"):
        set_up_float8(of("gpu", (9, 0)), {}, compiles=False)
    environ = {"XLA_FLAGS": "--xla_dump_to=x"}
    set_up_float8(of("gpu", (9, 0)), environ, compiles=True)
    assert environ == {"XLA_FLAGS": "--xla_dump_to=x --xla_gpu_enable_triton_gemm=false"}
    set_up_float8(of("cpu"), {FLOAT8_ON_CPU: "1"}, compiles=False)


def attending() -> tuple[keras.Model, tf.Tensor]:
    inputs = keras.Input((4, 32))
    features = keras.layers.TimeDistributed(keras.layers.Dense(32))(
        keras.layers.MultiHeadAttention(2, 16)(inputs, inputs)
    )
    return keras.Model(inputs, keras.layers.Dense(16)(features)), tf.constant(X[0, :4, None, :] + X[1, None, :4, :])


def writing() -> tuple[keras.Model, dict[str, tf.Tensor]]:
    made = language_model(vocab_size=32, layers=1, width=32, heads=2, hidden=64, max_length=8)
    return made, {"tokens": tf.reshape(tf.range(1, 17), [2, 8])}


@pytest.mark.parametrize(("made", "count"), [(attending, 5), (writing, 7)])
def test_the_file_has_kerass_own_policy_and_scales(made, count, tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, batch = made()
    assert f"{count} of " in float8.apply(model, {}, of_run=True)
    for number, (_, weight) in enumerate(sorted((one.path, one) for one in model.weights)):
        if weight.path.endswith("_scale"):
            weight.assign(0.01 + number / 10000)
    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(scales(loaded)) == len(scales(model)) == 6 * count
    np.testing.assert_array_equal(loaded(batch, training=False), model(batch, training=False))


def test_scales_move_where_blocks_are_computed_again():
    def loss(model, batch, training):
        logits = model({"tokens": batch["tokens"]}, training=training)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["tokens"], logits)
        return tf.reduce_sum(tf.reduce_mean(losses, -1)), tf.reduce_sum(batch["weight"]), {}

    def found(again: bool) -> list[np.ndarray]:
        tokens = np.random.default_rng(0).integers(1, 32, (3, 2, 8)).astype(np.int32)
        given = GivenTask({"tokens": tokens, "weight": np.ones((3, 2), np.float32)}, lambda: writing()[0], loss)
        made = build(given, precision="mixed_float8", rematerialize=again)
        assert np.isfinite(train(made).loss).all()
        return made.model.get_weights()

    for kept, repeated in zip(found(False), found(True), strict=True):
        np.testing.assert_array_equal(repeated, kept)


FLAGS = (
    f"--gin_file={SMALL_DIGITS}",
    *(f"--gin_param={text}" for text in ("train.precision = 'mixed_float8'", "train.optimizer = @adamw")),
    *(f"--gin_param={text}" for text in ("adamw.learning_rate = 0.01", "Checkpoints.save_model = 'none'")),
    "--gin_param=train.log_every = 1",
)


def test_a_run_goes_on_bit_for_bit_and_the_engines_agree(run_launcher, tmp_path):
    def run(folder: str, steps: int, *flags: str) -> tuple[dict[str, np.ndarray], list[float]]:
        done = run_launcher(
            *FLAGS,
            f"--gin_param=train.steps = {steps}",
            f"--model_dir={tmp_path / folder}",
            *flags,
            env={FLOAT8_ON_CPU: "1"},
        )
        assert done.returncode == 0, done.stderr
        lines = Path(tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        losses = [event["loss"] for line in lines if (event := json.loads(line))["split"] == "train"]
        return CheckpointStore(str(tmp_path / folder / "checkpoints")).read(steps), losses

    whole, losses = run("whole", 8)
    run("parts", 4)
    again, _ = run("parts", 8)
    assert np.count_nonzero(whole["model/dense1/inputs_amax_history"]) == 8
    for name, value in whole.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    other, found = run("pjrt", 8, "--engine=pjrt", "--replicas=2")
    np.testing.assert_allclose(found, losses, rtol=1e-2)
    for name in scales_of(whole):
        np.testing.assert_allclose(other[name], whole[name], rtol=5e-2, err_msg=name)


def scales_of(state: dict[str, np.ndarray]) -> list[str]:
    return [name for name in state if name.startswith("model/") and name.endswith(("_scale", "_amax_history"))]
