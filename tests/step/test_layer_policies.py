"""Layers that a recipe names compute in the dtype it gives them, in every kind of model and on every topology."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from small_run import GivenTask, assert_replicas_equal, build, policies_of, train

from launcher.errors import UsageError
from launcher.machine import versions
from launcher.models.normalization import BatchNormalization
from launcher.models.transformer import transformer
from launcher.run.description import describe
from launcher.run.loading import Machine
from launcher.run.recipe import Recipe
from launcher.step import layer_policies
from launcher.step.precision import DynamicLossScale, FixedLossScale

pytestmark = pytest.mark.slow

SEQUENCES = {"vocab_size": 16, "layers": 1, "width": 8, "heads": 2, "hidden": 16, "max_length": 8}
FEATURES = 8


def session(task: str, policy: str, overrides: dict[str, str], *, replicas: int = 1):
    made = sequences() if task == "transformer" else images()
    return build(made, replicas, precision=policy, precision_overrides=overrides)


def images() -> GivenTask:
    """Given images for two convolutions, a functional model."""

    def model() -> keras.Model:
        inputs = x = keras.Input((8, 8, 1))
        for name in ("stem", "stage2"):
            x = keras.layers.Conv2D(4, 3, use_bias=False, name=f"{name}_conv")(x)
            x = keras.layers.ReLU()(BatchNormalization(group_size=2, name=f"{name}_norm")(x))
        x = keras.layers.GlobalAveragePooling2D(name="pool", dtype="float32")(x)
        return keras.Model(inputs, keras.layers.Dense(3, name="logits", dtype="float32")(x))

    def loss(model, batch, training):
        logits = model(batch["image"], training=training)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits)
        return tf.reduce_sum(losses), tf.reduce_sum(batch["weight"]), {}

    source = np.random.default_rng(0)
    arrays = {
        "image": source.normal(size=(3, 8, 8, 8, 1)).astype(np.float32),
        "label": source.integers(0, 3, (3, 8)).astype(np.int32),
        "weight": np.ones((3, 8), np.float32),
    }
    return GivenTask(arrays, model, loss)


def sequences() -> GivenTask:
    """Given tokens for a Transformer, which is subclassed and adds tensors up in its own `call`."""

    def loss(model, batch, training):
        logits = tf.cast(model(batch, training=training), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["target_in"], logits)
        return tf.reduce_sum(losses), tf.reduce_sum(batch["weight"]), {}

    tokens = np.random.default_rng(0).integers(1, 16, (3, 4, 8)).astype(np.int32)
    arrays = {"source": tokens, "target_in": tokens[:, ::-1], "weight": np.ones((3, 4), np.float32)}
    return GivenTask(arrays, lambda: transformer(**SEQUENCES), loss)


def weights_after(made, steps: int = 3) -> list[np.ndarray]:
    made.trainer.train(made.trainer.batches(made.plan.data), steps)
    assert_replicas_equal(made)
    return [weight.numpy() for weight in made.model.weights]


def dtypes_of_products(made) -> dict[str, str]:
    """Dtype of the forward matrix products and convolutions, by the layer whose name scope they stand in."""
    batch = made.runtime.strategy.experimental_local_results(next(made.trainer.batches(made.plan.data)))[0]
    traced = tf.function(lambda: made.plan.recipe.task.loss(made.model, batch, False)).get_concrete_function()
    return {
        re.sub(r"_\d+$", "", operation.name.split("/")[-2]): operation.outputs[0].dtype.name
        for operation in traced.graph.get_operations()
        if operation.type in ("MatMul", "BatchMatMulV2", "Conv2D", "Einsum")
    }


@pytest.mark.parametrize(
    ("task", "replicas", "policy", "overrides"),
    [
        ("images", 2, "float32", {".*": "mixed_bfloat16", "pool": "float32", "logits": "float32"}),
        pytest.param("transformer", 1, "mixed_bfloat16", {".*": "float32"}, marks=pytest.mark.nightly),
    ],
)
def test_every_layer_overridden_is_the_run_under_that_policy(task, replicas, policy, overrides) -> None:
    other = overrides[".*"]
    by_layer = session(task, policy, overrides, replicas=replicas)
    assert {weight.dtype for weight in by_layer.model.weights} == {"float32"}
    assert set(dtypes_of_products(by_layer).values()) <= {"float32", other.removeprefix("mixed_")}
    whole = weights_after(session(task, other, {}, replicas=replicas))
    for found, expected in zip(weights_after(by_layer), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_only_the_named_layers_of_a_functional_model_change() -> None:
    made = session("images", "mixed_bfloat16", {"stage2_.*": "float32", "stem_conv": "mixed_float16"})
    for layer, dtype in dtypes_of_products(made).items():
        own = {"stem_conv": "float16", "logits": "float32"}
        assert dtype == own.get(layer, "float32" if layer.startswith("stage2_") else "bfloat16"), layer
    assert isinstance(made.plan.loss_scale, DynamicLossScale), "float16 needs a scale"


def test_parts_of_a_subclassed_model_change_alone_or_with_the_layer_around_them() -> None:
    overrides = {
        "transformer/encoder_block1": "float32",
        "transformer/encoder_block1/feed_forward/up": "mixed_bfloat16",
        ".*/decoder_block1/memory_attention/(query|value)": "float32",
        ".*/decoder_block1/feed_forward": "mixed_float16",
    }
    made = session("transformer", "mixed_bfloat16", overrides)
    found = policies_of(made.model)
    assert found["transformer/encoder_block1/attention/query"] == "float32"
    assert found["transformer/encoder_block1/feed_forward"] == "float32"
    assert found["transformer/encoder_block1/feed_forward/up"] == "mixed_bfloat16"
    assert found["transformer/decoder_block1/feed_forward/down"] == "mixed_float16"
    assert found["transformer/decoder_block1/memory_attention/key"] == "mixed_bfloat16"
    assert all(np.isfinite(weight).all() for weight in weights_after(made, 1)), "tensors of both dtypes meet"
    assert describe(made.plan, made.model, made.trainer.statistics)["layer policies"].startswith(
        "float32 in transformer/encoder_block1"
    )


# ------------------------------------------------------------------------------------------------ bring your own model


class Mixing(keras.layers.Layer):
    """Keras's own layers of layers, in a dictionary and a list, and a sum of two layers' outputs in `call`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attention = {"first": keras.layers.MultiHeadAttention(2, 4, name="attention")}
        self.recurrent = [keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True), name="both")]
        self.dense = keras.layers.Dense(FEATURES, name="dense")

    def call(self, inputs):
        features = self.attention["first"](inputs, inputs)
        return self.dense(features) + self.recurrent[0](features)


