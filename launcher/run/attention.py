"""`train.attention`: which form the model's attention is computed in, and what the plan says of it."""

from __future__ import annotations

from collections.abc import Iterator

import keras

from launcher.data.batch_spec import SpecifiesBatches
from launcher.errors import UsageError
from launcher.machine import xla
from launcher.run.plan import RunPlan
from launcher.step.layers import walk
from models.transformer.attention import Attention
from models.transformer.attention_form import Form

BINDING = "train.attention"


def apply(model: keras.Model, requested: str, accelerator: str) -> None:
    """Has the model's attention computed in a form, wherever it is traced from now on.

    Args:
      model: built.
      requested: one of `attention_form.FORMS`.
      accelerator: "cpu", "gpu" or "tpu".

    Raises:
      UsageError: the model has no attention that could be computed so, and that is asked for.
    """
    layers = list(_layers(model))
    if not layers and requested != "auto":
        raise UsageError(
            f"{BINDING} = {requested!r}: {model.name} has no attention layer of models.transformer, which alone can be "
            "computed in more than one form; leave the binding out"
        )
    for layer in layers:
        layer.form = Form(requested=requested, accelerator=accelerator, compiling=xla.is_compiling)


def describe(plan: RunPlan, model: keras.Model) -> dict[str, str]:
    """The line of the plan about it: the form for each kind of attention in a microbatch; none without attention."""
    layer = next(_layers(model), None)
    if layer is None:
        return {}
    told, why = plan.recipe.attention, layer.form.why
    if isinstance(plan.data, SpecifiesBatches) and hasattr(model, "attended_lengths"):
        spec = plan.data.batch_spec(plan.microbatch_size)
        forms: dict[str, list[str]] = {}
        for name, lengths in model.attended_lengths(spec).items():
            forms.setdefault(layer.form_for(plan.microbatch_size, *lengths), []).append(name)
        told = "; ".join(form if len(forms) == 1 else f"{form} ({', '.join(of)})" for form, of in forms.items())
    return {"attention": f"{told} ({why})"}


def _layers(model: keras.Model) -> Iterator[Attention]:
    return (layer for layer, *_ in walk(model) if isinstance(layer, Attention))
