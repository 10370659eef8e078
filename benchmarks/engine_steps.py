"""Time of a training step on both engines beside JAX by hand, turn by turn in one process. Prints JSON.

    python benchmarks/engine_steps.py
    python benchmarks/engine_steps.py --devices=2
    python benchmarks/engine_steps.py --gin_file=resnet_cpu.gin --gin_param='resnet.norm_group_size = 16' --steps=20

Without --gin_file the recipe is an MLP of two layers of 64 units on scikit-learn's digits, 256 a step, of which there
is a step in JAX by hand: one jit with donated state, momentum, cosine, loss, accuracy and gradient norm, on batches of
NumPy that go to the devices by one `device_put`, whose numbers are read after the last step, as Launcher's are. It
begins with the weights of Launcher's, and trains on its examples in another order. A round times so many steps of each,
each time another one first; ratios are of times of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import numpy as np
from measuring import cpu_seconds, spread

Take = Callable[[int], float]
"""Trains that many steps, waits for them and returns the last loss."""

MLP = ["image_data.name = 'digits'", "mlp.units = 64", "train.steps = 100000", "train.epochs = None"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gin_file")
    parser.add_argument("--gin_param", action="append", default=[])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300, help="of each in one round")
    parser.add_argument("--one_batch", action="store_true", help="Launcher's one, again and again: no data is made")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import in_process

    gin_file = options.gin_file or "mlp_fashion.gin"
    bindings = [*([] if options.gin_file else MLP), *options.gin_param]
    takes: dict[str, Take] = {}
    for engine in ("tensorflow", "pjrt"):
        session = in_process.build(gin_file, bindings, replicas=options.devices, engine=engine)
        takes[engine] = launcher(session, options.one_batch)
        takes[engine](2)
        if engine == "tensorflow" and not options.gin_file:
            weights = [weight.numpy() for weight in session.model.trainable_variables]
    if not options.gin_file:
        takes["jax by hand"] = jax_by_hand(weights, session.plan.total_steps, options.devices)
    for take in takes.values():
        take(options.steps)
    wall: dict[str, list[float]] = {name: [] for name in takes}
    cpu: dict[str, list[float]] = {name: [] for name in takes}
    losses: dict[str, float] = {}
    for number in range(options.rounds):
        names = list(takes)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            begun, used = time.perf_counter(), cpu_seconds()
            losses[name] = takes[name](options.steps)
            wall[name].append((time.perf_counter() - begun) / options.steps)
            cpu[name].append((cpu_seconds() - used) / options.steps)
            time.sleep(0.05)  # batches are made ahead
    base = "jax by hand" if "jax by hand" in takes else "tensorflow"
    result: dict[str, object] = {"recipe": gin_file, "bindings": bindings, "devices": options.devices, "of": base}
    for name in takes:
        result[name] = {
            "milliseconds": spread([1000 * each for each in wall[name]]),
            "cpu_milliseconds": spread([1000 * each for each in cpu[name]]),
            "ratio": spread([mine / one for mine, one in zip(wall[name], wall[base], strict=True)]),
            "cpu_ratio": spread([mine / one for mine, one in zip(cpu[name], cpu[base], strict=True)]),
            "last_loss": round(losses[name], 5),
        }
    print(json.dumps(result, indent=1))


def launcher(session, one_batch: bool) -> Take:
    """Launcher's own loop on its own data."""
    batches = session.trainer.batches(session.plan.data)
    if one_batch:
        size = session.trainer.config.global_batch_size
        shards = session.runtime.batches(session.plan.data.train_batches, global_batch_size=size)
        first = getattr(shards, "dataset", shards).take(session.runtime.num_replicas).cache().repeat()
        batches = iter(session.runtime.batches(lambda shard: first, global_batch_size=size))

    def take(steps: int) -> float:
        records = session.trainer.train(batches, steps)
        return float(records.loss[-1] / records.weight[-1])

    return take


def jax_by_hand(weights: list[np.ndarray], total_steps: int, devices: int) -> Take:
    """The step that one writes in JAX."""
    import jax
    import jax.numpy as jnp
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images[..., None] / 16
    images = ((images - images.mean()) / images.std()).astype(np.float32)
    labels = digits.target.astype(np.int32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("replica",))
    on_all = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("replica"))

    def loss_of(weights, image, label):
        features = image.reshape(len(image), -1)
        for kernel, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
            features = jax.nn.gelu(features @ kernel + bias, approximate=False)
        logits = features @ weights[-2] + weights[-1]
        of_label = jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], axis=1)
        return -of_label.mean(), (logits.argmax(-1) == label).mean(dtype=jnp.float32)

    def step(state, batch):
        weights, velocities, number = state
        (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, **batch)
        warmup = 0.2 * total_steps
        later = (number - warmup) / (total_steps - warmup)
        rate = 0.02 * jnp.where(number < warmup, number / warmup, 0.5 * (1 + jnp.cos(jnp.pi * later)))
        velocities = [0.9 * v - rate * g for v, g in zip(velocities, gradients, strict=True)]
        weights = [w + v for w, v in zip(weights, velocities, strict=True)]
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in gradients))
        return (weights, velocities, number + 1), jnp.stack([loss, accuracy, norm])

    run = jax.jit(step, donate_argnums=0, out_shardings=(on_all, on_all))
    state = jax.device_put((weights, [np.zeros_like(w) for w in weights], np.float32(0)), on_all)
    order, random = iter(()), np.random.default_rng(0)

    def batch() -> dict[str, np.ndarray]:
        nonlocal order
        rows = next(order, None)
        if rows is None:
            order = iter(random.permutation(len(images))[: len(images) // 256 * 256].reshape(-1, 256))
            rows = next(order)
        return {"image": images[rows], "label": labels[rows]}

    def take(steps: int) -> float:
        nonlocal state
        rows = []
        for _ in range(steps):
            state, row = run(state, jax.device_put(batch(), divided))
            rows.append(row)
            if devices > 1 and len(rows) > 2:
                rows[-3].block_until_ready()  # with any number ahead, JAX's devices on CPUs wait for each other in vain
        return float(np.stack([np.asarray(row) for row in rows])[-1, 0])

    return take


if __name__ == "__main__":
    main()
