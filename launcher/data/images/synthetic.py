"""Images made up for speed runs: no disk, next to no CPU, any size and number of classes."""

from __future__ import annotations

import dataclasses
import functools

import gin
import numpy as np
import tensorflow as tf

from launcher.config.bound_types import check_least
from launcher.data.catalog import Facts
from launcher.data.images.stored_images import StoredImages
from launcher.data.pipeline import Data, RandomAccessData
from launcher.machine.no_autograph import no_autograph

_POOL = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticImages:
    """`Examples` that depend on (seed, index) alone. The image of an index tells its class, so a model can learn them.

    A small pool of images is made at first use; example i is image i modulo its size. With more classes than the pool
    holds images, some classes have no example.

    Other seeds give other images.
    """

    length: int
    image_shape: tuple[int, int, int]
    num_classes: int
    seed: int = 0

    def __len__(self) -> int:
        return self.length

    def identity(self) -> str:
        return f"made up: {self.image_shape}, {self.num_classes}, {self.seed}"

    @no_autograph
    def fetch(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """{"image": float32 [n, height, width, channels], already standardised, "label": int32 [n]}."""
        return {key: tf.gather(tensor, indices % _POOL) for key, tensor in self._pool.items()}

    @functools.cached_property
    def _pool(self) -> dict[str, tf.Tensor]:
        numbers = np.random.default_rng(self.seed)
        labels = np.arange(_POOL, dtype=np.int32) % self.num_classes
        # Noise over a pattern of the class; each has half of the variance.
        patterns = numbers.standard_normal((min(self.num_classes, _POOL), *self.image_shape), dtype=np.float32)
        noise = numbers.standard_normal((_POOL, *self.image_shape), dtype=np.float32)
        images = (patterns[labels] + noise) * np.float32(np.sqrt(0.5))
        with tf.init_scope(), tf.device("CPU:0"):
            return {"image": tf.constant(images), "label": tf.constant(labels)}


@gin.configurable("synthetic_images")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticSource:
    """Made-up images of `image_data.image_size`, to measure a model's speed: `image_data.name = 'synthetic'`.

    Args:
      num_classes: labels are 0 to num_classes - 1.
      train_examples, eval_examples: how many to make up.
    """

    num_classes: int = gin.REQUIRED
    train_examples: int = 10_000
    eval_examples: int = 1_000

    name = "synthetic"

    def __post_init__(self) -> None:
        check_least("synthetic_images", self, num_classes=1, train_examples=1, eval_examples=1)

    @property
    def facts(self) -> Facts:
        return Facts(
            image_shape=(None, None, 3),
            num_classes=self.num_classes,
            num_train_examples=self.train_examples,
            num_eval_examples=self.eval_examples,
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
        )

    def check(self) -> None:
        """Nothing to prepare."""

    def open(self, stored: StoredImages) -> Data:
        train, evaluation = (
            SyntheticImages(length=length, image_shape=stored.image_shape, num_classes=self.num_classes)
            for length in (self.train_examples, self.eval_examples)
        )
        return RandomAccessData(train=train, evaluation=evaluation, mix=stored.mix)
