"""--mode=preflight: a recipe's own step, compiled for slices that are not there, and what people are told of it."""

from __future__ import annotations

import dataclasses

import hlo_text
import pytest
import tensorflow as tf
import text_run

from launcher import main as entry
from launcher.errors import EXIT_DONE, EXIT_USAGE
from launcher.preflight import advice, roofline, slice_finding, slices
from launcher.preflight.compiled import costs, hbm, hlo
from launcher.preflight.compiler import Compiler
from launcher.step import op_source

pytestmark = pytest.mark.slow

CASE_KEYS = {
    "accelerator_type", "topology", "chips", "hosts", "replicas", "changes", "verdict", "refusal", "compiler_error",
    "global_batch_size", "per_replica_batch_size", "microbatches", "policy", "reduce_dtype", "steps", "parameters",
    "compile_seconds", "from_cache", "hbm", "costs", "roofline", "advice", "suggestions", "constants", "unread",
    "largest_batch", "computed", "rematerialize",
}  # fmt: skip
"""Of a case in preflight.json, which programs of others read."""


def test_a_step_that_fits_is_reported_in_words_and_as_json(preflight):
    done = preflight("--tpu_type=v5litepod-4")
    assert done.code == EXIT_DONE, done.err
    (case,) = done.report["cases"]
    assert case["verdict"] == "fits"
    assert (case["replicas"], case["per_replica_batch_size"], case["policy"]) == (4, 64, "mixed_bfloat16")
    parameters = 784 * 256 + 256 + 256 * 10 + 10
    assert case["parameters"] == parameters
    # Forward, and backward but for the gradient of the images, which nothing needs.
    products = 64 * (2 * 784 * 256 + 3 * 256 * 10)
    assert case["costs"]["flops"] == pytest.approx(2 * products, rel=0.1)
    # Gradients in float32, as on a TPU, with the sums of losses, weights and metrics beside them.
    assert case["costs"]["collectives"][0]["dtypes"] == ["f32"]
    reduced = sum(one["bytes"] * one["times"] for one in case["costs"]["collectives"])
    assert 4 * parameters < reduced < 4 * parameters + 200
    used = case["hbm"]
    assert (
        used["needed"] == used["arguments"] + used["outputs"] + used["temporaries"] + used["code"] < used["available"]
    )
    assert any(buffer["name"] == "model/dense1/kernel" for buffer in used["buffers"])
    bounds = case["roofline"]
    assert bounds["step_seconds"] == max(bounds["compute_seconds"], bounds["hbm_seconds"], bounds["wire_seconds"])
    assert case["costs"]["model_flops"] == 2 * products
    assert 0 < bounds["mfu"] <= bounds["hfu"] < 1
    # The compiler's estimate is the headline, the bound its floor.
    assert bounds["estimated_seconds"] == pytest.approx(sum(bounds["estimated"].values()))
    assert bounds["estimated_seconds"] > bounds["step_seconds"]
    assert bounds["examples_per_second"] == pytest.approx(256 / bounds["estimated_seconds"])
    assert all(constant["source"] for constant in case["constants"].values())
    assert set(case) == CASE_KEYS
    assert set(used) == {
        "available", "needed", "arguments", "outputs", "temporaries", "code", "missing", "buffers", "reserved"
    }  # fmt: skip
    assert set(used["buffers"][0]) == {"kind", "name", "bytes", "padding_bytes", "shape", "from"}
    assert set(case["costs"]["collectives"][0]) == {"kind", "bytes", "times", "dtypes", "waits", "results"}
    for words in (
        "HBM of one device",
        "fills neither memory bandwidth nor matrix unit",
        "Constants of the estimates",
        "the step compiles and",
    ):
        assert words in done.out


