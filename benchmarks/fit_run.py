"""Thirty steps of ResNet-20 on scikit-learn's digits by Keras `fit`, as a user would write it.

    python benchmarks/fit_run.py TIMES.txt

Writes the Unix time of the end of each step to TIMES.txt, as launcher.main does to metrics.jsonl.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from launcher.models.resnet import resnet

_STEPS = 30


class Times(keras.callbacks.Callback):
    """Notes when each step ended."""

    def __init__(self, path: str):
        super().__init__()
        self._path = path

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Appends a line."""
        with open(self._path, "a") as file:
            file.write(f"{batch + 1} {time.time()}\n")


def main() -> None:
    digits = load_digits()
    images = digits.images[..., None].astype(np.float32) / 16
    data = tf.data.Dataset.from_tensor_slices((images, digits.target)).cache().shuffle(2000).repeat().batch(128)
    model = resnet(image_shape=(8, 8, 1), num_classes=10, depth=20)
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(data.prefetch(2), steps_per_epoch=_STEPS, verbose=0, callbacks=[Times(sys.argv[1])])


if __name__ == "__main__":
    main()