def own_task() -> GivenTask:
    def model() -> keras.Model:
        inputs = keras.Input((4, FEATURES))
        inner = keras.Sequential([keras.Input((4, FEATURES)), keras.layers.Dense(3, name="inner")], name="nested")
        return keras.Model(inputs, inner(Mixing(name="mixing")(inputs)), name="own")

    def loss(model, batch, training):
        outputs = tf.cast(model(batch["x"], training=training), tf.float32)
        return tf.reduce_sum(outputs**2), tf.reduce_sum(batch["weight"]), {}

    x = np.random.default_rng(0).normal(size=(2, 4, 4, FEATURES)).astype(np.float32)
    return GivenTask({"x": x, "weight": np.ones((2, 4), np.float32)}, model, loss)


@pytest.mark.skipif(
    versions.of(keras.__version__) < (3, 12),
    reason="parts of its attention take no other dtype from each other",
)
def test_layers_inside_layers_of_ones_own_are_found_by_attribute() -> None:
    overrides = {"mixing": "float32", "nested": "mixed_float16", "mixing/attention/query": "mixed_bfloat16"}
    made = build(own_task(), 2, precision="mixed_bfloat16", precision_overrides=overrides)
    found = policies_of(made.model)
    assert found["own"] == "mixed_bfloat16"
    assert found["mixing/attention/key"] == found["mixing/both"] == "float32"
    assert found["mixing/attention/query"] == "mixed_bfloat16"
    cells = {policy for path, policy in found.items() if path.startswith("mixing/both/")}
    assert cells == {"float32"}
    assert found["nested/inner" if "nested/inner" in found else "inner"] == "mixed_float16"
    assert np.isfinite(train(made).loss).all()


def test_dtypes_that_meet_unreconciled_are_the_users_mistake_and_say_so() -> None:
    made = build(own_task(), precision="mixed_bfloat16", precision_overrides={"mixing/dense": "float32"})
    with (
        pytest.raises(UsageError, match=r"train.precision_overrides: .*mixing/dense.*name the layer around"),
        layer_policies.explained(made.plan.recipe.precision_overrides),
    ):
        made.trainer.trace(made.trainer.batches(made.plan.data))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mixing(": "float32"}, r"'mixing\(' is no regular expression: missing \)"),
        ({".*": "mixed_float61"}, "'mixed_float61' is no policy; did you mean 'mixed_float16'"),
        ({".*": "float16"}, "take 'mixed_float16'"),
        ({"mixing/atention": "float32"}, "matches the whole path of no layer of own; did you mean 'mixing/attention'"),
        ({"(query|dense)": "float32"}, r"did you mean '\.\*/\(query\|dense\)'"),
        (
            {"mixing/.*": "float32", ".*/attention": "mixed_float16"},
            r"'mixing/\.\*' and '\.\*/attention' give layer mixing/attention different policies",
        ),
    ],
)
def test_a_mistake_is_refused_before_anything_is_traced(overrides, message) -> None:
    with pytest.raises(UsageError, match=message):
        build(own_task(), precision_overrides=overrides)