def test_a_program_that_was_not_read_whole_is_given_memory_and_no_time(preflight, monkeypatch):
    compile_ = Compiler.compile

    def strange(self, *args):
        found = compile_(self, *args)
        return dataclasses.replace(found, hlo=found.hlo.replace("main.", "niam.", 1))

    monkeypatch.setattr(Compiler, "compile", strange)
    done = preflight("--tpu_type=v5litepod-4")
    assert done.code == EXIT_DONE, done.err
    (case,) = done.report["cases"]
    assert (case["verdict"], case["costs"], case["roofline"]) == ("fits", None, None)
    assert case["unread"] == ["where the program begins"]
    assert case["hbm"]["needed"] > 0
    assert "1 part of the compiled program, so nothing is said of its time and FLOPs" in done.out
    assert "Time of a step" not in done.out


def test_several_machines_and_batches_become_a_table_also_of_what_is_shared_out(preflight):
    flags = ("--gin_param=train.jit_compile = True", "--gin_param=train.shard = 'optimizer'")
    machines = ("--tpu_type=v5litepod-4,v6e-4", "--gpu_type=t4:2x2")
    done = preflight(*machines, "--preflight_batch_sizes=256,510", *flags)
    assert done.code == EXIT_DONE, done.err
    assert [(one["accelerator_type"], one["global_batch_size"], one["policy"]) for one in done.report["cases"]] == [
        ("v5litepod-4", 256, "mixed_bfloat16"),
        ("v6e-4", 256, "mixed_bfloat16"),
        ("t4:2x2", 256, "mixed_float16"),
    ]
    # 510 examples cannot be divided by four: said, and no reason to stop.
    assert [one["case"] for one in done.report["not_applicable"]] == [
        "v5litepod-4, train.global_batch_size = 510",
        "v6e-4, train.global_batch_size = 510",
        "t4:2x2, train.global_batch_size = 510",
    ]
    assert "use a multiple of 4, such as 508 or 512" in done.out
    assert {"v5e peak flops", "t4 network"} <= {line.split("  ")[0] for line in done.out.splitlines()}
    # What is put together on a TPU is a sum.
    for case, kind in zip(done.report["cases"], ("reduce-scatter", "reduce-scatter", "all-gather"), strict=True):
        assert kind in {one["kind"] for one in case["costs"]["collectives"]}, case["accelerator_type"]
        assert case["computed"]["optimizer state"].startswith("sharded over 4 replicas: ")
        assert case["computed"]["optimizer state"] in done.out


@pytest.mark.nightly  # of four replicas: above
def test_what_sharing_the_optimizers_state_costs_on_the_wire_is_in_the_collectives(preflight):
    done = preflight("--tpu_type=v5litepod-4,v5litepod-16", "--gin_param=train.shard = 'optimizer'")
    assert done.code == EXIT_DONE, done.err
    small, large = done.report["cases"]
    # What is put together on a TPU is a sum; over 4x4, libtpu makes no reduce-scatter either.
    weights = 4 * 784 * 256
    kinds = [{one["kind"] for one in case["costs"]["collectives"]} for case in (small, large)]
    assert "reduce-scatter" in kinds[0] and "reduce-scatter" not in kinds[1]
    summed = sum(one["bytes"] for one in large["costs"]["collectives"] if one["kind"] == "all-reduce")
    assert 2 * weights < summed < 2.1 * weights
    for case in (small, large):
        assert case["computed"]["optimizer state"].startswith(f"sharded over {case['replicas']} replicas: ")
        assert case["computed"]["optimizer state"] in done.out


