"""`train.shard = 'all'`: a step whose weights lie in parts on the replicas trains as one whose weights are whole."""

from __future__ import annotations

import re

import in_parts
import numpy as np
import pods
import pytest
import text_run

from launcher.errors import UsageError
from launcher.models.transformer import attention_kernel
from launcher.step_program import jax_parts, lowering, weights_in_parts

pytestmark = pytest.mark.slow


def language_model(folder, *more):
    wide = ("language_model.width = 64", "language_model.heads = 4", "language_model.hidden = 128")
    # The norm is summed in another order, and must not matter for the rest.
    own = (*wide, "Clipping.global_norm = None", "train.steps = 12", "train.global_batch_size = 16")
    own = (*own, "train.rematerialize = True", "train.ema_decay = 0.9", "language_model.layers = 1")
    return "lm_cpu.gin", [*text_run.corpus_bindings(folder), *own, *more]


def assert_trains_equal(found, expected, tolerance=0.0):
    assert found["held"] < 0.4 * expected["held"] and found["all-gather"] and found["reduce-scatter"]
    assert not expected["all-gather"]
    assert expected["report/loss"][-1] != expected["report/loss"][0]
    for name, value in expected.items():
        if name.startswith(("state/", "report/")) and name != "report/gradient_norm":
            bound = tolerance * np.abs(np.asarray(value, np.float64)).max(initial=0)
            error = np.abs(np.asarray(found[name], np.float64) - value).max(initial=0)
            assert error <= bound, (name, error)
    np.testing.assert_allclose(found["report/gradient_norm"], expected["report/gradient_norm"], rtol=1e-5)


def test_a_language_model_trains_to_the_same_bits(text_folder, run_launcher, tmp_path):
    more = ("train.precision = 'mixed_bfloat16'", "language_model.dropout = 0.15")
    assert_trains_equal(*in_parts.run_both(tmp_path, *language_model(text_folder, *more), run_launcher, replicas=4))


@pytest.mark.nightly  # the kernel by itself is in tests/models
@pytest.mark.heavy
def test_with_attention_by_a_kernel_it_trains_as_with_plain_attention(text_folder, run_launcher, tmp_path, monkeypatch):
    monkeypatch.setitem(attention_kernel.KERNELS, "cpu", "splash attention, interpreted")
    lengths = ("text_corpus.length = 128", "language_model.max_length = 128", "train.jit_compile = True")

    def trained(attention, shard):
        recipe, params = language_model(text_folder, *lengths, f"train.attention = '{attention}'")
        folder = tmp_path / attention
        return in_parts.run(in_parts.write(folder, recipe, params, shard=shard, replicas=8, steps=4), run_launcher)

    assert_trains_equal(trained("kernel", "all"), trained("plain", "none"), 2e-5)


MICROBATCHES = ("train.microbatches = 2", "language_model.dropout = 0.15")


@pytest.mark.nightly  # test_pjrt_engine.py trains microbatches in parts beside whole weights
def test_in_a_loop_over_microbatches_gradients_are_summed_as_parts(text_folder, run_launcher, tmp_path):
    found, expected = in_parts.run_both(tmp_path, *language_model(text_folder, *MICROBATCHES), run_launcher)
    assert_trains_equal(found, expected, 1e-5)
    assert found["temporary"] < expected["temporary"]


def test_in_a_loop_over_microbatches_weights_are_gathered_and_gradients_scattered(text_folder):
    plan = in_parts.plan_of(*language_model(text_folder, *MICROBATCHES))
    program = lowering.lower_session(lowering.build(plan, 8, without_values=True)).program
    jax = jax_parts.load()
    module = jax.ir.Module.parse(program.stablehlo, jax.new_context())
    parents = set()

    def visit(one):
        if one.name in ("stablehlo.all_gather", "stablehlo.reduce_scatter"):
            parents.add(one.parent.name)
        return jax.ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    assert parents == {"stablehlo.while"}


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        pytest.param(("train.precision = 'mixed_float16'",), 2e-3, id="float16"),
        pytest.param(("language_model.tie_embeddings = False", "train.loss_chunks = 2"), 1e-5, id="loss in pieces"),
        pytest.param(("train.optimizer = @lamb", "lamb.learning_rate = 0.01"), 1e-5, id="LAMB"),
        pytest.param(("train.optimizer = @adafactor", "adafactor.learning_rate = 0.01"), 1e-5, id="Adafactor"),
    ],
)
@pytest.mark.nightly
def test_scaled_losses_and_norms_of_whole_weights_are_as_with_whole_weights(
    more, tolerance, text_folder, run_launcher, tmp_path
):
    assert_trains_equal(*in_parts.run_both(tmp_path, *language_model(text_folder, *more), run_launcher), tolerance)


