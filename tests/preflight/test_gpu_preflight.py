"""--gpu_type: a recipe's own step, compiled for GPUs that are not there, and what people are told of it."""

from __future__ import annotations

import dataclasses
import re

import hlo_text
import keras
import pytest
from cases import repeated_but
from convolutions import two_convolutions
from toy_step import dense_step

from launcher.errors import EXIT_DONE, EXIT_USAGE, UsageError
from launcher.machine.accelerators import CARDS
from launcher.machine.runtime_kinds import PJRT
from launcher.models.resnet import resnet
from launcher.preflight import advice, gpus
from launcher.preflight import compiler as compiler_lib
from launcher.preflight.compiled import gpu_program, hbm, hlo
from launcher.preflight.compiled.costs import Collective

pytestmark = pytest.mark.slow

JIT = "--gin_param=train.jit_compile = True"


def test_a_step_that_fits_is_reported_with_memory_bounds_and_kernels(preflight):
    done = preflight("--gpu_type=h100:2", JIT)
    assert done.code == EXIT_DONE, done.err
    (case,) = done.report["cases"]
    assert (case["verdict"], case["replicas"], case["hosts"]) == ("fits", 2, 1)
    # As a run on such GPUs would be: Tensor Cores, and gradients in 16 bits between them.
    assert (case["policy"], case["reduce_dtype"], case["topology"]) == ("mixed_float16", "float16", "1x1x2")
    parameters = 784 * 256 + 256 + 256 * 10 + 10
    products = 128 * (2 * 784 * 256 + 3 * 256 * 10)
    assert case["costs"]["flops"] == pytest.approx(2 * products, rel=0.01)
    reduced = {one["dtypes"][0]: one["bytes"] * one["times"] for one in case["costs"]["collectives"]}
    assert reduced["f16"] == 2 * parameters
    used = case["hbm"]
    program = used["arguments"] + used["outputs"] + used["temporaries"] + used["code"]
    assert used["needed"] == program + sum(used["reserved"].values()) < used["available"]
    assert set(used["reserved"]) == {"CUDA context, cuDNN, cuBLAS", "buffers of NCCL", "fragmentation"}
    assert any(buffer["name"] == "model/dense1/kernel" for buffer in used["buffers"])
    assert case["costs"]["kernels_by_kind"]["all-reduce"] == 2
    assert any("GEMM" in kind or "cuBLAS" in kind for kind in case["costs"]["kernels_by_kind"])
    assert all(constant["source"] for constant in case["constants"].values())
    for words in (
        "of f16 on Tensor Cores",
        "over NVLink",
        "--engine=pjrt is this very one",
        "h100 link bandwidth",
    ):
        assert words in done.out


def test_float8_is_multiplied_in_8_bits_forward_and_backward(preflight):
    layers = ("--gin_param=mlp.layers = 2", "--gin_param=train.precision = 'mixed_float8'")
    done = preflight("--gpu_type=h100:1", JIT, *layers)
    assert done.code == EXIT_DONE, done.err
    # The first layer's inputs have no gradient.
    assert done.report["cases"][0]["costs"]["kernels_by_kind"]["cuBLAS in 8 bits"] == 5
    for operands in ("f8e4m3fn on", "f8e4m3fnxf8e5m2 on", "f8e5m2xf8e4m3fn on"):
        assert f"of {operands} Tensor Cores" in done.out
    assert re.search(r"compute, at least .* a device; in bfloat16 0\.\d+ ms", done.out)
    refused = preflight("--gpu_type=a100-80:1", JIT, *layers)
    assert refused.code == EXIT_USAGE
    assert "compute capability 8.9 or more, which multiply 8-bit floats, and this is a GPU of 8.0" in refused.err


def test_a_run_by_jax_has_the_share_that_it_takes_and_is_compiled_in_any_case():
    where = dataclasses.replace(gpus.find("h200"), runtime=PJRT)
    outside, inside = where.reserved(None, 1000).values()
    assert (outside.value, inside.value) == (round(0.08 * where.memory_bytes.value), 50)
    assert {one.runtime.name for one in where.larger()} == {where.strategy().kind} == {"pjrt"}


