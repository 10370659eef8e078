"""A Keras optimizer's own settings and methods: what it was made to do besides its update.

Methods between gradients and weights are hooks of Keras's: `apply_gradients` calls `apply`, that `_clip_gradients`,
`_apply_weight_decay` and `_get_current_learning_rate`. What they do is right on any number of replicas where each calls
them for its own copy of the weights, with the gradients of the global batch. So Keras's `apply_gradients` is called as
a whole after the reduction, and what Keras itself does about replicas in between, to reduce and to update from outside
of a replica, is left out.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine.replaced import put

# Arguments of Keras's optimizers, and the bounds that `launcher.step.clipping.Clipping` has for them.
_BOUNDS = {"clipnorm": "layer_norm", "clipvalue": "value", "global_clipnorm": "global_norm"}
# Leans on Keras: optimizers decay by `_apply_weight_decay` and ask `_use_weight_decay` which weights. Noticed by
# tests/optimizers/test_keras_optimizers.py. Then: find the new names; such an optimizer is refused until then.
_DECAY = "_apply_weight_decay"
_EXCLUDED = "_exclude_from_weight_decay"
# What `Optimizer` calls in any case, and what no step does: there, gradients are reduced and have no loss scale.
_ALWAYS = re.compile(
    "__|build$|update_step$|variables$|get_config$|from_config$|assign|add_|exclude_|_use_weight_decay$"
)
_NEVER = re.compile("scale_loss$|_all_reduce_sum_gradients$|_distributed_tf_update_step$")
# Leans on Keras: these are what its class for TensorFlow does about replicas, and what it derives from does not (tried
# with Keras 3.8 to 3.15). Noticed by tests/optimizers/test_keras_optimizers.py. Then: see how it does it now; a
# KeyError names what is gone.
_OF_REPLICAS = (
    "_all_reduce_sum_gradients",
    "_backend_update_step",
    "_apply_weight_decay",
    "_overwrite_model_variables_with_average_value",
)


def clipping(optimizer: keras.optimizers.Optimizer) -> dict[str, float]:
    """The bound on gradients that the optimizer was made with, by its name in `launcher.step.clipping.Clipping`."""
    asked = {bound: getattr(optimizer, name, None) for name, bound in _BOUNDS.items()}
    return {bound: float(value) for bound, value in asked.items() if value and value > 0}


def built_for(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that a built optimizer updates, in its order; none of one that is not built."""
    # Leans on Keras: a built optimizer keeps them so. Noticed by tests/tasks/test_own_train_step.py. Then: find the new
    # name; until then optimizers that a program has built are refused.
    return list(getattr(optimizer, "_trainable_variables", ())) if optimizer.built else []


def slots(optimizer: keras.optimizers.Optimizer, count: int) -> dict[str, list[keras.Variable]]:
    """The slots of a built optimizer of so many variables, one for each of them, by the attribute that lists them.

    None stands for the slot of a variable whose gradient is its new value.
    """
    # Leans on Keras: they are in lists, in the order of the variables. Noticed by tests/step/test_table_rows.py. Then:
    # find where they are.
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and name not in ("_trainable_variables", "_variables")
        and len(value) == count
        and any(isinstance(one, keras.Variable) for one in value)
        and all(isinstance(one, keras.Variable | None) for one in value)
    }