@pytest.mark.nightly  # what is shared out is of no layer's kind
def test_a_convolutional_model_trains_equal(run_launcher, tmp_path):
    params = [*pods.SMALL_IMAGES, "resnet.depth = 8", "resnet.norm_group_size = 8", "train.steps = 12"]
    assert_trains_equal(*in_parts.run_both(tmp_path, "resnet_cpu.gin", params, run_launcher, replicas=4), 1e-5)


@pytest.mark.nightly
def test_a_translation_model_trains_equal(tmp_path, run_launcher):
    text_run.write_pairs(tmp_path)
    wide = ("transformer.width = 64", "transformer.heads = 4", "transformer.hidden = 128")
    params = [*text_run.pair_bindings(tmp_path), *wide, "train.global_batch_size = 16", "train.steps = 12"]
    found = in_parts.run_both(tmp_path / "runs", "transformer_cpu.gin", params, run_launcher)
    assert_trains_equal(*found, 1e-5)


PROGRAM = """
import keras, numpy as np
import launcher

numbers = np.random.default_rng(0)
x = numbers.normal(size=(256, 16)).astype("float32")
y = (x[:, 0] > 0).astype("int32")

def build():
    layers = [keras.Input((16,)), keras.layers.Dense(64, "gelu"), keras.layers.Dense(64, "gelu"),
              keras.layers.Dropout(0.1), keras.layers.Dense(64, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model

launcher.fit(build, (x, y), epochs=2, batch_size=32)
"""