@pytest.mark.parametrize(
    ("tf32", "engine"),
    repeated_but([(True, "Tensor Cores in TF32")], [(True, "Tensor Cores in TF32"), (False, "CUDA cores")]),
)
def test_float32_is_multiplied_by_what_the_recipe_allows(preflight, tf32, engine):
    done = preflight(
        "--gpu_type=h100:2", JIT, "--gin_param=train.precision = 'float32'", f"--gin_param=gpu.tf32 = {tf32}"
    )
    assert done.code == EXIT_DONE, done.err
    assert f"of f32 on {engine} a device" in done.out
    said = " ".join(done.report["cases"][0]["advice"])
    assert ("CUDA cores (float32 in full precision" in said) == (not tf32)
    assert "train.precision = 'mixed_float16' halves the memory of float32 activations" in said


def test_a_run_that_no_compiler_sees_gets_the_verdict_of_the_engine_that_compiles_it(preflight):
    done = preflight("--gpu_type=h100:2")
    assert done.code == EXIT_DONE, done.err
    assert "preflight: the step compiles and fits: h100:2 with --engine=pjrt" in done.out
    assert "Of TensorFlow nothing can be told, as train.jit_compile is off" in done.out
    assert '--gin_param="train.jit_compile = True"' in done.out
    (case,) = done.report["cases"]
    assert case["accelerator_type"] == "h100:2" and "what JAX leaves to CUDA" in case["hbm"]["reserved"]


@pytest.mark.nightly  # test_preflight.py: several machines and batches become a table
def test_gpus_and_tpus_stand_in_one_table(preflight):
    done = preflight("--tpu_type=v5litepod-4", "--gpu_type=h100:2, t4:2x2", "--gpu_type=b200:3", JIT)
    assert done.code == EXIT_DONE, done.err
    found = {one["accelerator_type"]: one["policy"] for one in done.report["cases"]}
    assert found == {"v5litepod-4": "mixed_bfloat16", "h100:2": "mixed_float16", "t4:2x2": "mixed_float16"}
    assert "use a multiple of 3, such as 255 or 258" in done.out  # b200:3
    assert {"v5e peak flops", "t4 network"} <= {line.split("  ")[0] for line in done.out.splitlines()}


@pytest.mark.nightly  # test_preflight.py has it for a TPU
@pytest.mark.heavy
def test_a_batch_that_does_not_fit_is_refused_and_the_suggestion_then_fits(preflight):
    recipe = (
        "--gin_file=mlp_fashion.gin",
        "--gin_param=image_data.name = 'digits'",
        "--gin_param=mlp.layers = 1",
        "--gin_param=mlp.units = 262144",
        "--gin_param=train.global_batch_size = 32768",
        JIT,
    )
    refused = preflight("--gpu_type=t4:2", recipe=recipe)
    assert refused.code == EXIT_USAGE
    (case,) = refused.report["cases"]
    assert (case["verdict"], case["compiler_error"]) == ("does not fit", None), "the verdict is not the compiler's"
    assert case["hbm"]["missing"] == case["hbm"]["needed"] - case["hbm"]["available"] > 0
    assert "train.global_batch_size = 32768 does not fit on t4:2" in refused.err
    assert "allowed for CUDA context" in refused.err
    suggestion = case["suggestions"][-1]
    assert (suggestion["verdict"], suggestion["refused"]) == ("fits", None)
    assert f"Try {suggestion['flag']}, which was compiled and fits" in refused.err
    done = preflight("--gpu_type=t4:2", recipe=(*recipe, suggestion["flag"].replace('"', "")))
    assert done.code == EXIT_DONE, done.err
    assert done.report["cases"][0]["hbm"]["needed"] == suggestion["hbm_bytes"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("a100:8", r"'a100-80' or 'a100-40' or 'a100-pcie-80' or 'a100-pcie-40'\? known: h100, "),
        ("h1000:8", r"did you mean 'h100'\?"),
        ("mi300:8", r"no such card; known: h100, "),
        ("gb200:8", r"a host has 1 to 4 GPUs"),
        ("h100:16", r"a host has 1 to 8 GPUs.*such as h100:2x8"),
        ("h100:8x", r"write CARD:GPUS or CARD:HOSTSxGPUS"),
        ("rtx-a6000:2x4", r"ask for rtx-a6000:4"),
    ],
)
def test_gpus_that_there_are_not_are_refused_with_those_there_are(asked, message):
    with pytest.raises(UsageError, match=message):
        gpus.find(asked)


