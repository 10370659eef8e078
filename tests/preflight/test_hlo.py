"""Reading the compiler's optimised programs: everything in them, or else that something was not read."""

from __future__ import annotations

import re

import hlo_oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.preflight.compiled import costs, hlo

# As libtpu writes a Pallas kernel: attributes over several lines, of which one begins with a brace.
KERNEL = """HloModule step, is_scheduled=true

%body (p: (s32[], bf16[256,128])) -> (s32[], bf16[256,128]) {
  %p = (s32[], /*index=1*/bf16[256,128]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %same = (s32[], bf16[256,128]{1,0:T(8,128)(2,1)}) copy(%p)
}

ENTRY %main (x: bf16[256,128], w: bf16[128,128]) -> bf16[256,128] {
  %x = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(0), sharding={replicated}, metadata={op_name="x"}
  %w = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="say \\"w\\" = f32[] {"}
  %kernel = bf16[256,128]{1,0:T(8,128)(2,1)} custom-call(%x), custom_call_target="tpu_custom_call", \
operand_layout_constraints={bf16[256,128]{1,0}}, frontend_attributes={kernel_metadata={
"a":"b",
"c":"{d = 1}\\n  %z = f32[] negate(%x)",
"q":"\\"}"
}}, metadata={op_name="pallas_call" stack_frame_id=4}, \
backend_config={"flag_configs":[],"window_config":{"estimated_cycles":"9223372036854775807"}}
  %copy = bf16[256,128]{1,0:T(8,128)(2,1)} copy(%kernel), backend_config={"window_config":{"estimated_cycles":"300"}}
  ROOT %product = bf16[256,128]{1,0:T(8,128)(2,1)} convolution(%copy, %w), dim_labels=bf_io->bf, \
backend_config={"window_config":{"estimated_cycles":"4252"}}
}
"""


def names(module: hlo.Module) -> dict[str, set[str]]:
    return {name: set(one.instructions) for name, one in module.computations.items()}


def cycles(counted: costs.Costs) -> int:
    return sum(one.cycles or 0 for one in counted.operations)


def test_attributes_over_several_lines_end_no_computation():
    hlo_oracle.check_read(KERNEL)
    counted = costs.count(hlo.parse(KERNEL))
    assert counted.flops == 2 * 256 * 128 * 128
    assert counted.kernels == 1


def test_an_estimate_that_the_compiler_does_not_have_is_no_number_of_cycles():
    counted = costs.count(hlo.parse(KERNEL))
    assert (cycles(counted), counted.unestimated) == (0, 1), "a kernel may be most of the step"
    assert not counted.operations
    known = costs.count(hlo.parse(KERNEL.replace("9223372036854775807", "1000")))
    assert (cycles(known), known.unestimated) == (1000 + 300 + 4252, 0)


@given(random=st.randoms(use_true_random=False))
def test_line_breaks_and_comments_lose_no_instruction(random):
    def broken(match: re.Match[str]) -> str:
        put = random.choice(["", "", "\n", "\n    ", "\r\n", "\n\n}\n" if match[0] == "\\n" else "\n\t"])
        comment = "/* } %no = f32[] add(\n */" if match[0] == ", " and random.random() < 0.1 else ""
        return match[0] + put + comment

    head, _, body = KERNEL.partition("\n\n")
    text = f"{head}\n\n" + re.sub(r', |[={](?=["{\w])|\(|\\n|:(?=["{\[])', broken, body)
    module = hlo.parse(text)
    assert module.unread == ()
    assert names(module) == names(hlo.parse(KERNEL))


@given(cut=st.integers(min_value=0, max_value=len(KERNEL.rstrip()) - 1))
def test_a_text_that_is_cut_off_is_not_taken_for_a_program(cut):
    assert hlo.parse(KERNEL[:cut]).unread


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("  %copy =", "  !!\n  %copy =", "the line '!!'"),
        ("bf16[256,128]{1,0:T(8,128)(2,1)} copy(%kernel)", "q7[256,128]{1,0} copy(%kernel)", "the dtype q7 of copy"),
        ("bf16[256,128]{1,0:T(8,128)(2,1)} copy(%kernel)", "bf16[?,128]{1,0} copy(%kernel)", "the line '%copy = "),
        ("copy(%kernel)", "copy(%kernels)", "the operand kernels of copy"),
        ("copy(%kernel)", "fusion(%kernel), kind=kLoop, calls=%gone", "computation gone, which copy calls"),
        ("ROOT %product", "%product", "the result of computation main"),
        ("ENTRY ", "", "where the program begins"),
        ("%copy =", "%x =", "the line '%x = "),
    ],
)
def test_what_is_not_understood_is_told(old, new, what):
    unread = hlo.parse(KERNEL.replace(old, new)).unread
    assert any(what in one for one in unread), unread


def test_a_kernel_of_pallas_is_compiled_and_read(compiled):
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas

    def double(x, result):
        result[...] = x[...] * 2

    def step(x, w):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(double, out_shape=shape, metadata={"of": "a test", "brace": "}\n"})(x @ w) @ w

    x, w = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    text = jax.jit(step).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    found = compiled(text, "v5litepod-1")
    assert found.error is None
    assert re.search(r"kernel_metadata=\{\n", found.hlo)
    counted = costs.count(hlo.parse(found.hlo))
    assert (counted.flops, counted.kernels, cycles(counted)) == (2 * 2 * 256 * 128 * 128, 1, 0)
