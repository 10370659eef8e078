"""Runs small enough to be computed a second time in NumPy: a task of given batches, on any topology of this process."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher import optimizers
from launcher.data.pipeline import Shard
from launcher.run import session
from launcher.run.loading import Machine
from launcher.run.programs import FitCall
from launcher.runtime.tensorflow import TfRuntime
from launcher.step import layer_policies

Batch = dict[str, tf.Tensor]


class GivenBatches:
    """Data that consists of the global batches it is given, in their order, for training and for evaluation.

    Args:
      arrays: key to array [steps, global batch, ...].
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays
        self.steps, self.global_batch_size = next(iter(arrays.values())).shape[:2]
        self.num_train_examples = self.num_eval_examples = self.steps * self.global_batch_size

    def check(self) -> None:
        """Nothing to prepare."""

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        size = shard.per_replica_batch_size
        first = shard.first_replica * size

        def rows(array: np.ndarray) -> np.ndarray:
            mine = array[shard.start_step :, first : first + shard.per_replica_batch_size * shard.local_replicas]
            return mine.reshape(-1, size, *array.shape[2:])

        return tf.data.Dataset.from_tensor_slices({key: rows(array) for key, array in self._arrays.items()})

    eval_batches = train_batches


class GivenTask:
    """A task put together from functions; `loss(model, batch, training)` as in `launcher.tasks.base.Task`."""

    def __init__(self, arrays: Mapping[str, np.ndarray], model: Callable[[], keras.Model], loss: Callable[..., Any]):
        self._data = GivenBatches(arrays)
        self.model = model
        self.loss = loss

    def data(self) -> GivenBatches:
        return self._data


def descent(learning_rate: float = 1.0, momentum: float = 0.0) -> optimizers.Optimizer:
    return optimizers.momentum(learning_rate=learning_rate, momentum=momentum)


def build(
    task: Any,
    replicas: int | None = 1,
    microbatches: int = 1,
    *,
    environ: Mapping[str, str] = types.MappingProxyType({}),
    on: tf.distribute.Strategy | None = None,
    **recipe: Any,
) -> session.Session:
    """A session for `task`, on logical CPUs of this process unless said otherwise; it trains the batches of its data.

    Args:
      environ: may name a cluster, of which this process is then a worker (with `replicas` None).
      on: a strategy to use instead of the one that the launcher would make.
      recipe: what else a recipe would bind to `train`; float32 and plain gradient descent are the defaults.
    """
    data = task.data()
    settings = {
        "precision": "float32",
        "optimizer": descent,
        "steps": data.steps,
        "global_batch_size": data.global_batch_size,
        **recipe,
    }
    call = FitCall(settings={"task": task, "microbatches": microbatches, **settings})
    resolved = Machine(environ=environ, replicas=replicas).plan_of(call.recipe())
    return session.build_on(TfRuntime(on) if on else session.tf_runtime(resolved), resolved)


def train(made: session.Session, steps: int | None = None):
    """Trains on the task's own batches to their end; returns the records of the steps."""
    data = made.plan.data
    return made.trainer.train(made.trainer.batches(data), data.steps if steps is None else steps)


def copies(variable: keras.Variable | tf.Variable) -> list[np.ndarray]:
    """Every local replica's copy of a variable."""
    value = variable if isinstance(variable, tf.Variable) else variable.value
    return [copy.numpy() for copy in getattr(value, "values", [value])]


def state_copies(made: session.Session) -> dict[str, list[np.ndarray]]:
    """Every local replica's copy of everything a checkpoint holds."""
    return {name: copies(variable) for name, variable in made.trainer.state.variables().items()}


def assert_replicas_equal(made: session.Session) -> None:
    for name, values in state_copies(made).items():
        for value in values[1:]:
            np.testing.assert_array_equal(value, values[0], err_msg=name)


def linear_model(features: int, **dense: Any) -> keras.Model:
    """One weight a feature, all zero at first, so that a step of gradient descent shows the gradient."""
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="line", **dense),
        ]
    )


def negative_sum(model: keras.Model, batch: Batch, training: bool):
    """Loss -sum(weight * output): the gradient of a linear model is minus its weighted inputs."""
    outputs = tf.cast(model(batch["x"], training=training), tf.float32)[:, 0]
    return -tf.reduce_sum(outputs * batch["weight"]), tf.reduce_sum(batch["weight"]), {}


def linear_batches(rows: Sequence[Sequence[Sequence[float]]]) -> dict[str, np.ndarray]:
    """Batches for `negative_sum` from inputs [steps][examples][features], all of weight 1."""
    x = np.asarray(rows, np.float32)
    return {"x": x, "weight": np.ones(x.shape[:2], np.float32)}


# Row e of a zero table times a dropped vector of ones: by its gradient, the row gathers the masks of example e.


def dropout_task(steps: int, batch: int, places: int, layers: Sequence[str] = ("one", "two")) -> GivenTask:
    """A task whose weights after a step of gradient descent are what its dropout layers kept; see `dropout_masks`."""

    def model() -> keras.Model:
        ones, row = keras.Input((places,)), keras.Input((), dtype="int32")
        dropped = [keras.layers.Dropout(0.5, name=f"drop_{name}")(ones) for name in layers]
        rows = [
            keras.layers.Embedding(batch, places, embeddings_initializer="zeros", name=f"masks_{name}")(row)
            for name in layers
        ]
        return keras.Model([ones, row], [keras.layers.Multiply()(pair) for pair in zip(dropped, rows, strict=True)])

    def loss(model, batch, training):
        outputs = model([batch["ones"], batch["row"]], training=training)
        return -tf.reduce_sum(outputs), tf.reduce_sum(batch["weight"]), {}

    arrays = {
        "ones": np.ones((steps, batch, places), np.float32),
        "row": np.tile(np.arange(batch, dtype=np.int32), (steps, 1)),
        "weight": np.ones((steps, batch), np.float32),
    }
    return GivenTask(arrays, model, loss)


def dropout_masks(made: session.Session, steps: int) -> np.ndarray:
    """Trains a `dropout_task`; returns its masks [step, layer, example, place], 2 where kept and 0 where dropped."""
    batches = made.trainer.batches(made.plan.data)
    tables = [np.array([weight.numpy() for weight in made.model.weights])]
    for _ in range(steps):
        made.trainer.train(batches, 1)
        tables.append(np.array([weight.numpy() for weight in made.model.weights]))
    return np.diff(tables, axis=0) * made.plan.recipe.global_batch_size


def policies_of(model):
    """The dtype policy of every layer that computes in floating point, by its path."""
    return {found.path: found.layer.dtype_policy.name for found in layer_policies._layers(model)}