def test_cards_have_what_their_data_sheets_say():
    """16-bit, TF32 and FP32 TFLOP/s without sparsity, GB/s of memory, GB that the sheet names."""
    sheets = {
        "b200": (2250, 1100, 75, 7700, 180), "gb200": (2500, 1250, 80, 8000, 186), "a10g": (70, 35, 31.52, 600, 24),
        "l40s": (362.05, 183, 91.6, 864, 48), "a100-80": (312, 156, 19.5, 2039, 80),
        "a100-40": (312, 156, 19.5, 1555, 40), "a100-pcie-80": (312, 156, 19.5, 1935, 80),
        "a100-pcie-40": (312, 156, 19.5, 1555, 40),
        "l4": (121, 60, 30.3, 300, 24), "v100": (125, None, 15.7, 900, 16), "t4": (65, None, 8.1, 320, 16),
    }  # fmt: skip
    for name, (tensor, tf32, float32, bandwidth, gigabytes) in sheets.items():
        card = CARDS[name]
        assert card.tensor_flops.value == tensor * 1e12, name
        assert (card.tf32_flops and card.tf32_flops.value) == (tf32 and tf32 * 1e12), name
        assert card.float32_flops.value == float32 * 1e12, name
        assert card.memory_bandwidth.value == bandwidth * 1e9, name
        assert 0.97 * gigabytes < card.memory_bytes.value / 1e9 < 1.075 * gigabytes, name
        # What all cores do together at the highest clock is what the sheet says, or more where it names a lower one.
        lanes = {(7, 0): 64, (7, 5): 64, (8, 0): 64}.get(card.capability, 128)
        assert 0.99 < 2 * lanes * card.cores * card.clock_ghz * 1e9 / card.float32_flops.value < 1.12, name


def test_names_say_how_many_gpus_on_how_many_hosts():
    found = [gpus.find(name) for name in ("l4", "H100:8", "a100-80:8x8")]
    assert [(one.num_hosts, one.num_replicas, one.strategy().kind) for one in found] == [
        (1, 1, "one_device"),
        (1, 8, "mirrored"),
        (8, 64, "multi_worker"),
    ]
    assert [one.name for one in gpus.find("h100:2").larger()][:4] == ["h100:4", "h100:8", "h100:2x8", "h100:4x8"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "v100" else pytest.mark.nightly) for name in CARDS]
)
def test_every_card_compiles_and_its_program_is_read_as_a_tpus_is(compiled, name):
    where = gpus.find(f"{name}:2")
    found = compiled(dense_step(2), where.name)
    assert found.error is None
    accounted = hbm.account(found, None, argument_names=(), result_names=(), available=where.memory_bytes.value)
    assert accounted.fits
    assert accounted.arguments == 4 * 1024 * 512 + 2 * 256 * 1024
    counted = where.count(hlo.parse(found.hlo), hlo.parse(found.before_libraries))
    assert counted.flops == 2 * 2 * 256 * 1024 * 512
    assert [one.bytes for one in counted.collectives] == [4 * 1024 * 512]
    # bfloat16 needs an A100 or newer.
    on_tensor_cores = gpu_program.unit_of(counted.matrix_ops[0], where.card)[0] == "Tensor Cores"
    assert on_tensor_cores == (where.card.capability >= (8, 0))