@pytest.mark.nightly  # the next test has a program, too
def test_a_keras_program_trains_equal(run_launcher, tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    program = str(tmp_path / "mine.py")
    assert_trains_equal(*in_parts.run_both(tmp_path / "runs", program, [], run_launcher, replicas=4, steps=8), 1e-5)


ON_TOKENS = """
import keras, numpy as np
import launcher

x = np.random.default_rng(0).integers(0, 512, size=(256, 16)).astype("int32")
y = (x[:, 0] > 200).astype("int32")

def build():
    tokens = keras.Input((16,), dtype="int32")
    features = keras.layers.Embedding(512, 64)(tokens)
    features = keras.layers.Dense(64, "gelu")(features)
    features = keras.layers.{layer}(features)
    model = keras.Model(tokens, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(features)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model

launcher.fit(build, (x, y), epochs=2, batch_size=32, precision="mixed_bfloat16")
"""


@pytest.mark.parametrize(
    ("layer", "more"),
    [
        # Parts of gradients are used before some weights are put together.
        pytest.param("Dense(64)", (), marks=pytest.mark.nightly),
        # A weight goes through a loop of the model's own, and with the second case through the one over microbatches.
        pytest.param("GRU(64, return_sequences=True)", (), marks=pytest.mark.nightly),
        pytest.param("GRU(64, return_sequences=True)", ("train.microbatches = 2",), marks=pytest.mark.nightly),
    ],
)
def test_a_keras_program_on_tokens_trains_equal(layer, more, run_launcher, tmp_path):
    (tmp_path / "mine.py").write_text(ON_TOKENS.format(layer=layer))
    program = str(tmp_path / "mine.py")
    found = in_parts.run_both(tmp_path / "runs", program, more, run_launcher, replicas=4, steps=6)
    assert_trains_equal(*found, 1e-2 if more else 1e-5)


def test_weights_that_are_not_trained_are_in_parts_too(text_folder):
    plan = in_parts.plan_of(*language_model(text_folder, "train.freeze = ('block1', '.*embedd.*')"))
    session = lowering.build(plan, 4, without_values=True)
    program = lowering.lower_session(session).program
    changed = {one.name for one in program.results}
    frozen = [one for one in program.arguments if one.name.startswith("model/") and one.name not in changed]
    assert len(frozen) > 4
    for one in frozen:
        assert (one.axis is not None) == (len(one.shape) > 1), one


KINDS = ("all_gather", "optimization_barrier", "reduce_scatter")


def test_each_gather_and_scatter_waits_for_its_layer(text_folder):
    recipe, params = language_model(text_folder, "train.precision = 'mixed_bfloat16'", "language_model.layers = 2")
    plan = in_parts.plan_of(recipe, params)
    program = lowering.lower_session(lowering.build(plan, 8, without_values=True)).program
    weights = [one for one in program.arguments if one.name.startswith("model/") and one.axis is not None]
    counts = {kind: len(re.findall(rf"stablehlo\.{kind}\b", program.stablehlo)) for kind in KINDS}
    # Once for each pass, behind features; those that are looked up first wait for nothing.
    assert counts["all_gather"] == 2 * len(weights)
    assert counts["optimization_barrier"] >= counts["all_gather"] - 1
    assert counts["reduce_scatter"] == len(weights)
    of_whole = sum(8 * int(np.prod(one.shape)) for one in weights)
    assert 2 * 2 * of_whole <= program.gathered_bytes < 2 * 4 * of_whole


@pytest.mark.parametrize(
    ("count", "most", "sizes"), [(8, None, [8]), (32, 32, [32]), (64, 32, [8, 8]), (512, 32, [8, 8, 8])]
)
def test_many_replicas_scatter_in_stages_whose_parts_are_in_order(count, most, sizes):
    assert weights_in_parts.stages(count, most) == sizes


def test_an_optimizer_that_sees_weights_as_a_whole_is_refused(text_folder):
    recipe, params = language_model(text_folder, "train.optimizer = @keras.optimizers.Lamb")
    plan = in_parts.plan_of(recipe, params)
    with pytest.raises(UsageError, match=r"train\.shard: Lamb .*leave train\.shard out"):
        lowering.build(plan, 8)


def test_a_weight_in_a_form_that_is_not_known_is_named(text_folder, monkeypatch):
    divided, unknown = weights_in_parts._divided, []

    def refuses(jax, text, axes, **how):
        unknown[:] = unknown or [sorted(axes)[1]]
        if unknown[0] in axes:
            raise RuntimeError("a form of tomorrow's")
        return divided(jax, text, axes, **how)

    monkeypatch.setattr(weights_in_parts, "_divided", refuses)
    session = lowering.build(in_parts.plan_of(*language_model(text_folder)), 8, without_values=True)
    with pytest.raises(UsageError, match=r"train\.shard = 'all': model/\S+ is used in .*of tomorrow's.*'optimizer'"):
        lowering.lower_session(session)


@pytest.mark.parametrize("flags", [("--mode=train",), ("--dry_run",), ("--mode=verify",)])
def test_what_trains_with_tensorflow_refuses_it(flags, run_launcher, tmp_path):
    shard = "--gin_param=train.shard = 'all'"
    done = run_launcher("--gin_file=mlp_fashion.gin", shard, f"--model_dir={tmp_path}", *flags)
    assert done.returncode == 64
    assert "train.shard = 'all' needs --engine=pjrt" in done.stderr


def test_a_plan_of_eight_billion_weights_takes_no_memory_for_them(run_launcher, tmp_path):
    flags = ("--gin_file=lm_8b_gpu.gin", "--engine=pjrt", "--replicas=8", "--dry_run", f"--model_dir={tmp_path}")
    done = run_launcher(*flags)
    assert done.returncode == 0, done.stderr
    assert "GiB of 29.7 GiB on each, for the weights, and every slot" in done.stdout