@pytest.mark.nightly  # its forms: test_train_attention.py, and its bounds: test_costs.py
@pytest.mark.parametrize(
    ("target", "length", "attention"),
    [
        ("--tpu_type=v5litepod-1", 512, "blocks of 512 x 512 tokens, 8 rows at a time (auto: blocks from 512 x 512"),
        pytest.param("--gpu_type=l4", 64, "plain (auto: blocks from 2,048 x 2,048", marks=pytest.mark.nightly),
    ],
)
def test_a_model_that_is_a_class_is_examined_with_its_tokens_and_forms(preflight, tmp_path, target, length, attention):
    text_run.write_corpus(tmp_path)
    sizes = (f"text_corpus.length = {length}", "language_model.dropout = 0.0", "language_model.smeared_keys = False")
    small = (*text_run.corpus_bindings(tmp_path), *sizes)
    compiled = ("train.jit_compile = True", "train.precision = 'mixed_bfloat16'")
    recipe = ("--gin_file=lm_cpu.gin", *(f"--gin_param={binding}" for binding in (*small, *compiled)))
    done = preflight(target, recipe=recipe)
    assert done.code == EXIT_DONE, done.err
    (case,) = done.report["cases"]
    assert case["verdict"] == "fits"
    bounds = case["roofline"]
    assert bounds["tokens_per_second"] > bounds["examples_per_second"] > 0
    assert case["computed"].keys() == {"input", "attention", "loss"}
    assert case["computed"]["attention"].startswith(attention)
    assert all(line in done.out for line in case["computed"].values())


def test_a_batch_that_does_not_fit_is_refused_and_the_suggestion_then_fits(preflight):
    recipe = (
        "--gin_file=mlp_fashion.gin",
        "--gin_param=image_data.name = 'digits'",
        "--gin_param=mlp.layers = 1",
        "--gin_param=mlp.units = 262144",  # a wide layer compiles sooner than many examples
        "--gin_param=train.global_batch_size = 65536",
    )
    refused = preflight("--tpu_type=v5litepod-4", recipe=recipe)
    assert refused.code == EXIT_USAGE
    (case,) = refused.report["cases"]
    assert case["verdict"] == "does not fit"
    assert "CompileTimeHbmOom" in case["compiler_error"]
    assert case["hbm"]["missing"] == case["hbm"]["needed"] - case["hbm"]["available"] > 0
    assert "train.global_batch_size = 65536 does not fit on v5litepod-4" in refused.err
    suggestion = case["suggestions"][0]
    assert (suggestion["verdict"], suggestion["refused"]) == ("fits", None), "what does not fit is no suggestion"
    assert suggestion["compile_seconds"] > 0
    assert f"Try {suggestion['flag']}, which was compiled and fits" in refused.err
    assert suggestion["flag"].startswith('--gin_param="train.microbatches')
    follow = suggestion["flag"].replace('"', "")
    done = preflight("--tpu_type=v5litepod-4", recipe=(*recipe, follow))
    assert done.code == EXIT_DONE, done.err
    assert done.report["cases"][0]["verdict"] == "fits"
    assert done.report["cases"][0]["from_cache"], "it was compiled as a suggestion"
    assert done.report["cases"][0]["hbm"]["needed"] == suggestion["hbm_bytes"]
    assert case["hbm"]["needed"] > done.report["cases"][0]["hbm"]["needed"]
    # Left to preflight, it finds the same.
    found = preflight("--tpu_type=v5litepod-4", recipe=(*recipe, "--gin_param=train.microbatches = 'auto'"))
    assert found.code == EXIT_DONE, found.err
    assert found.report["cases"][0]["changes"] == done.report["cases"][0]["changes"] + [follow.split("=", 1)[1]]
    assert "(auto: 1 did not fit)" in found.out


