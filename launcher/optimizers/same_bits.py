"""Updates of whole float32 weights by Keras's own SGD and Adam: to the same bits, in fewer operations.

Keras makes what all weights have in common anew for each. In a graph, each operation costs a quarter of a millisecond.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from launcher.optimizers import own_settings

Update = Callable[[int, tf.Variable, tf.Tensor, tf.Tensor], object]
"""Updates a weight, by its place among the optimizer's, with its gradient, at a rate; in replica context."""


def update_of(optimizer: keras.optimizers.Optimizer, count: int) -> Update | None:
    """The update of a built optimizer of so many weights; None where its own `update_step` is to be called."""
    kind = type(optimizer)  # not a subclass, which may do more
    if kind is keras.optimizers.SGD and optimizer.momentum:
        # Leans on TensorFlow, Keras: this operation computes the bits of SGD.update_step. Noticed by
        # tests/optimizers/test_optimizers.py. Then: call `update_step`, in eight passes.
        return lambda index, weight, gradient, rate: tf.raw_ops.ResourceApplyKerasMomentum(
            var=weight.handle,
            accum=optimizer.momentums[index].value.handle,
            lr=rate,
            grad=gradient,
            momentum=tf.constant(optimizer.momentum, tf.float32),
            use_nesterov=optimizer.nesterov,
        )
    if kind not in (keras.optimizers.Adam, keras.optimizers.AdamW) or optimizer.amsgrad:
        return None
    # Leans on Keras: these are the operations of Adam.update_step, in their order. Noticed by
    # tests/optimizers/test_optimizers.py. Then: call `update_step`.
    slots, step = (
        own_settings.slots(optimizer, count),
        tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, "float32"),
    )
    betas, epsilon = (optimizer.beta_1, optimizer.beta_2), tf.constant(optimizer.epsilon)
    shares = [tf.constant(1 - beta) for beta in betas]
    first, second = (1 - tf.pow(tf.constant(beta), step) for beta in betas)
    root = tf.sqrt(second)

    ops, read = tf.raw_ops, lambda handle: tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    def update(index: int, weight: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
        m, v = (slots[name][index].value.handle for name in ("_momentums", "_velocities"))
        ops.AssignAddVariableOp(resource=m, value=(gradient - read(m)) * shares[0])
        ops.AssignAddVariableOp(resource=v, value=(tf.square(gradient) - read(v)) * shares[1])
        change = read(m) * (rate * root / first) / (tf.sqrt(read(v)) + epsilon)
        ops.AssignSubVariableOp(resource=weight.handle, value=change)

    return update
