"""What is read of kernels and of the compiler's own estimates."""

from __future__ import annotations

import hlo_text

from launcher.preflight.compiled import costs, hlo

# As libtpu writes a Pallas kernel, of which its cost model knows nothing.
KERNEL = """HloModule step, is_scheduled=true

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


def cycles(counted: costs.Costs) -> int:
    return sum(one.cycles or 0 for one in counted.operations)


def test_an_estimate_that_the_compiler_does_not_have_is_no_number_of_cycles():
    counted = costs.count(hlo_text.parse(KERNEL))
    assert (counted.flops, counted.kernels) == (2 * 256 * 128 * 128, 1)
    assert (cycles(counted), counted.unestimated) == (0, 1), "a kernel may be most of the step"
    assert not counted.operations
    known = costs.count(hlo_text.parse(KERNEL.replace("9223372036854775807", "1000")))
    assert (cycles(known), known.unestimated) == (1000 + 300 + 4252, 0)


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
    counted = costs.count(hlo.parse(found.hlo))
    assert (counted.flops, counted.kernels, cycles(counted)) == (2 * 2 * 256 * 128 * 128, 1, 0)
