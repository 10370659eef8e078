"""A task whose worker 1, once it has nothing more to do, stays until there is a file "go" in $LAGGING_FOLDER.

It leaves its TF_CONFIG there, as a file of that name."""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.data.pipeline import ArrayExamples, RandomAccessData


@gin.configurable
class Lagging:
    def data(self):
        inputs = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
        examples = ArrayExamples({"inputs": inputs, "sums": inputs.sum(1)})
        return RandomAccessData(train=examples, evaluation=examples)

    def model(self):
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def loss(self, model, batch, training):
        outputs, weight = model(batch["inputs"], training=training)[:, 0], batch["weight"]
        return tf.reduce_sum(tf.square(outputs - batch["sums"]) * weight), tf.reduce_sum(weight), {}


def _stay() -> None:
    while not Path(os.environ["LAGGING_FOLDER"], "go").exists():
        time.sleep(0.01)


if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    atexit.register(_stay)
    Path(os.environ["LAGGING_FOLDER"], "TF_CONFIG").write_text(os.environ["TF_CONFIG"])