@pytest.mark.heavy
@pytest.mark.nightly  # test_largest_batch.py has the search, and this compiles for a minute
def test_the_largest_batch_is_found_and_the_next_one_refused(preflight):
    wide = ("--gin_file=mlp_fashion.gin", "--gin_param=image_data.name = 'digits'", "--gin_param=mlp.layers = 1")
    recipe = (*wide, "--gin_param=mlp.units = 262144", "--gin_param=train.global_batch_size = 16384")
    done = preflight("--tpu_type=v5litepod-4", "--largest_batch", recipe=recipe)
    assert done.code == EXIT_DONE, done.err
    (case,) = done.report["cases"]
    found = case["largest_batch"]
    assert found["exact"]
    assert found["refused"] == found["fits"] + found["unit"]
    assert found["unit"] == 4, "one example a replica"
    verdicts = {one["global_batch_size"]: one["verdict"] for one in found["tried"]}
    assert (verdicts[found["fits"]], verdicts[found["refused"]]) == ("fits", "does not fit")
    assert case["global_batch_size"] == found["fits"]
    assert f"the largest global batch that fits is {found['fits']:,}" in done.out
    alone = preflight(
        "--tpu_type=v5litepod-4", recipe=(*recipe, f"--gin_param=train.global_batch_size = {found['refused']}")
    )
    assert alone.code == EXIT_USAGE


def test_search_compiles_with_each_knob(preflight):
    done = preflight("--tpu_type=v5litepod-4", "--preflight_search", "--gin_param=train.precision = 'float32'")
    assert done.code == EXIT_DONE, done.err
    (case,) = done.report["cases"]
    tried = {one["flag"]: one for one in case["suggestions"]}
    bfloat16 = tried["--gin_param=\"train.precision = 'mixed_bfloat16'\""]
    assert bfloat16["verdict"] == "fits"
    assert bfloat16["hbm_bytes"] > 0
    assert tried["--gin_param=\"train.shard = 'optimizer'\""]["hbm_bytes"] < case["hbm"]["needed"]
    assert "Knobs, measured" in done.out
    assert any("train.precision = 'mixed_bfloat16'" in line for line in case["advice"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "add what to compile for, as --tpu_type=v5litepod-256"),
        (("--tpu_type=v5litpod-4",), "did you mean 'v5litepod'"),
        (("--tpu_type=v5litepod-7",), "the nearest is v5litepod-8"),
        (
            ("--tpu_type=v5litepod-16", "--gin_param=train.global_batch_size = 100"),
            "a multiple of 16, such as 96 or 112",
        ),
        (("--tpu_type=v5litepod-4", "--preflight_batch_sizes=many"), "'many' is no whole number above 0"),
        (
            ("--tpu_type=v5litepod-4", "--largest_batch", "--preflight_search"),
            "--preflight_search out",
        ),
        (("--tpu_type=v5litepod-4", "--preflight_timeout=0"), "--preflight_timeout=0: must be more than 0 seconds"),
        (("--tpu_type=v5litepod-4", "--tpu=local"), "--tpu=local: --mode=preflight compiles for what --tpu_type"),
        (("--tpu_type=v5litepod-4", "--gin_param=mlp.unit = 4"), "units"),
    ],
)
def test_a_wrong_request_is_one_message_before_anything_is_compiled(preflight, flags, message):
    done = preflight(*flags)
    assert done.code == EXIT_USAGE
    assert message in done.err
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    assert not done.model_dir.exists()


def test_its_flags_are_for_its_mode_only(capsys):
    assert entry.main(["launcher", "--gin_file=mlp_fashion.gin", "--tpu_type=v4-8"]) == EXIT_USAGE
    assert "--tpu_type is for --mode=preflight" in capsys.readouterr().err


def test_a_dry_run_compiles_nothing(preflight):
    done = preflight("--tpu_type=v3-8", "--dry_run")
    assert done.code == EXIT_DONE
    assert "v3-8: 4 chips (2x2), 8 replicas, 1 host" in done.out
    assert "mixed_bfloat16 (auto: TPUs multiply in bfloat16)" in done.out
    assert not done.model_dir.exists()


