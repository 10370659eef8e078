"""Attention in one kernel: what preflight counts of it, in programs that the real compilers made."""

from __future__ import annotations

import pytest
import tensorflow as tf
from cases import repeated_but

from launcher.models.transformer.attention import attend
from launcher.models.transformer.attention_kernel import attend_by_kernel
from launcher.models.transformer.positions import Visibility
from launcher.preflight import advice, gpus, roofline, slices
from launcher.preflight.compiled import hbm, hlo
from launcher.step import gradients
from launcher.step_program import jax_parts, pod_module

pytestmark = pytest.mark.slow

LENGTH, HEADS, WIDTH = 2048, 2, 64
PRODUCT = 2 * HEADS * LENGTH**2 * WIDTH


def lowered(accelerator):
    """StableHLO of a causal attention and its gradient, as a step that was traced by TensorFlow has it."""

    def step(query, key, value, segments, upstream):
        visible = Visibility(query_segments=segments, key_segments=segments, causal=True)
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            outputs = attend_by_kernel(query, key, value, visible, accelerator=accelerator)
        return outputs, *tape.gradient(outputs, [query, key, value], upstream)

    def of(heads):
        return tf.TensorSpec([1, LENGTH, heads, WIDTH], tf.bfloat16)

    return as_of_a_step(step, [of(HEADS), of(1), of(1), tf.TensorSpec([1, LENGTH], tf.int32), of(HEADS)])


def as_of_a_step(step, specs, num_results=4):
    with tf.device("/CPU:0"):
        serialized = tf.function(step, jit_compile=True, autograph=False).experimental_get_compiler_ir(*specs)
        program = serialized(stage="hlo_serialized")
    return pod_module.convert(jax_parts.load(), program, num_replicas=1, num_results=num_results, updates={}).text


def counted(compiled, text, where):
    found = compiled(text, where.name)
    assert found.error is None
    module, before = (hlo.parse(one) if one else None for one in (found.hlo, found.before_libraries))
    costs = where.count(module, before)
    available = where.memory_bytes.value
    used = hbm.account(found, module, argument_names=[], result_names=[], available=available, reserved=lambda _: {})
    bounds = roofline.estimate(costs, where, global_batch_size=1, tokens_per_example=None, steps=1)
    told = advice.advise(costs, used, where, policy="mixed_bfloat16", bounds=bounds)
    return costs, bounds, " ".join(told)


def test_splash_attention_has_a_floor_of_its_products_and_exponentials(compiled):
    where = slices.find("v5litepod-1")
    costs, bounds, told = counted(compiled, lowered("tpu"), where)
    # Of 2 x 2 blocks, the one above the diagonal is left out; each kernel computes the scores, and their exponentials.
    assert costs.flops == 0.75 * 7 * PRODUCT
    exponentials = 2 * 0.75 * HEADS * LENGTH**2
    assert sum(one.exponentials for one in costs.operations) == exponentials
    assert (costs.attention_kernels, costs.library_kernels, costs.kernels) == (2, 0, 0)
    assert bounds.estimated[roofline.VECTOR_UNIT] >= exponentials * 14 / 1024 / where.clock
    assert "only a floor is known" in told
    assert "cuDNN" not in told


@pytest.mark.parametrize("card", repeated_but(["h100:1"], ["a100-80:1", "h100:1"]))
def test_cudnns_attention_is_counted_and_its_workspace_said_to_be_unknown(compiled, card):
    where, text = gpus.find(card), lowered("gpu")
    costs, bounds, told = counted(compiled, text, where)
    entry = hlo.parse(compiled(text, card).hlo).entry
    opcodes = {one.opcode for one in entry.instructions.values()}
    assert not opcodes & {"copy", "transpose"}, "it is read and written as it lies"
    assert costs.flops == 0.5 * 7 * PRODUCT
    assert (costs.attention_kernels, costs.library_kernels) == (2, 2)
    assert bounds.compute_seconds == costs.flops / where.peak_flops
    assert "workspace of 2 kernels of cuDNN is not known" in told


def test_the_kernel_for_triton_is_counted(compiled):
    import jax
    from jax.experimental.pallas.ops.gpu import attention

    def step(query, key, value, upstream):
        return jax.vjp(lambda *of: attention.mha(*of, segment_ids=None, causal=True), query, key, value)[1](upstream)

    array = jax.ShapeDtypeStruct((1, LENGTH, HEADS, WIDTH), jax.numpy.bfloat16)
    text = jax.jit(step).trace(*[array] * 4).lower(lowering_platforms=("cuda",)).as_text()
    costs, _, told = counted(compiled, text, gpus.find("a100-80:1"))
    # Its backward pass computes scores and weights' gradients twice; of another kernel in it nothing is known.
    assert (costs.flops, costs.attention_kernels, costs.kernels) == (0.5 * 9 * PRODUCT, 2, 1)
    assert "kernels of their own" in told


def test_plain_attention_on_gpus_holds_16_bit_weights_alone_for_its_gradient(compiled):
    rows, length, heads = 64, 512, 12

    def step(query, key, value, segments, upstream):
        allowed = Visibility(query_segments=segments, key_segments=segments, causal=True).allowed()
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            outputs = attend(query, key, value, allowed=allowed, rounded=True)
        return tape.gradient(outputs, [query, key, value], upstream)

    query, key = (tf.TensorSpec([rows, length, of, 64], tf.bfloat16) for of in (heads, heads // 3))
    text = as_of_a_step(step, [query, key, key, tf.TensorSpec([rows, length], tf.int32), query])
    entry = hlo.parse(compiled(text, "h200:1").hlo).entry
    scores = rows * heads * length**2
    held = [each for one in entry.instructions.values() for each in one.shapes if each.elements == scores]
    assert {each.dtype for each in held} == {"bf16"}


@pytest.mark.parametrize("together", [True, False])
def test_weights_of_one_shape_are_changed_by_one_kernel_of_gpus_unless_they_are_large(compiled, together, monkeypatch):
    monkeypatch.setattr(gradients, "_TOGETHER", 96 * 64 if together else 0)
    sizes, many = [(96, 64), (64,)], 5

    def step(*numbers):
        found, weights = numbers[: 2 * many], numbers[2 * many :]
        one = tf.constant(1.0)
        checked = gradients.unscale_and_check(found, scale=one, nominal_weight=3.0, true_weight=one, each=True)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, checked.gradients, strict=True)]

    text = as_of_a_step(step, [tf.TensorSpec(size) for size in sizes * 2 * many], num_results=2 * many)
    entry = hlo.parse(compiled(text, "h100:1").hlo).entry
    kernels = [[each.dims for each in one.shapes] for one in entry.instructions.values() if one.opcode == "fusion"]
    assert [sum(size in shapes for shapes in kernels) for size in sizes] == [1 if together else many] * 2