def test_an_operation_that_no_gpu_has_is_a_refusal_not_a_missing_assembler(compiled):
    weights = "tensor<1024x512xf32>"
    text = (
        dense_step(2)
        .replace("%w, %r :", "%u, %r :")
        .replace(
            "    %new = ", f"    %u = stablehlo.custom_call @no_such_thing(%w) : ({weights}) -> {weights}\n    %new = "
        )
    )
    found = compiled(text, "h100:2")
    assert found.error is not None
    assert "no_such_thing" in found.error


def test_a_collective_takes_its_time_within_hosts_or_between_them():
    reduction = Collective(kind="all-reduce", bytes=10**9, times=2, dtypes=("f32",), source=hlo.OpSource())
    assert gpus.find("a100-80:1").link_seconds(reduction) == 0
    assert gpus.find("a100-80:8").link_seconds(reduction) == pytest.approx(2 * 2 * 7 / 8 * 1e9 / 300e9)
    # Switches of H100s add up: the bytes go over each GPU's links once.
    assert gpus.find("h100:8").link_seconds(reduction) == pytest.approx(2 * 1e9 / 450e9)
    assert gpus.find("a100-80:8x8").link_seconds(reduction) == pytest.approx(2 * 2 * 7 / 8 * 1e9 / 200e9)


def test_products_that_tensor_cores_cannot_take_are_named_with_the_reason():
    def op(dtype: str, precision: str = "") -> str:
        x, w, p = (f"{dtype}[{shape}]{{1,0}}" for shape in ("64,100", "100,64", "64,64"))
        attributes = f"lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{precision}"
        return (
            f"HloModule m\n\nENTRY main (x: {x}, w: {w}) -> {p} {{\n  x = {x} parameter(0)\n  w = {w} parameter(1)\n"
            f'  ROOT p = {p} dot(x, w), {attributes}, metadata={{op_name="wide/MatMul"}}\n}}\n'
        )

    def said(card: str, text: str) -> str:
        module = hlo_text.parse(text)
        return " ".join(advice.tensor_cores(gpu_program.count(module, module), CARDS[card]))

    assert said("h100", op("f16")) == said("t4", op("f16"))
    assert "sizes that are no multiples of 8" in said("h100", op("f16"))
    assert "wide/MatMul (100)" in said("h100", op("f16"))
    assert "CUDA cores" not in said("h100", op("f32"))
    assert "CUDA cores (float32 in full precision, as gpu.tf32 = False asks for)" in said(
        "h100", op("f32", ", operand_precision={highest,highest}")
    )
    assert "CUDA cores (float32, and v100 has no TF32)" in said("v100", op("f32"))
    assert "CUDA cores (t4 has no bfloat16 in its Tensor Cores)" in said("t4", op("bf16"))


def by_hand(model: keras.Model) -> int:
    """FLOPs of one example's step, from the layers' shapes alone; none for a convolution's own padding."""
    total = 0
    for place, layer in enumerate(one for one in model.layers if hasattr(one, "kernel")):
        taken, features = layer.kernel.shape[-2:]
        positions = 1
        if isinstance(layer, keras.layers.Conv2D):
            size, out = layer.input.shape[1], layer.output.shape[1]
            kernel, stride = layer.kernel.shape[0], layer.strides[0]
            pad = max((out - 1) * stride + kernel - size, 0) // 2 if layer.padding == "same" else 0  # before the image
            positions = sum(0 <= at * stride + tap - pad < size for at in range(out) for tap in range(kernel)) ** 2
        # Forward, the kernel's gradient and, but for the first layer, the gradient of what it was given.
        total += 2 * taken * features * positions * (2 if place == 0 else 3)
    return total


