"""Weights kept in float16 against float32 master weights, the rest alike: what rounds away? Prints JSON.

    python benchmarks/master_weights.py --seeds=5

Launcher always keeps master weights, so this is a loop of its own in plain TensorFlow: one hidden layer on scanned
digits, gradient descent on the whole training set, forward and backward pass in float16 with a loss scale of 2^10. An
update whose size is below half a unit in the last place of its float16 weight leaves that weight as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from launcher.data.images import digits

HIDDEN = 32
SCALE = 2.0**10


def train(weights_dtype: str, seed: int, steps: int, learning_rate: float) -> dict[str, float]:
    """Trains from weights that are the same float16 numbers whatever dtype keeps them.

    Args:
      weights_dtype: "float32" for master weights or "float16".
      seed: of the initial weights.
      steps: of gradient descent.
      learning_rate: constant.

    Returns:
      accuracy on the held-out digits, loss on the training digits, and unmoved: the share of updates (of all weights in
      all steps) that were not zero and left their weight as it was.
    """
    random = np.random.default_rng(seed)
    first = [_initial(random, shape).astype(np.float16) for shape in ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))]
    weights = [tf.Variable(tf.cast(value, weights_dtype)) for value in first]
    train_set, held_out = digits.load()
    images, labels = _images(train_set), tf.constant(train_set["label"])

    def logits(images: tf.Tensor, weights: list[tf.Tensor]) -> tf.Tensor:
        kernel1, bias1, kernel2, bias2 = (tf.cast(weight, tf.float16) for weight in weights)
        return tf.cast(tf.nn.relu(images @ kernel1 + bias1) @ kernel2 + bias2, tf.float32)

    @tf.function
    def descend(steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        loss, unmoved, updates = tf.constant(0.0), tf.constant(0.0), tf.constant(0.0)
        for _ in tf.range(steps):
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits(images, weights))
                loss = tf.reduce_mean(losses)
                scaled = loss * SCALE
            for weight, gradient in zip(weights, tape.gradient(scaled, weights), strict=True):
                # The product with the learning rate is in float32 for both: only where its sum is kept differs.
                update = tf.cast(-learning_rate / SCALE * tf.cast(gradient, tf.float32), weight.dtype)
                after = weight + update
                unmoved += tf.reduce_sum(tf.cast((after == weight) & (gradient != 0), tf.float32))
                updates += tf.reduce_sum(tf.cast(gradient != 0, tf.float32))
                weight.assign(after)
        return loss, unmoved / updates

    loss, unmoved = descend(tf.constant(steps))
    found = tf.argmax(logits(_images(held_out), weights), axis=-1).numpy()
    return {
        "accuracy": float(np.mean(found == held_out["label"])),
        "loss": float(loss),
        "unmoved": float(unmoved),
    }


def _initial(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """He et al. 2015 (arXiv 1502.01852) for a kernel, zeros for a bias."""
    return random.normal(size=shape) * np.sqrt(2 / shape[0]) if len(shape) == 2 else np.zeros(shape)


def _images(examples: dict[str, np.ndarray]) -> tf.Tensor:
    return tf.constant(examples["image"].reshape(-1, 64) / 16.0, tf.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--learning_rate", type=float, default=0.002)
    options = parser.parse_args()
    result: dict[str, object] = {"steps": options.steps, "learning_rate": options.learning_rate}
    for dtype in ("float32", "float16"):
        found = []
        for seed in range(options.seeds):
            found.append(train(dtype, seed, options.steps, options.learning_rate))
            print(f"weights in {dtype}, seed {seed}: {found[-1]}", file=sys.stderr, flush=True)
        result[f"weights in {dtype}"] = {
            "accuracies": [round(one["accuracy"], 4) for one in found],
            "mean_accuracy": round(statistics.mean(one["accuracy"] for one in found), 4),
            "mean_loss": round(statistics.mean(one["loss"] for one in found), 4),
            "updates_without_effect": round(statistics.mean(one["unmoved"] for one in found), 3),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
