"""What every runtime promises, seen through a small session: trained, evaluated, asked, read, written and averaged.

python runtime_contract.py REPLICAS OUT.npz    on JAX's devices
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import small_run
import tensorflow as tf

from launcher import optimizers
from launcher.machine.runtime_kinds import PJRT, TENSORFLOW, RuntimeKind
from launcher.run import session
from launcher.run.loading import Machine
from launcher.run.programs import FitCall
from launcher.runtime import Runtime

STEPS, BATCH, WIDTH = 3, 8, 5
NUMBERS = np.random.default_rng(0)
ARRAYS = {
    "x": NUMBERS.normal(size=(STEPS, BATCH, WIDTH)).astype("float32"),
    "y": NUMBERS.normal(size=(STEPS, BATCH, 1)).astype("float32"),
    "weight": np.ones((STEPS, BATCH), "float32"),
}


class Line(small_run.GivenTask):
    """y from x by two dense layers, squared errors."""

    def __init__(self) -> None:
        super().__init__(ARRAYS, self._model, self._loss)

    def _model(self) -> keras.Model:
        layers = [keras.Input((WIDTH,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        return keras.Sequential(layers)

    def _loss(self, model: keras.Model, batch: dict[str, tf.Tensor], training: bool) -> Any:
        errors = tf.reduce_sum(tf.square(model(batch["x"], training=training) - batch["y"]), axis=1) * batch["weight"]
        return tf.reduce_sum(errors), tf.reduce_sum(batch["weight"]), {"error": tf.reduce_sum(errors)}


def _optimizer() -> optimizers.Optimizer:
    return optimizers.adamw(learning_rate=0.1, weight_decay=0.1)


def plan(replicas: int, runtime: RuntimeKind = TENSORFLOW) -> Any:
    settings = {"precision": "float32", "optimizer": _optimizer, "ema_decay": 0.5}
    call = FitCall(settings={"task": Line(), "steps": STEPS, "global_batch_size": BATCH, "microbatches": 1, **settings})
    return Machine(environ={}, replicas=replicas, runtime=runtime).plan_of(call.recipe())


def seen(made: session.Session) -> dict[str, np.ndarray]:
    """What came of training and evaluating on a session's runtime."""
    runtime, trainer, state = made.runtime, made.trainer, made.trainer.state
    batches = trainer.batches(made.plan.data)
    assert trainer.trace(batches) == ("error",)
    begun = state.snapshot()
    first, rest = trainer.train(batches, 1), trainer.train(batches, STEPS - 1)
    trained = state.snapshot()
    kept = {name: value.copy() for name, value in trained.items()}
    found = {"loss": np.concatenate([first.loss, rest.loss]), **trained}
    assert trainer.step == STEPS and (first.input_wait_seconds >= 0).all()

    made.evaluator.needs_variables(last=True)
    runtime.state.take()  # where it has devices of its own; `read` answers all the same
    assert_same(state.snapshot(), trained)
    with state.averaged():
        found["averaged"] = np.array(made.evaluator.evaluate()["loss"])
    found["evaluated"] = np.array(made.evaluator.evaluate()["loss"])
    assert_same(state.snapshot(), trained)

    rows = np.arange(2 * BATCH * WIDTH, dtype=np.float32).reshape(2 * BATCH, WIDTH)
    answer = runtime.rows(lambda batch: {"row": batch["x"][:, 0], "said": made.model(batch["x"])}).begin()
    answered = answer(runtime.batch_of({"x": rows}))
    np.testing.assert_array_equal(answered["row"], rows[:, 0])  # of all replicas, in their order
    found["answered"] = answered["said"]

    runtime.state.bring_home()
    kernel = made.model.trainable_variables[0]
    np.testing.assert_array_equal(kernel.numpy(), runtime.state.read(kernel))
    runtime.state.write(kernel, 2 * kernel.numpy())
    np.testing.assert_array_equal(runtime.state.read(kernel), kernel.numpy())
    state.restore(begun)
    assert_same(state.snapshot(), begun)
    again = trainer.train(trainer.batches(made.plan.data), STEPS)
    np.testing.assert_array_equal(again.loss, found["loss"])
    assert_same(state.snapshot(), trained)
    assert_same(trained, kept)  # what was read is as it was, whatever came of the variables
    assert runtime.workers.any(True) and not runtime.workers.any(False)
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def on(runtime: Runtime, replicas: int = 1) -> dict[str, np.ndarray]:
    return seen(session.build_on(runtime, plan(replicas)))


if __name__ == "__main__":
    np.savez(sys.argv[2], **seen(session.build(plan(int(sys.argv[1]), PJRT))))