@pytest.mark.nightly  # so are a TPU's, test_costs.py
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        (
            ("resnet_fashion.gin", "image_classification.model = @two_convolutions"),
            lambda: two_convolutions(image_shape=(28, 28, 1), num_classes=10),
        ),
        pytest.param(
            ("resnet_gpu.gin", "train.global_batch_size = 32"),
            lambda: resnet(image_shape=(224, 224, 3), num_classes=1000),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_flops_of_convolutions_are_those_that_are_counted_by_hand(preflight, recipe, model):
    flags = (f"--gin_file={recipe[0]}", f"--gin_param={recipe[1]}", JIT)
    done = preflight("--gpu_type=h100:1", recipe=flags)
    assert done.code == EXIT_DONE, done.err
    (case,) = done.report["cases"]
    expected = case["per_replica_batch_size"] * by_hand(model())
    assert case["costs"]["flops"] == pytest.approx(expected, rel=0.01)


def test_a_gpu_compiler_of_another_version_than_jaxlibs_is_refused(monkeypatch):
    installed = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-pjrt": "0.10.3"}

    def version(name: str) -> str:
        if name not in installed:
            raise compiler_lib.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(compiler_lib.importlib.metadata, "version", version)
    with pytest.raises(UsageError, match=r"does not go with jaxlib 0\.10\.2.*pip install jax-cuda12-pjrt==0\.10\.2"):
        compiler_lib.require_versions("gpu")
    del installed["jax-cuda12-pjrt"]
    with pytest.raises(UsageError, match=r"jax-cuda12-pjrt is not installed \(no GPU is needed\).*\[gpu_preflight\]"):
        compiler_lib.require_versions("gpu")


def test_the_gradient_of_a_loop_turns_as_often_as_the_loop_has():
    """Its end is what the loop before has counted to, which stands nowhere as a number."""

    def loop(name: str, end: str) -> str:
        return (
            f"%{name}_body (s: (s32[], s32[], f32[8,8])) -> (s32[], s32[], f32[8,8]) {{\n"
            "  %s = (s32[], s32[], f32[8,8]{1,0}) parameter(0)\n  %i = s32[] get-tuple-element(%s), index=0\n"
            "  %n = s32[] get-tuple-element(%s), index=1\n  %x = f32[8,8]{1,0} get-tuple-element(%s), index=2\n"
            "  %one = s32[] constant(1)\n  %next = s32[] add(%i, %one)\n"
            "  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
            "  ROOT %t = (s32[], s32[], f32[8,8]{1,0}) tuple(%next, %n, %y)\n}\n\n"
            f"%{name}_condition (c: (s32[], s32[], f32[8,8])) -> pred[] {{\n"
            "  %c = (s32[], s32[], f32[8,8]{1,0}) parameter(0)\n  %k = s32[] get-tuple-element(%c), index=0\n"
            f"  %m = s32[] {end}\n  ROOT %less = pred[] compare(%k, %m), direction=LT\n}}\n\n"
        )

    def turned(name: str, state: str) -> str:
        return f"  %{name} = {state} while(%{name}_in), condition=%{name}_condition, body=%{name}_body\n"

    state = "(s32[], s32[], f32[8,8]{1,0})"
    text = (
        "HloModule m\n\n"
        + loop("forward", "constant(7)")
        + loop("backward", "get-tuple-element(%c), index=1")
        + "ENTRY %main (a: f32[8,8]) -> f32[8,8] {\n  %a = f32[8,8]{1,0} parameter(0)\n  %zero = s32[] constant(0)\n"
        f"  %forward_in = {state} tuple(%zero, %zero, %a)\n{turned('forward', state)}"
        "  %count = s32[] get-tuple-element(%forward), index=0\n"
        f"  %backward_in = {state} tuple(%zero, %count, %a)\n{turned('backward', state)}"
        "  ROOT %out = f32[8,8]{1,0} get-tuple-element(%backward), index=2\n}\n"
    )
    module = hlo_text.parse(text)
    counted = gpu_program.count(module, None)
    assert (counted.flops, counted.unknown_loops) == (2 * 7 * 2 * 8**3, 0)
