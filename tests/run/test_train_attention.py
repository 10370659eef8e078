"""`train.attention` on the command line: what the plan says of it, and what is refused."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import sys

import keras
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as tfxla

from launcher import main as entry
from launcher.errors import UsageError
from launcher.machine import accelerators
from launcher.machine.runtime_kinds import PJRT, TENSORFLOW
from launcher.preflight import gpus, slices
from launcher.run import layer_settings, loading
from launcher.step_program import lowering


@pytest.fixture
def dry_run(capsys, tmp_path, monkeypatch):
    """dry_run(recipe, *bindings): (exit code, the plan's line on attention, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))

    def run(recipe, *bindings):
        flags = [f"--gin_param={binding}" for binding in bindings]
        code = entry.main(["launcher", f"--gin_file={recipe}", "--dry_run", *flags])
        out, err = capsys.readouterr()
        return code, next((line for line in out.splitlines() if line.startswith("attention")), ""), err

    return run


KERNEL = "train.attention = 'kernel'"
SMALL = ("language_model.layers = 1", "language_model.width = 24")


@pytest.mark.parametrize(
    ("recipe", "bindings", "told"),
    [
        ("lm_cpu.gin", SMALL, "plain (auto: blocks from 1,024 x 1,024 tokens on a CPU)"),
        (
            "lm_cpu.gin",
            (*SMALL, "text_corpus.length = 2048", "language_model.max_length = 2048"),
            "blocks of 512 x 512 tokens, 2 rows at a time (auto: blocks from 1,024 x 1,024 tokens on a CPU)",
        ),
        ("lm_cpu.gin", (*SMALL, "train.attention = 'blocks'"), "blocks of 512 x 512 tokens, 2 rows at a time"),
        (
            "lm_long_tpu.gin",
            ("language_model.layers = 1", "text_corpus.vocab_size = 512"),
            "blocks of 1024 x 1024 tokens, 1 row at a time (auto: blocks from 512 x 512 tokens on a TPU; 'kernel' is "
            "splash attention, not yet seen to run on one)",
        ),
        (
            "lm_long_tpu.gin",
            ("language_model.layers = 1", "text_corpus.vocab_size = 512", KERNEL),
            "splash attention (train.attention; compiled for a TPU, not yet seen to run on one)",
        ),
        (
            "transformer_cpu.gin",
            ("text_pairs.row_length = 1400", "transformer.layers = 1", "transformer.max_length = 1400"),
            "blocks of 512 x 512 tokens, 4 rows at a time (auto",
        ),
    ],
)
def test_the_plan_tells_the_form_and_why(dry_run, recipe, bindings, told):
    code, line, err = dry_run(recipe, *bindings)
    assert code == 0, err
    assert told in line


def test_a_model_without_attention_has_no_line(dry_run):
    assert dry_run("resnet_cpu.gin", "resnet.depth = 8")[:2] == (0, "")


@pytest.mark.parametrize(
    ("recipe", "form", "message"),
    [
        ("lm_cpu.gin", "ring", "train.attention = 'ring': must be one of 'auto', 'plain', 'blocks', 'kernel'"),
        (
            "resnet_cpu.gin",
            "blocks",
            "train.attention = 'blocks': only for attention of models.transformer",
        ),
    ],
)
def test_a_form_that_cannot_be_is_refused(dry_run, recipe, form, message):
    small = SMALL if recipe == "lm_cpu.gin" else ("resnet.depth = 8",)
    code, _, err = dry_run(recipe, *small, f"train.attention = '{form}'")
    assert code == 64
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("recipe", "bindings", "message"),
    [
        ("lm_cpu.gin", (), "there is no kernel of attention for a CPU, only for TPUs and NVIDIA GPUs; leave the"),
        ("lm_tpu.gin", ("text_corpus.length = 500",), "takes lengths that are multiples of 128, not 500 x 500"),
        ("lm_tpu.gin", ("language_model.attention_dropout = 0.1",), "a share of 0.1 is to be dropped"),
        (
            "transformer_tpu.gin",
            ("text_pairs.row_length = 300", "transformer.layers = 1"),
            "multiples of 128, not 300 x 300",
        ),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused_before_anything_is_traced(dry_run, recipe, bindings, message):
    small = () if recipe.startswith("transformer") else ("language_model.layers = 1",)
    code, _, err = dry_run(recipe, *small, *bindings, KERNEL)
    assert code == 64
    assert "train.attention = 'kernel': " in err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("lacking", ["jax", "call_module", "disabled_checks", "2.20"])
def test_what_a_kernel_needs_is_said_where_it_is_missing(dry_run, monkeypatch, lacking):
    message = "TensorFlow"
    if lacking == "jax":
        monkeypatch.setitem(sys.modules, "jax", None)
        message = "train.attention = 'kernel' needs JAX, which is not installed: "
    elif lacking == "call_module":
        monkeypatch.delattr(tfxla, "call_module")
    elif lacking == "2.20":
        monkeypatch.setattr(tf, "__version__", "2.19.1")
        message = "TensorFlow 2.19.1 cannot call functions that JAX 0.10.2 exports"
    else:
        monkeypatch.setattr(tfxla, "call_module", lambda args, *, version, module, Tout, Sout, platforms=(): None)
    code, _, err = dry_run("lm_tpu.gin", "language_model.layers = 1", KERNEL)
    assert code == 64
    assert message in err
    assert "Traceback" not in err


def of_a_card(card, *bindings, runtime=TENSORFLOW):
    """A language model's attention layer, and its line, as a run on such GPUs sets them."""
    keras.config.set_dtype_policy("mixed_float16")
    on = dataclasses.replace(gpus.find(card), runtime=runtime)
    machine = loading.Machine(environ={}, seed=0, deterministic=False, on=on.strategy(), connect=False)
    small = ("language_model.layers = 1", "train.precision = 'mixed_float16'", "train.strategy = 'auto'")
    plan = machine.resolve(["lm_gpu.gin"], [*small, "train.global_batch_size = 8", *bindings])
    model = plan.recipe.task.model()
    layer_settings.apply(model, plan, lambda _: None)
    return layer_settings.describe(plan, model)["attention"]


@pytest.mark.parametrize(
    ("card", "message"), [("v100:1", "compute capability 8.0 or more, and one here has 7.0"), ("a100-40:1", None)]
)
def test_cudnns_kernel_needs_an_ampere_and_no_jax(monkeypatch, tmp_path, card, message):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        of_a_card(card, KERNEL)


def test_auto_takes_cudnns_kernel_on_cards_of_a_capability_that_has_shown_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    dropping = "language_model.attention_dropout = 0.1"
    for card in ("h100-pcie:1", "h200:1"):
        assert of_a_card(card, runtime=PJRT).startswith("cuDNN's attention (auto: cuDNN's attention wherever it fits")
    others = [of_a_card("a100-40:1", runtime=PJRT), of_a_card("h200:1", dropping, runtime=PJRT), of_a_card("h200:1")]
    assert [one.partition(" ")[0] for one in others] == ["plain"] * 3


PROGRAM = """
import keras, launcher, numpy as np

def build():
    inputs = keras.Input((9, 16))
    x = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
    x = keras.layers.GroupQueryAttention(8, 2, 1)(x, x, attention_mask=keras.ops.ones((1, 9, 9), "bool"))
    x = keras.layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x)
    x = keras.layers.GroupQueryAttention(8, 2, 1)(x, x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x[:, 0]))
    model.compile("sgd", "mse")
    return model

launcher.fit(build, (np.zeros((4, 9, 16), np.float32), np.zeros(4, np.float32)), batch_size=4)
"""


def of_a_program(path, on, form, policy="mixed_bfloat16"):
    """The plan's line of a user's model, and its step for a device: how often each kernel is called."""
    machine = loading.Machine(environ={}, seed=0, deterministic=False, on=on.strategy(), connect=False)
    bindings = (f"train.attention = '{form}'", f"train.precision = '{policy}'", "train.jit_compile = True")
    plan = machine.resolve([str(path)], list(bindings))
    session = lowering.build(plan, 1)
    text = lowering.lower_session(session, for_tpu=on.accelerator == "tpu").program.stablehlo
    line = layer_settings.describe(plan, session.model).get("attention", "")
    return line, collections.Counter(re.findall(r"__cudnn\$fmha(\w+)", text))


# Where it is not asked for, there is none, as of all other programs.
@pytest.mark.parametrize("unasked", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_keras_own_attention_has_cudnns_kernel_where_it_fits_and_the_plan_says_so(tmp_path, unasked):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    of_jax, of_tensorflow = (dataclasses.replace(gpus.find("h100:1"), runtime=one) for one in (PJRT, TENSORFLOW))
    unproven = dataclasses.replace(of_jax, card=accelerators.CARDS["a100-80"])
    line, calls = of_a_program(path, of_jax, "kernel")
    assert line.startswith("cuDNN's wherever keras.ops.dot_product_attention is called, as by 3 of 4 layers of Keras")
    assert calls == {"Softmax": 2, "SoftmaxBackward": 2}
    if unasked:
        assert of_a_program(path, of_jax, "plain") == ("as Keras has it (train.attention)", {})
    line, calls = of_a_program(path, unproven, "auto")
    assert line.startswith("as Keras has it (auto: as Keras has it on a GPU; 'kernel' is cuDNN's") and not calls
    for other in (of_tensorflow, slices.find("v5litepod-1")):
        if unasked:
            assert of_a_program(path, other, "auto") == ("", {})
        with pytest.raises(UsageError, match="of layers of Keras on GPUs with --engine=pjrt"):
            of_a_program(path, other, "kernel")
    with pytest.raises(UsageError, match=r"takes float16 and bfloat16, .* not float32"):
        of_a_program(path, of_jax, "kernel", policy="float32")
    line, calls = of_a_program(path, of_jax, "auto")
    assert "3 of 4 layers" in line and "(auto: cuDNN's attention wherever it fits, else as Keras has it)" in line
    assert calls["SoftmaxBackward"] == 2
