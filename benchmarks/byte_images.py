"""Made-up images of 8 bits, as photographs have: `image_data.source = @byte_images()`, for gpu_check.py."""

from __future__ import annotations

import dataclasses

import gin
import numpy as np

from launcher.data.catalog import Facts
from launcher.data.images.stored_images import StoredImages
from launcher.data.pipeline import ArrayExamples, Data, RandomAccessData

_DEVIATION = 0.25  # of pixels in [0, 1], about the middle


@gin.configurable("byte_images")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteImages:
    """An `ImageSource` of noise of `image_data.image_size`."""

    num_classes: int = 1000
    examples: int = 512

    name = "byte_images"
    of_bytes = True

    @property
    def facts(self) -> Facts:
        return Facts(
            image_shape=(None, None, 3),
            num_classes=self.num_classes,
            num_train_examples=self.examples,
            num_eval_examples=0,
            mean=(0.5,) * 3,
            std=(_DEVIATION,) * 3,
        )

    def check(self) -> None:
        """Nothing to prepare."""

    def open(self, stored: StoredImages) -> Data:
        numbers = np.random.default_rng(0)
        shape = (self.examples, *stored.image_shape)
        images = np.clip(255 * (0.5 + _DEVIATION * numbers.standard_normal(shape, np.float32)), 0, 255)
        labels = numbers.integers(self.num_classes, size=self.examples, dtype=np.int32)
        return RandomAccessData(
            train=ArrayExamples({"image": images.astype(np.uint8), "label": labels}), finish=stored.finish
        )
