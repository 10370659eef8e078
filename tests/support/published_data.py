"""Data for the programs in examples/: laid out as their authors' is, small, made up, and with something to learn."""

from __future__ import annotations

import csv
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf


def make(folder: Path) -> None:
    """Writes PetImages/, aclImdb/train/, heart.csv and base.keras into a folder."""
    random = np.random.default_rng(7)
    for label, name in enumerate(("Cat", "Dog")):
        place = folder / "PetImages" / name
        place.mkdir(parents=True)
        for index in range(40):
            picture = random.integers(0, 120, (50, 60, 3)) + [[[100 * label, 0, 100 * (1 - label)]]]
            data = tf.io.encode_jpeg(tf.constant(picture.astype(np.uint8)))
            (place / f"{index}.jpg").write_bytes(data.numpy())
    words = {"neg": ["dull", "slow", "bad", "awful", "weak"], "pos": ["fine", "great", "warm", "clever", "good"]}
    for name, own in words.items():
        place = folder / "aclImdb" / "train" / name
        place.mkdir(parents=True)
        for index in range(60):
            text = random.choice([*own, "a", "film", "the", "plot", "was"], size=int(random.integers(8, 30)))
            (place / f"{index}_1.txt").write_text(" ".join(text))
    with (folder / "heart.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "sex", "exang", "thal", "trestbps", "chol", "target"])
        for _ in range(200):
            age, chol = int(random.integers(30, 80)), int(random.integers(150, 350))
            thal = random.choice(["fixed", "normal", "reversible"])
            sick = int(age > 60 or thal == "fixed")
            writer.writerow([age, random.integers(2), random.integers(2), thal, random.integers(100, 180), chol, sick])
    keras.utils.set_random_seed(3)
    layers = keras.layers
    base = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(8, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(8, 3, strides=2, activation="relu"),
        ],
        name="sequential",  # as the first one of a process is
    )
    base.save(folder / "base.keras")
