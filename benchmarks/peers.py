"""Time of a training step beside what a user would write or pick instead, turn by turn on one machine. Prints JSON.

    python benchmarks/peers.py --gin_file=resnet_cpu.gin --steps=10
    python benchmarks/peers.py --gin_file=mlp_fashion.gin --gin_param='mlp.units = 64' --steps=200 --jit_compile
    python benchmarks/peers.py --gin_file=resnet_cpu.gin --steps=10 --replicas=2

The peers train the model of the recipe on one batch of its data that stays in memory, in float32, with Keras's SGD with
momentum and no weight decay: a Python loop over a compiled step, a loop on the device, Keras `fit` with
`steps_per_execution` of 1 and of 10, and Orbit's StandardTrainer where it is installed
(`pip install --no-deps tf-models-official tf_keras`). On several replicas, all but Orbit: mirrored ones, one batch on
each, and gradients that Keras's optimizer sums. Only `fit` and Launcher count the accuracy. Ratios are the
other's time divided by Launcher's in the same round: above 1, Launcher is faster. Every round begins with another one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable

from measuring import cpu_seconds, spread

Take = Callable[[int], None]
"""Trains that many steps and waits for them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gin_file", default="resnet_cpu.gin")
    parser.add_argument("--gin_param", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of each in one round, a multiple of 10")
    parser.add_argument("--replicas", type=int, default=1, help="on this machine; the recipe's batch is divided")
    parser.add_argument("--jit_compile", action="store_true", help="XLA for all of them, on one replica")
    options = parser.parse_args()
    if options.jit_compile and options.replicas > 1:
        parser.error("--jit_compile: Keras's mirrored fit cannot be compiled by XLA")
    if options.steps < 10 or options.steps % 10:
        parser.error(f"--steps={options.steps}: must be a multiple of 10")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    print(json.dumps(compare(options), indent=2))


def compare(options: argparse.Namespace) -> dict[str, object]:
    """Medians and ranges of all rounds."""
    import in_process
    import keras
    import tensorflow as tf

    bindings = ["momentum.weight_decay = 0.0", f"train.jit_compile = {options.jit_compile}", *options.gin_param]
    session = in_process.build(options.gin_file, bindings, replicas=options.replicas)
    batch = tf.nest.map_structure(
        lambda of_replicas: session.runtime.strategy.experimental_local_results(of_replicas)[0],
        next(session.trainer.batches(session.plan.data)),
    )
    takes: dict[str, Take] = {
        "launcher": launcher(session, batch),
        "launcher, calls of 10": launcher(session, batch, 10),
    }
    peers = {"python loop": python_loop, "device loop": device_loop, "fit": fit, "fit, 10 an execution": fit_by_10}
    if importlib.util.find_spec("orbit") and options.replicas == 1:
        peers["orbit"] = orbit_trainer
    # One device is no strategy for them.
    strategy = session.runtime.strategy if options.replicas > 1 else tf.distribute.get_strategy()
    for name, peer in peers.items():
        with strategy.scope():
            takes[name] = peer(keras.models.clone_model(session.model), batch, options.jit_compile)
    for take in takes.values():
        take(10)
    wall: dict[str, list[float]] = {name: [] for name in takes}
    cpu: dict[str, list[float]] = {name: [] for name in takes}
    for number in range(options.rounds):
        names = list(takes)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            begun, used = time.perf_counter(), cpu_seconds()
            takes[name](options.steps)
            wall[name].append((time.perf_counter() - begun) / options.steps)
            cpu[name].append((cpu_seconds() - used) / options.steps)
    result: dict[str, object] = {
        "recipe": options.gin_file,
        "bindings": options.gin_param,
        "replicas": options.replicas,
        "jit_compile": options.jit_compile,
        "steps_a_round": options.steps,
        "rounds": options.rounds,
    }
    for name in takes:
        result[name] = {
            "milliseconds": spread([1000 * each for each in wall[name]]),
            "ratio": spread([theirs / ours for theirs, ours in zip(wall[name], wall["launcher"], strict=True)]),
            "cpu_ratio": spread([theirs / ours for theirs, ours in zip(cpu[name], cpu["launcher"], strict=True)]),
        }
    return result


def launcher(session, batch, steps_a_call: int | None = None) -> Take:
    """Launcher's own step and loop, as `launcher.main` runs it."""
    import tensorflow as tf

    def same(shard) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(batch).repeat()

    size = session.trainer.config.global_batch_size
    repeated = iter(session.runtime.batches(same, global_batch_size=size))

    def take(steps: int) -> None:
        for _ in range(steps // (steps_a_call or steps)):
            session.trainer.train(repeated, steps_a_call or steps)

    return take


def python_loop(model, batch, jit_compile: bool) -> Take:
    """One call of a compiled step for each step."""
    step, repeated = _bare_step(model, jit_compile), _pairs(batch)

    def take(steps: int) -> None:
        for _ in range(steps):
            loss = step(*next(repeated))
        loss.numpy()

    return take


def device_loop(model, batch, jit_compile: bool) -> Take:
    """One call for all steps, and nothing but the step in it."""
    import tensorflow as tf

    step, repeated = _bare_step(model, jit_compile), _pairs(batch)

    @tf.function
    def loop(pairs, steps):
        loss = tf.constant(0.0)
        for _ in tf.range(steps):
            loss = step(*next(pairs))
        return loss

    return lambda steps: loop(repeated, tf.constant(steps)).numpy()


def fit(model, batch, jit_compile: bool, steps_per_execution: int = 1) -> Take:
    """Keras's `fit`, with the accuracy as its metric."""
    import keras

    model.compile(
        optimizer=_sgd(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=jit_compile,
        steps_per_execution=steps_per_execution,
    )
    data = _global_dataset(batch)
    return lambda steps: model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, shuffle=False)


def fit_by_10(model, batch, jit_compile: bool) -> Take:
    """The same, ten steps an execution."""
    return fit(model, batch, jit_compile, 10)


def orbit_trainer(model, batch, jit_compile: bool) -> Take:
    """Orbit's StandardTrainer with its loop on the device."""
    import orbit
    import tensorflow as tf

    step = _bare_step(model, jit_compile)

    class Trainer(orbit.StandardTrainer):
        def train_step(self, iterator):
            step(*next(iterator))

    trainer = Trainer(_dataset(batch), options=orbit.StandardTrainerOptions(use_tf_while_loop=True))

    def take(steps: int) -> None:
        trainer.train(tf.constant(steps))
        model.weights[0].numpy()

    return take


def _bare_step(model, jit_compile: bool):
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    optimizer = _sgd()
    optimizer.build(model.trainable_variables)

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
        # Which sums the gradients of all replicas.
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function(jit_compile=jit_compile)
    def step(images, labels):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels)), axis=None)

    return step


def _sgd():
    import keras

    return keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True)


def _dataset(batch):
    import tensorflow as tf

    return tf.data.Dataset.from_tensors((batch["image"], batch["label"])).repeat()


def _global_dataset(batch):
    """A batch for all replicas, which Keras's `fit` divides."""
    import tensorflow as tf

    count = tf.distribute.get_strategy().num_replicas_in_sync
    whole = [tf.concat([batch[name]] * count, axis=0) for name in ("image", "label")]
    return tf.data.Dataset.from_tensors(tuple(whole)).repeat()


def _pairs(batch):
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        return iter(_dataset(batch))
    return iter(strategy.distribute_datasets_from_function(lambda _: _dataset(batch)))


if __name__ == "__main__":
    main()