def test_an_operation_that_no_tpu_has_is_named_with_the_line_that_calls_it(preflight, tmp_path, monkeypatch):
    (tmp_path / "host_model.py").write_text(
        "import gin, keras\n"
        "import tensorflow as tf\n"
        "class Host(keras.layers.Layer):\n"
        "    def call(self, x):\n"
        "        return tf.ensure_shape(tf.py_function(lambda v: v, [x], x.dtype), x.shape)\n"
        "@gin.configurable\n"
        "def host_model(*, image_shape, num_classes):\n"
        "    image = keras.Input(image_shape)\n"
        "    hidden = Host()(keras.layers.Dense(4)(keras.layers.Flatten()(image)))\n"  # gradients of no static shape
        "    return keras.Model(image, keras.layers.Dense(num_classes)(hidden))\n"
    )
    (tmp_path / "host.gin").write_text(
        "import host_model\ninclude 'mlp_fashion.gin'\nimage_classification.model = @host_model\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = preflight("--tpu_type=v5litepod-4", recipe=("--gin_file=host.gin",))
    assert done.code == EXIT_USAGE, done.err
    assert "PyFunc" in done.err
    assert "host_model.py:5" in done.err
    assert "Traceback" not in done.err


def test_a_refusal_of_the_compiler_names_the_place():
    error = "INVALID_ARGUMENT: Mosaic failed for %kernel.7 = f32[8] custom-call(...)"
    text = (
        "HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        '  ROOT %kernel.7 = f32[8]{0} custom-call(%p), custom_call_target="x", metadata={op_name="block/attend"}\n}\n'
    )
    module = hlo.parse(hlo_text.dump(text), lambda name: "my_model.py:12" if name == "block/attend" else "")
    explained = slice_finding.explain_refusal(error, module)
    assert "block/attend at my_model.py:12" in explained
    assert "Mosaic failed" in explained


def test_advice_names_host_transfers_dynamic_shapes_float32_products_and_padding():
    text = """HloModule m

ENTRY %main (x: bf16[8,64], w: f32[100,100]) -> f32[100,100] {
  %x = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  %w = f32[100,100]{1,0:T(8,128)} parameter(1)
  %begin = token[] after-all()
  %fed = ((f32[4]{0}), token[]) infeed(%begin), metadata={op_name="waits"}
  %d = s32[<=16]{0:T(128)} custom-call(%x), custom_call_target="PadToStatic", metadata={op_name="ragged/keep"}
  ROOT %product = f32[100,100]{1,0:T(8,128)} convolution(%w, %w), dim_labels=bf_io->bf, metadata={op_name="wide/MatMul"}
}
"""
    counted = costs.count(hlo_text.parse(text))
    assert counted.flops == 2 * 100**3
    image = hbm.Buffer(
        kind="argument",
        name="image",
        bytes=2**31,
        where="",
        array=hlo_text.array("f32[64,224,224,3]{0,3,2,1:T(8,128)}"),
    )
    held = hbm.HbmUse(
        available=2**33,
        needed=2**32,
        arguments=2**31,
        outputs=0,
        temporaries=2**31,
        code=0,
        fits=True,
        buffers=(image,),
    )
    where = slices.find("v5litepod-4")
    bounds = roofline.estimate(counted, where, global_batch_size=8, tokens_per_example=None, steps=1)
    said = advice.advise(counted, held, where, policy="mixed_bfloat16", bounds=bounds)
    for words in ("waits for the host 1 times: waits", "ragged/keep", "wide/MatMul", "100% of the arithmetic", "image"):
        assert any(words in line for line in said), (words, said)


def test_lines_of_a_model_are_found_for_its_operations_and_their_gradients(tmp_path):
    path = tmp_path / "lib" / "python_nets" / "net.py"  # no library, whatever its folder is called
    path.parent.mkdir(parents=True)
    path.write_text("import tensorflow as tf\n\ndef net(x):\n    return tf.tanh(x, name='squash')\n")
    scope: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    with tf.Graph().as_default() as graph:
        scope["net"](tf.zeros([2]))
    lines = op_source.user_lines(graph)
    assert op_source.line_of(lines, "squash") == f"{path}:4"
    assert op_source.line_of(lines, "gradient_tape/squash/TanhGrad") == f"{path}:4"
    assert op_source.line_of(lines, "elsewhere") == ""
