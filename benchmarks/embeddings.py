"""Time of a step that looks few rows of a large table up, beside what a user would write instead. Prints JSON.

    python benchmarks/embeddings.py
    TORCH_PYTHON=/path/to/a/python/with/torch python benchmarks/embeddings.py --rows 1000000 --optimizers adagrad

512 examples of 8 ids, 64 columns, a dense layer, binary cross entropy. Peers, each in a process of its own, in turns:
Keras `fit`; a dozen lines of TensorFlow, which gather rows and scatter what Keras's formula changes in them; PyTorch's
`Embedding(sparse=True)` where TORCH_PYTHON is given; tf_keras' own sparse update where that is installed. Milliseconds
and processor milliseconds a step, after 10 steps, and the process's largest memory in MiB; Keras saves its model at the
end, too. Ratios are the other's milliseconds divided by Launcher's in the same round: above 1, Launcher is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import cpu_seconds, spread

BATCH, PLACES, WIDTH, WARM = 512, 8, 64, 10
_RATES = {"sgd": 0.1, "adagrad": 0.1, "adam": 0.01}
_SEES = "import sys; sys.path.insert(0, sys.argv.pop(1)); import embeddings; embeddings.run(*sys.argv[1:])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 2_000_000])
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adagrad"], choices=_RATES)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch_python = os.environ.get("TORCH_PYTHON")
    peers = {"launcher": sys.executable, "keras": sys.executable, "by_hand": sys.executable}
    peers |= {"torch": torch_python} if torch_python else {}
    peers |= {"tf_keras": sys.executable} if importlib.util.find_spec("tf_keras") else {}
    print(
        json.dumps(
            {
                f"{name}, {rows:,} rows": compare(peers, rows, name, options.steps, options.rounds)
                for name in options.optimizers
                for rows in options.rows
            },
            indent=2,
        )
    )


def compare(peers: dict[str, str], rows: int, optimizer: str, steps: int, rounds: int) -> dict[str, Any]:
    """Medians and ranges of each figure of a table of so many rows, and ratios to Launcher's in the same round."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for number in range(rounds):
        for name in sorted(peers, reverse=bool(number % 2)):
            if name == "by_hand" and optimizer == "adam":
                continue
            command = [peers[name], "-c", _SEES, str(Path(__file__).parent), name, str(rows), optimizer, str(steps)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            taken[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{optimizer} {rows} {number}: {name}: {taken[name][-1]}", file=sys.stderr, flush=True)
    return {
        name: {
            **{figure: spread([one[figure] for one in of_rounds]) for figure in of_rounds[0]},
            "ratio": spread([one["ms"] / own["ms"] for one, own in zip(of_rounds, taken["launcher"], strict=True)]),
        }
        for name, of_rounds in taken.items()
        if of_rounds
    }


def run(name: str, rows: str, optimizer: str, steps: str) -> None:
    """One measurement in this process, printed as JSON."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    seconds, processor = _PEERS[name](int(rows), optimizer, int(steps))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"ms": seconds / int(steps) * 1e3, "cpu_ms": processor / int(steps) * 1e3, "memory": memory}))


def _examples(rows: int, steps: int) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    ids = random.integers(0, rows, (BATCH * steps, PLACES)).astype("int32")
    return ids, random.integers(0, 2, (BATCH * steps, 1)).astype("float32")


def _compiled(keras: Any, rows: int, optimizer: str) -> Any:
    layers = keras.layers
    table = layers.Embedding(rows, WIDTH)
    model = keras.Sequential([keras.Input((PLACES,), dtype="int32"), table, layers.Flatten(), layers.Dense(1)])
    method = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam"}[optimizer]
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(getattr(keras.optimizers, method)(_RATES[optimizer]), loss)
    return model


def _by_fit(keras: Any) -> Callable[[int, str, int], tuple[float, float]]:
    def measured(rows: int, optimizer: str, steps: int) -> tuple[float, float]:
        model, (x, y) = _compiled(keras, rows, optimizer), _examples(rows, steps)
        model.fit(x[: BATCH * WARM], y[: BATCH * WARM], batch_size=BATCH, shuffle=False, verbose=0)
        begun, used = time.perf_counter(), cpu_seconds()
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        taken = time.perf_counter() - begun, cpu_seconds() - used
        with tempfile.TemporaryDirectory() as folder:
            model.save(os.path.join(folder, "model.keras"))
        return taken

    return measured


def _keras(*about: Any) -> tuple[float, float]:
    import keras

    return _by_fit(keras)(*about)


def _tf_keras(*about: Any) -> tuple[float, float]:
    import tf_keras

    return _by_fit(tf_keras)(*about)


def _launcher(rows: int, optimizer: str, steps: int) -> tuple[float, float]:
    import keras

    import launcher

    times: list[tuple[float, float]] = []

    class Times(keras.callbacks.Callback):
        """Notes when each epoch begins and ends."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            times.append((time.perf_counter(), cpu_seconds()))

        on_epoch_end = on_epoch_begin

    with tempfile.TemporaryDirectory() as folder:
        launcher.fit(
            lambda: _compiled(keras, rows, optimizer),
            _examples(rows, steps),
            batch_size=BATCH,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[Times()],
            model_dir=folder,
        )
    (begun, used), (ended, used_then) = times[-2:]
    return ended - begun, used_then - used


def _by_hand(rows: int, optimizer: str, steps: int) -> tuple[float, float]:
    import tensorflow as tf

    rate = _RATES[optimizer]
    table = tf.Variable(tf.random.uniform([rows, WIDTH], -0.05, 0.05))
    kernel, bias = tf.Variable(tf.random.normal([PLACES * WIDTH, 1], stddev=0.05)), tf.Variable([0.0])
    squares = {id(one): tf.Variable(tf.fill(one.shape, 0.1)) for one in (table, kernel, bias) if optimizer != "sgd"}

    @tf.function(reduce_retracing=True)
    def step(ids: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            logits = tf.reshape(tf.gather(table, ids), [-1, PLACES * WIDTH]) @ kernel + bias
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        gradient, *dense = tape.gradient(loss, [table, kernel, bias])
        found, numbers = tf.unique(gradient.indices)
        summed = tf.IndexedSlices(tf.math.unsorted_segment_sum(gradient.values, numbers, tf.size(found)), found)
        for one, by in zip((kernel, bias), dense, strict=True):
            if squares:
                by = by / tf.sqrt(squares[id(one)].assign_add(tf.square(by)) + 1e-7)
            one.assign_sub(rate * by)
        if squares:
            seen = squares[id(table)]
            seen.scatter_add(tf.IndexedSlices(tf.square(summed.values), found))
            summed = tf.IndexedSlices(summed.values / tf.sqrt(tf.gather(seen, found) + 1e-7), found)
        table.scatter_sub(tf.IndexedSlices(rate * summed.values, found))

    def batches(x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
        yield from tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True).prefetch(2)

    return _timed(step, batches, rows, steps)


def _torch(rows: int, optimizer: str, steps: int) -> tuple[float, float]:
    import torch

    table, line = torch.nn.Embedding(rows, WIDTH, sparse=True), torch.nn.Linear(PLACES * WIDTH, 1)
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
    rate = _RATES[optimizer]
    dense = {"adam": torch.optim.Adam}.get(optimizer, kinds[optimizer])
    methods = [kinds[optimizer](table.parameters(), lr=rate), dense(line.parameters(), lr=rate)]
    loss = torch.nn.BCEWithLogitsLoss()

    def step(ids: Any, labels: Any) -> None:
        for one in methods:
            one.zero_grad()
        loss(line(table(ids).flatten(1)), labels).backward()
        for one in methods:
            one.step()

    def batches(x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
        for begin in range(0, len(x), BATCH):
            yield torch.from_numpy(x[begin : begin + BATCH]), torch.from_numpy(y[begin : begin + BATCH])

    return _timed(step, batches, rows, steps)


def _timed(step: Callable[..., None], batches: Callable[..., Any], rows: int, steps: int) -> tuple[float, float]:
    x, y = _examples(rows, steps)
    for batch in batches(x[: BATCH * WARM], y[: BATCH * WARM]):
        step(*batch)
    begun, used = time.perf_counter(), cpu_seconds()
    for batch in batches(x, y):
        step(*batch)
    return time.perf_counter() - begun, cpu_seconds() - used


_PEERS: dict[str, Callable[[int, str, int], tuple[float, float]]] = {
    "launcher": _launcher,
    "keras": _keras,
    "tf_keras": _tf_keras,
    "by_hand": _by_hand,
    "torch": _torch,
}

if __name__ == "__main__":
    main()
