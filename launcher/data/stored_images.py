"""Stored images on their way into batches: read into memory or streamed, augmented, standardised."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from launcher.data import augment, digits, tfds
from launcher.data.augment import ImageAugment
from launcher.data.catalog import Facts
from launcher.data.decode import ImageDecoder
from launcher.data.mix import Mix
from launcher.data.pipeline import ArrayExamples, Augment, Batch, Data, RandomAccessData
from launcher.data.stream import StreamedImages


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredImages:
    """What becomes of the images of one data set.

    Args:
      facts: how they are stored.
      image_shape: (height, width, channels) of the batches.
      augmentation: see `launcher.data.augment.augmentation`.
      flip: the augmentation mirrors half of the images.
      mix: mixes training images with others; None for none.
    """

    facts: Facts
    image_shape: tuple[int, int, int]
    augmentation: str
    flip: bool
    mix: Mix | None = None

    def from_digits(self) -> Data:
        """The digits of scikit-learn."""
        train, held_out = ({**arrays, "image": _resized(arrays["image"], self.image_shape)} for arrays in digits.load())
        return self._in_memory(train, held_out)

    def from_tfds(self, name: str, memory_limit_bytes: int) -> Data:
        """A prepared TFDS set: in memory if it decodes to no more than `memory_limit_bytes`, else streamed."""
        builder = tfds.open_builder(name)
        facts = self.facts
        decoder = ImageDecoder(
            image_shape=self.image_shape,
            fraction=1.0 if facts.fixed_size else 0.875,
            scaled=self.image_shape != facts.image_shape,
        )
        # Windows cut out of photographs have to come from the whole photograph, which only a stream hands over.
        random_window = self.augmentation == "imagenet" and not facts.fixed_size
        splits = (facts.train_split, facts.eval_split)
        decoded_bytes = sum(tfds.num_examples(builder, split) for split in splits) * int(np.prod(self.image_shape))
        if not random_window and decoded_bytes <= memory_limit_bytes:
            return self._in_memory(*(tfds.load(builder, split, decoder) for split in splits))
        return StreamedImages(
            builder=builder,
            train_split=facts.train_split,
            eval_split=facts.eval_split,
            decoder=decoder,
            random_window=random_window,
            flip=self.flip,
            augment=None if random_window else self._augment(),
            finish=self._finish,
            mix=self.mix,
        )

    def decode(self, files: tf.Tensor) -> tf.Tensor:
        """JPEG or PNG images of any size, string [n], as evaluation has them: float32 [n, *image_shape]."""
        decoder = ImageDecoder(
            image_shape=self.image_shape, fraction=1.0 if self.facts.fixed_size else 0.875, scaled=True
        )
        images = tf.map_fn(decoder.centre, files, fn_output_signature=tf.TensorSpec(self.image_shape, tf.uint8))
        # A file's brightest pixel is 255, that of the data set may be another.
        pixels = tf.cast(images, tf.float32) * (self.facts.max_value / 255.0)
        return self._finish({"image": pixels})["image"]

    def _in_memory(self, train: dict[str, np.ndarray], evaluation: dict[str, np.ndarray]) -> Data:
        change = self._augment()
        return RandomAccessData(
            train=ArrayExamples(train),
            evaluation=ArrayExamples(evaluation),
            augment=None if change is None else _of_batch(change),
            finish=self._finish,
            mix=self.mix,
        )

    def _augment(self) -> ImageAugment | None:
        return augment.augmentation(self.augmentation, image_shape=self.image_shape, flip=self.flip)

    def _finish(self, batch: Batch) -> Batch:
        """Stored pixels to float32 with zero mean and unit variance."""
        std = np.asarray(self.facts.std)
        scale = (1 / (self.facts.max_value * std)).astype(np.float32)
        shift = (np.asarray(self.facts.mean) / std).astype(np.float32)
        return {**batch, "image": tf.cast(batch["image"], tf.float32) * scale - shift}


def _of_batch(change: ImageAugment) -> Augment:
    return lambda batch, seeds: {**batch, "image": change(batch["image"], seeds)}


def _resized(images: np.ndarray, image_shape: tuple[int, int, int]) -> np.ndarray:
    if images.shape[1:] == image_shape:
        return images
    return augment.as_dtype(tf.image.resize(images, image_shape[:2]), tf.as_dtype(images.dtype)).numpy()
