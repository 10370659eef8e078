"""A table of which a batch looks few rows up trains by those rows as it does by dense gradients."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from small_run import GivenTask, assert_replicas_equal, build, state_copies, train

from launcher import optimizers
from launcher.step import rows
from launcher.step.clipping import Clipping
from launcher.step.precision import DynamicLossScale
from launcher.tasks import lookups

pytestmark = pytest.mark.slow

STEPS, BATCH, TABLE, PLACES = 4, 8, 4096, 3
KERAS_OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.5), "adagrad": lambda: keras.optimizers.Adagrad(0.5)}


def optimizer(name: str, **arguments) -> functools.partial:
    return functools.partial(lambda: optimizers.Optimizer(KERAS_OPTIMIZERS[name](), **arguments))


def batches(overflow: bool = False) -> dict[str, np.ndarray]:
    source = np.random.default_rng(0)
    ids = source.integers(0, TABLE, (STEPS, BATCH, PLACES)).astype(np.int32)
    ids[:, ::2] = ids[:, :1]  # rows of the table that several examples look up, on each replica
    ids[:, 1, 0] = -1  # the last row, as Keras counts
    weight = np.ones((STEPS, BATCH), np.float32)
    weight[-1, -3:] = 0.0
    by = source.uniform(0.1, 0.2, (STEPS, BATCH)).astype(np.float32)
    if overflow:
        by[1, 0] = 1e30
    return {"ids": ids, "by": by, "weight": weight}


class Gathered(keras.layers.Embedding):
    """A layer of one's own, by TensorFlow's function."""

    def call(self, ids):
        return tf.gather(self.embeddings, ids % TABLE)


def network(kind: str = "plain") -> keras.Model:
    ids = keras.Input((PLACES,), dtype="int32")
    initial = keras.initializers.RandomUniform(-1, 1, seed=1)
    arguments = {"embeddings_constraint": "unit_norm"} if kind == "constrained" else {}
    make = Gathered if kind == "gathered" else keras.layers.Embedding
    table = make(TABLE, 4, embeddings_initializer=initial, name="table", **arguments)
    looked_up = table(ids)
    small = keras.layers.Embedding(16, 4, embeddings_initializer=initial, name="small")(ids % 16)
    summed = keras.layers.Flatten()(looked_up + small)
    if kind == "twice":
        summed += keras.layers.Flatten()(table(ids[:, ::-1]))
    outputs = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2), name="out")(summed)
    return keras.Model(ids, outputs)


def loss(model, batch, training):
    outputs = tf.cast(model(batch["ids"], training=training), tf.float32)[:, 0]
    losses = tf.square(outputs - 1.0) * batch["by"]
    return tf.reduce_sum(losses * batch["weight"]), tf.reduce_sum(batch["weight"]), {}


def trained(replicas: int, microbatches: int, by_rows: bool, monkeypatch, *, kind="plain", overflow=False, **recipe):
    """The session, and the records of its steps; `by_rows` False for dense gradients."""
    with monkeypatch.context() as patched:
        if not by_rows:
            patched.setattr(rows, "_SPARSE", 10**9)
        made = build(
            GivenTask(batches(overflow), functools.partial(network, kind), loss), replicas, microbatches, **recipe
        )
        records = train(made)
    tables = made.trainer.replica_step.traced.tables
    assert [made.model.trainable_variables[place].path for place in tables] == (["table/embeddings"] if by_rows else [])
    assert_replicas_equal(made)
    return made, records


CASES = {
    "sgd": {"optimizer": optimizer("sgd")},
    "adagrad": {"optimizer": optimizer("adagrad")},
    "twice": {"optimizer": optimizer("adagrad"), "kind": "twice"},
    "gathered": {"optimizer": optimizer("sgd"), "kind": "gathered"},
    "average": {"optimizer": optimizer("sgd"), "ema_decay": 0.9},
    "global_norm": {"optimizer": optimizer("sgd"), "clipping": Clipping(global_norm=0.1)},
    "layer_norm": {"optimizer": optimizer("adagrad"), "clipping": Clipping(layer_norm=0.1)},
    "value": {"optimizer": optimizer("adagrad"), "clipping": Clipping(value=0.01)},
    "multiplied": {"optimizer": optimizer("sgd"), "rate_multipliers": {"table": 0.1}},
    "jit": {"optimizer": optimizer("adagrad"), "jit_compile": True},
    "bfloat16": {"optimizer": optimizer("adagrad"), "precision": "mixed_bfloat16"},
    "overflow": {
        "optimizer": optimizer("adagrad"),
        "precision": "mixed_float16",
        "loss_scale": DynamicLossScale(initial_scale=8.0),
        "overflow": True,
    },
}
CASES["overflow and more"] = {
    name: value for case in ("average", "global_norm", "multiplied", "overflow") for name, value in CASES[case].items()
}
TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2)]  # replicas, microbatches
BY_DEFAULT = [("adagrad", (2, 2)), ("overflow and more", (2, 1)), ("twice", (1, 2)), ("layer_norm", (2, 1))]
BY_DEFAULT += [("value", (1, 1)), ("jit", (1, 1))]


@pytest.mark.parametrize(
    ("case", "topology"), repeated_but(BY_DEFAULT, [(case, topology) for case in CASES for topology in TOPOLOGIES])
)
def test_rows_train_as_dense_gradients_do(monkeypatch, case, topology):
    made, records = trained(*topology, True, monkeypatch, **CASES[case])
    dense, expected = trained(*topology, False, monkeypatch, **CASES[case])
    tolerance = {"bfloat16": 1e-2, "overflow": 2e-3, "overflow and more": 2e-3}.get(case, 1e-5)
    np.testing.assert_allclose(records.loss, expected.loss, rtol=tolerance)
    np.testing.assert_allclose(records.gradient_norm, expected.gradient_norm, rtol=tolerance)
    np.testing.assert_array_equal(records.finite, expected.finite)
    np.testing.assert_array_equal(records.loss_scale, expected.loss_scale)
    assert records.finite.tolist() == [1, 0, 1, 1] if "overflow" in case else records.finite.all()
    for name, values in state_copies(dense).items():
        np.testing.assert_allclose(state_copies(made)[name][0], values[0], atol=tolerance, err_msg=name)


@pytest.mark.parametrize("layer", [Gathered, keras.layers.Embedding])
def test_of_its_own_copy_of_a_table_a_replica_reads_the_rows_alone(layer):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        table = layer(TABLE, 4)
        table.build()

    def read(ids):
        with lookups.by_rows():
            return strategy.run(table, (ids,))

    graph = tf.function(read).get_concrete_function(tf.TensorSpec([3], tf.int32)).graph.as_graph_def()
    operations = {node.op for one in graph.library.function for node in one.node_def} | {one.op for one in graph.node}
    assert operations & {"ResourceGather", "ReadVariableOp", "GatherV2"} == {"ResourceGather"}


DENSE = {
    "momentum": {"optimizer": lambda: optimizers.momentum(learning_rate=0.1)},
    "adam": {"optimizer": lambda: optimizers.Optimizer(keras.optimizers.Adam(0.1))},
    "decay": {"optimizer": optimizer("sgd", weight_decay=0.1, decoupled=True)},
    "constraint": {"optimizer": optimizer("sgd"), "kind": "constrained"},
    "adaptive": {"optimizer": optimizer("sgd"), "clipping": Clipping(adaptive=0.1)},
    "shard": {"optimizer": optimizer("adagrad"), "shard": "optimizer"},
}


@pytest.mark.parametrize("case", DENSE)
def test_what_moves_other_rows_keeps_dense_gradients(case):
    recipe = {**DENSE[case]}
    task = GivenTask(batches(), functools.partial(network, recipe.pop("kind", "plain")), loss)
    made = build(task, 2 if "shard" in recipe else 1, **recipe)
    train(made, 1)
    assert list(made.trainer.replica_step.traced.tables) == []


@pytest.mark.parametrize("name", repeated_but(["momentum", "decay"], ["adam", "momentum", "decay"]))
def test_lazy_embeddings_leave_the_rows_of_other_batches_alone(name):
    make = {
        "adam": lambda: optimizers.Optimizer(keras.optimizers.Adam(0.1)),
        "momentum": lambda: optimizers.momentum(learning_rate=0.1),
        "decay": lambda: optimizers.Optimizer(keras.optimizers.AdamW(0.1, weight_decay=0.1)),
    }[name]
    values = {}
    for lazy in (True, False):
        made = build(GivenTask(batches(), network, loss), 2, optimizer=make, lazy_embeddings=lazy)
        begun = {name: copies[0] for name, copies in state_copies(made).items()}
        table = next(name for name, value in begun.items() if value.shape == (TABLE, 4))
        given = made.trainer.batches(made.plan.data)
        made.trainer.train(given, 1)
        first = {name: copies[0] for name, copies in state_copies(made).items()}
        made.trainer.train(given, 1)
        assert_replicas_equal(made)
        values[lazy] = begun, first, {name: copies[0] for name, copies in state_copies(made).items()}
    of_first, of_second = (np.unique(batches()["ids"][step] % TABLE) for step in (0, 1))
    others, gone = np.setdiff1d(np.arange(TABLE), of_first), np.setdiff1d(of_first, of_second)
    begun, first, second = values[True]
    tables = [name for name, value in begun.items() if value.shape == (TABLE, 4)]
    assert len(tables) == {"momentum": 2}.get(name, 3)
    for one in tables:
        np.testing.assert_array_equal(first[one][others], begun[one][others])
        np.testing.assert_allclose(first[one][of_first], values[False][1][one][of_first], atol=1e-6)
        np.testing.assert_array_equal(second[one][gone], first[one][gone])
    assert not np.array_equal(values[False][2][table][gone], values[False][1][table][gone])
    for name, value in values[False][1].items():
        if name not in tables:
            np.testing.assert_allclose(first[name], value, atol=1e-6, err_msg=name)


def test_the_plan_tells_of_large_tables_alone_that_all_rows_move():
    lines = {}
    for rows_of_table in (1000, 2**18):
        model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(rows_of_table, 16)])
        for by_rows in ([], [0]):
            told = rows.describe(model, {0: 64}, by_rows, "float16", 3)
            lines[rows_of_table, bool(by_rows)] = " ".join(told.values())
    assert lines[1000, False] == "" and "all are updated" in lines[2**18, False]
    # Each of 64 rows, 16 numbers of 2 bytes and an id of 4, goes to two others.
    assert all(f"{64 * 36 * 2 / 2**20:.2f} MiB sent" in lines[size, True] for size in (1000, 2**18))
