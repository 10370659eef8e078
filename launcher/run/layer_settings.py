"""Settings of layers that a recipe binds: attention, batch normalisation, rematerialisation; and the lines of them.

`train.attention` is the form that attention is computed in; `train.batch_norm`, which examples batch normalisation
takes its statistics over; `train.rematerialize`, whether layers compute their activations again in the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from launcher.data.batch_spec import SpecifiesBatches
from launcher.errors import UsageError
from launcher.machine import accelerators, installation, xla
from launcher.machine.runtime_kinds import PJRT
from launcher.models.normalization import BatchNormalization
from launcher.models.transformer import jax_function
from launcher.models.transformer.attention import Attention
from launcher.models.transformer.attention_form import Form
from launcher.models.transformer.attention_kernel import unfit
from launcher.models.transformer.layers import FeedForward
from launcher.optimizers.weight_shards import bytes_of, shard_of
from launcher.reporting.units import bytes_text
from launcher.run.plan import RunPlan
from launcher.run.recipe import Recipe
from launcher.step.layers import group_size, layers_of
from launcher.tasks import text
from launcher.tasks.keras_private import attend_by_kernel, crop_to_known_size, synchronize_moments

BATCH_NORM = "train.batch_norm"

_AS_KERAS = "as Keras has it"
_BY_KERNEL = (
    "cuDNN's wherever keras.ops.dot_product_attention is called, as by {} of {} layers of Keras, except with a mask "
    "over odd lengths or values of another width"
)
_GLOBAL = (
    "batch normalisation takes its statistics over the global batch, as on one device; where the last batch of an "
    "epoch is short, over what it is filled up with, too"
)
_LOCAL = (
    "batch normalisation takes its statistics over each microbatch of each replica by itself, {} examples; another "
    "number of either trains another function"
)


def apply(model: keras.Model, plan: RunPlan, note: Callable[[str], None]) -> None:
    """Gives the layers of a built model the settings of the plan, for wherever the model is traced from now on.

    `note` is told what a person should know. UsageError where the recipe asks for what no layer of the model can do.
    """
    _set_attention(model, plan)
    for layer in layers_of(model, FeedForward):
        layer.joined = xla.is_compiling if plan.strategy.accelerator == "gpu" else bool
    _set_rematerialization(model, plan)
    _set_batch_norm(model, plan, note)
    for layer in layers_of(model, keras.layers.RandomCrop):
        crop_to_known_size(layer)


def describe(plan: RunPlan, model: keras.Model) -> dict[str, str]:
    """The lines of the plan, and of preflight's report, about attention, optimizer state and loss."""
    lines = _described_attention(plan, model)
    if held := _shared_state(plan, model):
        lines["optimizer state"] = held
    if shape := plan.recipe.task.logits_shape:
        lines["loss"] = text.describe_loss(plan.loss_chunks, model, plan.microbatch_size, shape)
    return lines


def is_global(recipe: Recipe) -> bool:
    """Whether the batch normalisation of Keras is to see the global batch, as on one device."""
    return recipe.batch_norm == "global" or (recipe.batch_norm == "auto" and recipe.task.statistics_over_global_batch)


def check_batch_norm(model: keras.Model, plan: RunPlan) -> None:
    """Raises UsageError, before anything is traced or written, for what a normalisation layer could not do.

    Groups have to fit a microbatch, and inside a loop or under XLA TensorFlow allows no collective.
    """
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful and plan.num_parts > 1:
            raise UsageError(
                f"layer {layer.name!r} is stateful: rows of a batch go on from those of the batch before, which works "
                f"on one replica with train.microbatches = 1 alone, not on {plan.num_parts} parts of a batch"
            )
        group = group_size(layer)
        if group and plan.microbatch_size % group:
            raise UsageError(
                f"layer {layer.name!r} takes its statistics over groups of {group} examples, which does not divide the "
                f"{plan.microbatch_size} of one microbatch on one replica; bind the layer's group size to a divisor "
                f"(e.g. resnet.norm_group_size = {plan.microbatch_size}), or change train.global_batch_size, "
                "train.microbatches or the number of replicas"
            )
        if getattr(layer, "synchronized", False) and (plan.microbatches > 1 or plan.jit_compile):
            grouped = ", or bind its group size, e.g. resnet.norm_group_size" if hasattr(layer, "group_size") else ""
            raise UsageError(
                f"layer {layer.name!r} takes its statistics over the global batch, by a collective inside the forward "
                f"pass, which works neither with train.microbatches > 1 (it is {plan.microbatches}) nor, but on TPUs, "
                f"with train.jit_compile (it is {plan.jit_compile}); {BATCH_NORM} = 'local' has each replica take them "
                f"over its own examples, as Keras does on several{grouped}"
            )