def test_weights_that_the_model_made_in_16_bits_are_not_taken_for_float32() -> None:
    def model() -> keras.Model:
        return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, dtype="bfloat16", name="low")])

    with pytest.raises(UsageError, match="names sequential/low, whose weights the model made bfloat16"):
        layer_policies.apply(model(), {".*low": "float32"})


def test_the_loss_scale_of_a_run_without_float16_stays_off() -> None:
    recipe = {"task": own_task(), "optimizer": lambda: None, "global_batch_size": 4, "steps": 1, "precision": "float32"}
    resolved = Machine(environ={}).plan_of(Recipe(**recipe, precision_overrides={"mixing": "mixed_bfloat16"}))
    assert resolved.loss_scale == FixedLossScale(scale=1.0)


@pytest.fixture
def saved(tmp_path):
    """saved(policy) -> the file of a model saved under a policy: a base of two layers and a softmax in float32."""

    def save(policy):
        keras.config.set_dtype_policy(policy)
        inputs = keras.Input((3,))
        hidden = keras.layers.Dense(4, name="first")(inputs)
        hidden = keras.layers.LayerNormalization(name="norm")(hidden)
        base = keras.Model(inputs, hidden, name="base")
        outer = keras.Input((3,))
        head = keras.layers.Dense(2, name="head")(base(outer))
        whole = keras.Model(outer, keras.layers.Softmax(dtype="float32", name="softmax")(head), name="whole")
        whole.save(tmp_path / "whole.keras")
        keras.config.set_dtype_policy("float32")
        return tmp_path / "whole.keras"

    return save


def loaded_task(make):
    def loss(model, batch, training):
        return tf.reduce_sum(tf.cast(model(batch["x"], training=training), tf.float32)), tf.constant(4.0), {}

    return GivenTask({"x": np.ones((2, 4, 3), np.float32)}, make, loss)


@pytest.mark.parametrize(
    ("was", "run"),
    repeated_but(
        [("mixed_float16", "mixed_bfloat16")], [(was, "mixed_bfloat16") for was in ("float32", "mixed_float16")]
    ),
)
def test_layers_of_a_saved_model_follow_the_policy_of_the_run_but_for_the_output(saved, was, run):
    file = saved(was)
    made = build(loaded_task(lambda: keras.saving.load_model(file)), precision=run)
    found = policies_of(made.model)
    assert {path: found[path] for path in ("first", "norm", "head")} == dict.fromkeys(("first", "norm", "head"), run)
    assert found["softmax"] == "float32"
    assert "layers that a saved model brought in " + was in made.notes[0]
    assert np.isfinite(train(made).loss).all()


def test_a_saved_base_in_16_bits_computes_in_float32_where_the_run_does(saved):
    file = saved("mixed_float16")
    made = build(loaded_task(lambda: keras.saving.load_model(file)), precision="float32")
    assert set(policies_of(made.model).values()) == {"float32"}


def test_layers_that_code_gave_a_policy_keep_it_beside_a_saved_base(saved):
    file = saved("float32")

    def make():
        base = keras.saving.load_model(file).get_layer("base")
        inputs = keras.Input((3,))
        hidden = keras.layers.Dense(4, name="between", dtype="float32")(base(inputs))
        hidden = keras.layers.Dense(4, name="plain")(hidden)
        return keras.Model(inputs, keras.layers.Dense(2, name="out", dtype="float32")(hidden))

    made = build(loaded_task(make), precision="mixed_bfloat16")
    found = policies_of(made.model)
    assert found["between"] == found["out"] == "float32"
    assert found["first"] == found["norm"] == found["plain"] == "mixed_bfloat16"
    assert "3 layers" not in made.notes[0] and "2 layers" in made.notes[0]


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_layers_whose_policy_code_chose_keep_it_and_float16_has_a_loss_scale(dtype):
    def make():
        inner = keras.layers.LSTM(2, name="lstm", dtype=dtype)
        layers = [keras.layers.Bidirectional(inner, name="both", dtype=dtype), keras.layers.Dense(3, dtype=dtype)]
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Reshape((3, 1)), *layers, keras.layers.Dense(1, dtype="float32")]
        )

    made = build(loaded_task(make), precision="float32")
    assert [one.dtype_policy.name for one in made.model.layers] == ["float32", dtype, dtype, "float32"]
    expected = DynamicLossScale() if dtype == "mixed_float16" else FixedLossScale(scale=1.0)
    assert made.plan.loss_scale == expected
    assert describe(made.plan, made.model, [])["loss scale"] == (
        "none" if expected.initial().scale == 1 else str(expected)
    )


def test_an_override_says_the_last_word_on_a_loaded_layer(saved):
    file = saved("float32")
    task = loaded_task(lambda: keras.saving.load_model(file))
    made = build(task, precision="mixed_bfloat16", precision_overrides={"base/norm": "float32"})
    assert policies_of(made.model)["norm"] == "float32"
