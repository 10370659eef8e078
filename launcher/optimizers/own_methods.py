"""A Keras optimizer with methods of its own between gradients and weights: Keras's `apply_gradients` as a whole.

Such methods are hooks of Keras's: `apply_gradients` calls `apply`, that `_clip_gradients`, `_apply_weight_decay` and
`_get_current_learning_rate`. What they do is right on any number of replicas where each calls them for its own copy of
the weights, with the gradients of the global batch. So they are called after the reduction, and what Keras itself does
about replicas in between, to reduce and to update from outside of a replica, is left out.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from launcher.errors import UsageError

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


def overridden(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Names of Keras's methods between a loss and weights that the optimizer, or a class outside of Keras, has anew.

    UsageError where one of them is never called.
    """
    kinds = type(optimizer).__mro__
    of_keras = [one for one in kinds if one.__module__.startswith("keras.")]
    own = [optimizer, *(one for one in kinds if one not in of_keras)]
    theirs, ours = ({name for one in some for name in vars(one)} for some in (of_keras, own))
    found = sorted(name for name in theirs & ours if not _ALWAYS.match(name))
    for name in filter(_NEVER.match, found):
        raise UsageError(
            f"{type(optimizer).__name__} {optimizer.name!r} has its own {name}, which no step calls: gradients are "
            "reduced, and have no loss scale; change them in apply_gradients or update_step"
        )
    return found


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
                variable.assign = functools.partial(_assign, variable)
                undo.callback(delattr, variable, "assign")
        yield


def _assign(variable: keras.Variable, value: Any) -> None:
    """As Keras's, which would call into the cross-replica context where a variable has an aggregation."""
    tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=tf.cast(value, variable.dtype))