def rematerializing(model: keras.Model) -> list[Any]:
    """The layers that can compute their activations again: those with a boolean attribute `rematerialize`."""
    return _with_boolean(model, "rematerialize")


def _with_boolean(model: keras.Model, attribute: str) -> list[Any]:
    return [layer for layer in layers_of(model) if isinstance(getattr(layer, attribute, None), bool)]


def _set_attention(model: keras.Model, plan: RunPlan) -> None:
    requested, layers, of_keras = plan.recipe.attention, layers_of(model, Attention), _unfit_of_keras(model, plan)
    if not layers and requested != "auto" and (requested == "blocks" or not of_keras):
        raise UsageError(
            f"train.attention = {requested!r}: only for attention of models.transformer and, but for 'blocks', of "
            f"layers of Keras on GPUs with {PJRT.flag}; leave it out"
        )
    form = _form(plan)
    for layer in layers:
        layer.form = form
    attend_by_kernel("" in of_keras and form.wants_kernel(1, 1, 1))
    if requested == "kernel":
        _check_kernel(model, layers, plan, [] if layers or not all(of_keras) else of_keras[:1])


def _form(plan: RunPlan) -> Form:
    devices = plan.strategy
    proven = plan.is_one_program and devices.compute_capability in accelerators.ATTENTION_KERNEL
    return Form(
        requested=plan.recipe.attention, accelerator=devices.accelerator, proven=proven, compiling=xla.is_compiling
    )


def _unfit_of_keras(model: keras.Model, plan: RunPlan) -> list[str]:
    """Reasons why attention layers of Keras that could have a kernel here have none; "" if that is up to lengths."""
    return [
        unfit(
            "gpu",
            queries=0,
            keys=0,
            width=getattr(layer, "key_dim", None) or layer.head_dim,
            dtype=tf.as_dtype(layer.compute_dtype),
            rate=layer.dropout,
        )
        for layer in layers_of(model, (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention))
        if plan.is_one_program
    ]


def _check_kernel(model: keras.Model, layers: Sequence[Attention], plan: RunPlan, whys: list[str]) -> None:
    """Raises UsageError where no kernel could compute the attention of the training step."""
    asked = "train.attention = 'kernel'"
    # What knows no lengths, or not before its data is read, is asked about everything else.
    for lengths in _attended_lengths(model, plan).values() or [(None, None)]:
        queries, keys = (length or 0 for length in lengths)
        whys += [layer.unfit(queries, keys) for layer in layers]
    for why in filter(None, whys):
        raise UsageError(f"{asked}: {why}; leave the binding out for what suits the rows and the devices")
    if not plan.is_compiled:
        raise UsageError(f"{asked} needs train.jit_compile = True, for XLA alone can call the kernel")
    if plan.strategy.accelerator == "gpu":  # which needs no function of JAX
        capability = plan.strategy.compute_capability
        if capability is not None and capability < accelerators.BFLOAT16_CAPABILITY:
            had, needed = (".".join(map(str, version)) for version in (capability, accelerators.BFLOAT16_CAPABILITY))
            raise UsageError(f"{asked} needs GPUs of compute capability {needed} or more, and one here has {had}")
        return
    if why := jax_function.missing():
        raise UsageError(f"{asked}: {why}")
    installation.require_python_of_jax(asked)
    installation.required("jax", by=asked, extra="preflight", package="JAX")


def _attended_lengths(model: keras.Model, plan: RunPlan) -> dict[str, tuple[int | None, int | None]]:
    """Queries and keys of each kind of attention in a microbatch, as far as data and model tell."""
    if not isinstance(plan.data, SpecifiesBatches) or not hasattr(model, "attended_lengths"):
        return {}
    return dict(model.attended_lengths(plan.data.batch_spec(plan.microbatch_size)))