def decays(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer was made with a weight decay."""
    return bool(optimizer.weight_decay or getattr(optimizer, "adam_weight_decay", None))


def left_to_it(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Settings that only the optimizer's own `apply_gradients` follows: an average, another kind of decay."""
    knows = type(optimizer) is getattr(keras.optimizers, "Muon", None) or not decays(optimizer)
    knows = knows or _private(type(optimizer), _DECAY) is _private(keras.optimizers.SGD, _DECAY)
    return ["use_ema"] * optimizer.use_ema + [_DECAY] * (not knows)


def weight_decays(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> list[float]:
    """The coefficient by which a built optimizer would decay each of its variables, times the learning rate; 0 for
    none.
    """
    if not decays(optimizer):
        return [0.0 for _ in variables]
    coefficients = [optimizer.weight_decay or 0.0 for _ in variables]
    if hasattr(optimizer, "adam_weight_decay"):
        # What has a velocity is updated by Adam, which has a coefficient of its own in later versions of Keras.
        by_adam = [velocity is not None for velocity in optimizer.adam_velocities]
        other = optimizer.adam_weight_decay or 0.0
        coefficients = [other if adam else own for adam, own in zip(by_adam, coefficients, strict=True)]
    is_decayed = _private(optimizer, "_use_weight_decay")
    return [
        coefficient if is_decayed(variable.value) else 0.0
        for coefficient, variable in zip(coefficients, variables, strict=True)
    ]


def rate(optimizer: keras.optimizers.Optimizer) -> Any:
    """The optimizer's present learning rate: a variable, a schedule or a function."""
    # Leans on Keras: it is `_learning_rate`, and `_exclude_from_weight_decay…` are what that method was told. Noticed
    # by tests/modes/test_fit_data.py. Then: find the new names; a schedule of one's own is refused until then.
    return getattr(optimizer, "_learning_rate", None)


def schedule(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """The schedule that the optimizer was made with, if it was one."""
    present = rate(optimizer)
    return present if isinstance(present, keras.optimizers.schedules.LearningRateSchedule) else None


def made_here(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> keras.optimizers.Optimizer:
    """The optimizer, or one like it where it was made outside of the current strategy's scope or built for others.

    That has the present learning rate, and no state of earlier steps. UsageError where its class cannot be made anew.
    """
    if optimizer.gradient_accumulation_steps:
        return optimizer  # it is refused
    scope = tf.distribute.get_strategy().extended
    is_for_others = optimizer.built and [*map(id, built_for(optimizer))] != [*map(id, weights)]
    if scope.variable_created_in_scope(optimizer.iterations.value) and not is_for_others:
        return optimizer
    own = schedule(optimizer)
    try:
        if own is not None:  # which may not say how it is made
            optimizer._learning_rate = 0.5
        config = optimizer.get_config()
        made = type(optimizer).from_config(config if own is None else {**config, "learning_rate": own})
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(
            f"optimizer {optimizer.name!r} was made before the function that builds the model was called, and cannot "
            f"be made anew from its get_config(): {error}; make it in that function"
        ) from error
    finally:
        if own is not None:
            optimizer._learning_rate = own
    if overridden(optimizer) != overridden(made):
        raise UsageError(
            f"optimizer {optimizer.name!r} was made before the function that builds the model was called, and given "
            "methods afterwards: make it in that function, or give them to its class"
        )
    vars(made).update({name: value for name, value in vars(optimizer).items() if name.startswith(_EXCLUDED)})
    return made


def _private(of: object, name: str) -> Callable[..., Any]:
    """A method of Keras's about weight decay that is not public (tried with Keras 3.15)."""
    method: Callable[..., Any] | None = getattr(of, name, None)
    if method is None:
        raise UsageError(
            f"Keras {keras.version()} does not tell which weights an optimizer decays (no {name}); leave weight_decay "
            "out of the Keras optimizer and give it to launcher.optimizers.Optimizer"
        )
    return method


def overridden(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Names of Keras's methods between a loss and weights that the optimizer, or a class outside of Keras, has anew.

    UsageError where one of them is never called.
    """
    kinds = type(optimizer).__mro__
    of_keras = [kind for kind in kinds if kind.__module__.startswith("keras.")]
    own = [optimizer, *(kind for kind in kinds if kind not in of_keras)]
    theirs, ours = ({name for owner in owners for name in vars(owner)} for owners in (of_keras, own))
    names = sorted(name for name in theirs & ours if not _ALWAYS.match(name))
    for name in filter(_NEVER.match, names):
        raise UsageError(
            f"{type(optimizer).__name__} {optimizer.name!r} has its own {name}, which no step calls: gradients are "
            "reduced, and have no loss scale; change them in apply_gradients or update_step"
        )
    return names


@contextlib.contextmanager
def alone(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Has the optimizer take gradients for reduced, and change this replica's copies alone, also inside `tf.cond`."""
    kind = keras.optimizers.Optimizer.__bases__[0]
    with contextlib.ExitStack() as undo:
        for name in _OF_REPLICAS:
            undo.callback(setattr, kind, name, vars(kind)[name])
            setattr(kind, name, getattr(super(kind, kind), name, lambda optimizer, pairs: pairs))
        for variable in optimizer.variables:
            if variable.value.aggregation != tf.VariableAggregation.NONE:
                put(undo, variable, "assign", functools.partial(_assign, variable))
        yield


def _assign(variable: keras.Variable, value: Any) -> None:
    """An assignment that, unlike Keras's, never calls into the cross-replica context."""
    tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=tf.cast(value, variable.dtype))
