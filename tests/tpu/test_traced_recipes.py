"""What every recipe's training step would be on a TPU, as TensorFlow traces it for 8 and for 32 replicas.

Each recipe is traced with its own model, but with fewer blocks (the ResNets with those of depth 8), a small vocabulary
and small buckets, some narrower, because tracing takes time with the number of operations, and variables are real.
Exhaustive cases trace the recipes for TPUs with all their blocks, only narrower ones where their weights would fill
this machine's memory. The experiments, which are for measuring on one machine, are traced for 8 alone.
"""

from __future__ import annotations

from collections import Counter

import made_up_tpu
import pytest
import replicated
import tensorflow as tf
from cases import repeated_but
from places import ROOT

from launcher.step import gradients
from launcher.step.statistics import is_moving, seed_states

pytestmark = pytest.mark.slow

RECIPES = sorted(path.name for path in (ROOT / "gin_configs").glob("*.gin"))
_EXAMPLES = 32  # on a replica: as many as the ResNets' normalisation takes together
_FEWER = {
    "transformer": (
        *("transformer.layers = 1", "transformer.width = 128", "transformer.hidden = 256"),
        "text_pairs.vocab_size = 512",
    ),
    "lm_tpu": ("language_model.layers = 1", "language_model.width = 192", "text_corpus.vocab_size = 512"),
    "lm_": ("language_model.layers = 1", "text_corpus.vocab_size = 512"),
    "lstm": ("text_corpus.vocab_size = 512",),
    "resnet": ("resnet.depth = 8",),
    "mlp": ("mlp.units = 256",),
    "experiment_batch": ("mlp.units = 256",),
    "experiment_guide_mlp": ("mlp.units = 256",),
    "experiment_lstm": ("text_corpus.vocab_size = 512",),
    "experiment": (),
}
_WHOLE = {
    "resnet_tpu.gin": (),
    "lm_tpu.gin": ("text_corpus.vocab_size = 512", "language_model.width = 192"),
    "transformer_tpu.gin": ("text_pairs.vocab_size = 512", "transformer.width = 128", "transformer.hidden = 256"),
}


def fewer(recipe: str) -> tuple[str, ...]:
    return next(those for prefix, those in _FEWER.items() if recipe.startswith(prefix))


def planned(made) -> Counter:
    """Reductions that `gradients.plan_buckets` makes of this model's gradients, statistics and sums, and the norm."""
    wire = made.plan.reduce_dtype
    weights, moving = made.model.trainable_variables, list(filter(is_moving, made.trainer.statistics))
    sizes = [variable.value.shape.num_elements() for variable in (*weights, *moving)]
    sizes += [1] * (2 + len(made.trainer.replica_step.traced.metrics))
    dtypes = [wire] * len(weights) + [tf.float32] * (len(sizes) - len(weights))
    buckets = gradients.plan_buckets(sizes, dtypes, made.plan.bucket_bytes)
    return Counter(
        [(dtypes[bucket[0]].name, sum(sizes[index] for index in bucket)) for bucket in buckets] + [("float32", 1)]
    )


def assert_fit_for_a_tpu(recipe: str, params: tuple[str, ...], num_replicas: int) -> None:
    sizes = (
        f"train.global_batch_size = {_EXAMPLES * num_replicas}",
        "train.eval_batch_size = None",
        f"train.bucket_bytes = {2**17}",
        "train.shard = 'none'",  # which sums more than gradients; its own test is below
    )
    resolved = made_up_tpu.resolve(recipe, [*params, *sizes], num_replicas)
    with made_up_tpu.strategy(num_replicas) as strategy:
        made = made_up_tpu.build(strategy, resolved)
        function = made_up_tpu.training(made, made_up_tpu.training_shapes(resolved))
    found = replicated.operations(function)

    assert replicated.faults(found) == []
    assert replicated.reductions(found) == planned(made)
    on_the_wire = {"float16", "float32"} if resolved.policy == "mixed_float16" else {"float32"}
    assert {dtype for dtype, _ in replicated.reductions(found)} == on_the_wire
    assert replicated.reductions(found).total() > 1, "one bucket alone tells nothing of how they are kept apart"
    assert replicated.loops_around(found) == {("While.body",)}, "straight in the loop over the steps"
    assert replicated.replicas(function) == num_replicas
    assert_variables_of_the_right_kind(made)


def assert_variables_of_the_right_kind(made) -> None:
    seeds = {variable.path: variable for variable in seed_states(made.model)}
    for name, variable in {**made.trainer.state.variables(), **seeds}.items():
        variable = variable if isinstance(variable, tf.Variable) else variable.value
        assert isinstance(variable, tf.distribute.DistributedValues), name
        assert type(variable).__name__ == "TPUDistributedVariable", name
        assert len(variable.values) == made.runtime.num_replicas, name
        # Each replica writes to its own copy; a copy that is read is never a sum over the replicas.
        assert variable.synchronization != tf.VariableSynchronization.ON_READ, name
        # Keras's own count of updates, which our optimizer writes past.
        expected = "ONLY_FIRST_REPLICA" if name.endswith("/iteration") else "NONE"
        assert variable.aggregation.name == expected, name


# One of each model, wire and way to compile by default; the next tests say it of the recipes for TPUs.
_KINDS = ("lm_cpu.gin", "resnet_gpu.gin", "transformer_big_wmt.gin")


@pytest.mark.parametrize(
    "recipe",
    repeated_but(_KINDS, RECIPES),
)
def test_the_step_of_every_recipe_is_one_program_with_one_reduction_a_bucket(recipe):
    assert_fit_for_a_tpu(recipe, fewer(recipe), 8)


def test_a_step_whose_optimizer_state_is_shared_out_is_one_program_without_conditionals_around_collectives():
    recipe = "lm_cpu.gin"
    params = [*fewer(recipe), "train.shard = 'optimizer'", "train.ema_decay = 0.9", "train.eval_batch_size = None"]
    resolved = made_up_tpu.resolve(recipe, [*params, f"train.global_batch_size = {_EXAMPLES * 8}"], 8)
    with made_up_tpu.strategy(8) as strategy:
        made = made_up_tpu.build(strategy, resolved)
        found = replicated.operations(made_up_tpu.training(made, made_up_tpu.training_shapes(resolved)))
    assert replicated.faults(found) == []
    assert not [one for one in found if set(one.path) & {"If.then_branch", "If.else_branch"}]
    sums = replicated.reductions(found)
    for _, part in made.trainer.optimizer.slot_shards:  # the gradient, and the parts put together
        assert sums["float32", part.whole.value.shape.num_elements()] >= 2, part.path


@pytest.mark.heavy
@pytest.mark.parametrize(
    "recipe",
    repeated_but(["resnet_tpu.gin"], [one for one in RECIPES if not one.startswith("experiment_")]),
)
def test_so_it_is_for_the_replicas_of_several_hosts(recipe):
    assert_fit_for_a_tpu(recipe, fewer(recipe), 32)


@pytest.mark.heavy
@pytest.mark.nightly
@pytest.mark.parametrize("recipe", _WHOLE)
def test_so_it_is_with_all_blocks_of_the_recipes_for_tpus(recipe):
    assert_fit_for_a_tpu(recipe, _WHOLE[recipe], 32)
