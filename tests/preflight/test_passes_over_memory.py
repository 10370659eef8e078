"""How often the compiled step passes over what is large, counted in the TPU compiler's program."""

from __future__ import annotations

import pods
import pytest
import text_run

from launcher.preflight.compiled import costs, hlo
from launcher.step_program import lowering

pytestmark = pytest.mark.slow


def compiled_step(compiled, recipe, params):
    plan = pods.plan_of(recipe, params)
    program = lowering.lower_session(lowering.build(plan, 4), for_tpu=True).program
    return hlo.parse(compiled(program.stablehlo, "v5litepod-4").hlo)


@pytest.mark.nightly  # of speed alone
def test_clipping_adam_its_gate_and_averages_are_one_pass_over_each_weight(compiled):
    units = 8192
    module = compiled_step(
        compiled,
        "mlp_fashion.gin",
        [f"mlp.units = {units}", "mlp.layers = 1", "train.global_batch_size = 32", "train.optimizer = @adamw",
         "adamw.learning_rate = 1e-3", "Clipping.global_norm = 1.0", "train.ema_decay = 0.999"],
    )  # fmt: skip
    weight = 4 * 784 * units
    # The weight, both moments and the average are read and written, the gradient is read: nine, and one pass more over
    # the gradient alone is ten.
    assert 8 * weight <= costs.count(module).hbm_bytes <= 10 * weight


@pytest.mark.nightly  # of speed alone
def test_the_mask_of_heads_that_share_keys_is_not_copied_for_each(compiled, tmp_path):
    rows, length = 4, 256
    text_run.write_corpus(tmp_path)
    module = compiled_step(
        compiled,
        "lm_cpu.gin",
        [*text_run.corpus_bindings(tmp_path), f"text_corpus.length = {length}", f"train.global_batch_size = {4 * rows}",
         "language_model.smeared_keys = False", "language_model.dropout = 0.0", "train.attention = 'blocks'",
         "train.precision = 'mixed_bfloat16'"],
    )  # fmt: skip
    masks = [
        one
        for one, _ in costs.executed(module.entry)
        if one.opcode in ("copy", "broadcast")
        and any(shape.dtype == "pred" and shape.elements >= rows * length**2 for shape in one.shapes)
    ]
    assert not masks