def _set_rematerialization(model: keras.Model, plan: RunPlan) -> None:
    if plan.rematerialize is None:
        return
    layers = rematerializing(model)
    if not layers:
        raise UsageError(
            f"train.rematerialize = {plan.recipe.rematerialize!r}: {model.name} has no layer that can compute its "
            "activations again, as the blocks of models.transformer can, and any layer with a boolean attribute "
            "`rematerialize` that its call() goes by; leave the binding out"
        )
    for layer in layers:
        layer.rematerialize = plan.rematerialize


def _set_batch_norm(model: keras.Model, plan: RunPlan, note: Callable[[str], None]) -> None:
    """Has layers take statistics over all replicas, or not; "auto" is about Keras's own in a compiled Keras model."""
    for layer in layers_of(model, BatchNormalization):
        layer.compiling = xla.is_compiling
    requested, layers = plan.recipe.batch_norm, _with_boolean(model, "synchronized")
    if requested == "auto":
        layers = [
            layer for layer in layers if is_global(plan.recipe) and isinstance(layer, keras.layers.BatchNormalization)
        ]
    elif not layers:
        raise UsageError(f"{BATCH_NORM} = {requested!r}: {model.name} has no batch normalisation; leave it out")
    for layer in layers:
        if requested == "local":
            layer.synchronized = False
        elif group := group_size(layer):
            raise UsageError(
                f"{BATCH_NORM} = 'global': layer {layer.name!r} has groups of {group}; leave the binding out"
            )
        elif plan.num_parts > 1:
            layer.synchronized = True
    for layer in layers_of(model, keras.layers.BatchNormalization):
        if layer.synchronized:
            synchronize_moments(layer)
    if not all(group_size(layer) for layer in layers):
        note(_LOCAL.format(plan.microbatch_size) if requested == "local" else _GLOBAL)


def _described_attention(plan: RunPlan, model: keras.Model) -> dict[str, str]:
    """The form for each kind of attention in a microbatch; no line without attention."""
    layer, form = next(iter(layers_of(model, Attention)), None), _form(plan)
    if layer is None:
        whys, told = _unfit_of_keras(model, plan), _AS_KERAS
        if form.wants_kernel(1, 1, 1) and "" in whys:
            told = _BY_KERNEL.format(whys.count(""), len(whys))
        return {"attention": f"{told} ({form.why(_AS_KERAS)})"} if whys else {}
    told, why = plan.recipe.attention, form.why()
    if attended := _attended_lengths(model, plan):
        forms: dict[str, list[str]] = {}
        for name, lengths in attended.items():
            forms.setdefault(layer.form_for(plan.microbatch_size, *lengths), []).append(name)
        told = "; ".join(form if len(forms) == 1 else f"{form} ({', '.join(of)})" for form, of in forms.items())
    return {"attention": f"{told} ({why})"}


def _shared_state(plan: RunPlan, model: keras.Model) -> str:
    """Shares of the state of the optimizer and the averages on each replica; "" where the recipe does not ask for it.

    Told of state of the size of a weight, of which Adam has two: what an optimizer has is known once it is built.
    """
    if plan.recipe.shard == "none":
        return ""
    replicas = plan.strategy.num_replicas
    if replicas == 1:
        return f"train.shard = {plan.recipe.shard!r}: one replica holds all of it"
    all_weights = plan.recipe.shard == "all"
    parts = [(one, shard_of(one, replicas)) for one in (model.weights if all_weights else model.trainable_variables)]
    whole = bytes_of([variable for variable, _ in parts])
    held = bytes_of([variable if part is None else part for variable, part in parts])
    divided = bytes_of([variable for variable, part in parts if part is not None])
    of, often = ("the weights, and every", "a pass") if all_weights else ("every", "a step")
    left = (
        f"; {bytes_text(whole - divided)} ({1 - divided / max(1, whole):.1%}) stay whole on each: vectors and the like"
    )
    return (
        f"sharded over {replicas} replicas: {bytes_text(held)} of {bytes_text(whole)} on each, for {of} slot and "
        f"average of the weights; {bytes_text(divided)} of weights are all-gathered {often}{left}"
    )
