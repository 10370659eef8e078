"""Stored images on their way into batches: held in memory or read by need, augmented, standardised."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.data.catalog import Facts
from launcher.data.images import augment, encoded
from launcher.data.images.decode import ImageDecoder
from launcher.data.images.mix import Mix
from launcher.data.pipeline import ArrayExamples, Batch, Data, Examples, RandomAccessData
from launcher.machine.no_autograph import no_autograph

Arrays = dict[str, np.ndarray]
Pixels = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredImages:
    """The way of a data set's images into batches."""

    facts: Facts
    image_shape: tuple[int, int, int]  # of the batches: height, width, channels
    augmentation: str  # see `launcher.data.images.augment.augmentation`
    flip: bool  # the augmentation mirrors half of the images
    mix: Mix | None
    memory_limit_bytes: int  # images that decode to more are read from disk as they are needed

    def in_memory(self, train: Arrays, evaluation: Arrays | None, identity: str = "") -> Data:
        """Batches of decoded images, uint8 [n, height, width, channels], and their labels; see `ArrayExamples`."""
        held_out = None if evaluation is None else ArrayExamples(self._resized(evaluation))
        return self.batches_of(ArrayExamples(self._resized(train), identity), held_out)

    def from_encoded(self, train: encoded.EncodedImages, evaluation: encoded.EncodedImages | None) -> Data:
        """A set of the user's own: in memory if it fits, else read by need."""
        decoder = self.decoder(scaled=True)
        if not self.fits(len(train) + (0 if evaluation is None else len(evaluation))):
            return self.batches_of(train, evaluation, decoder)
        held_out = None if evaluation is None else encoded.load(evaluation, decoder)
        return self.in_memory(encoded.load(train, decoder), held_out, train.identity())

    def batches_of(self, train: Examples, evaluation: Examples | None, decoder: ImageDecoder | None = None) -> Data:
        """Batches of examples whose images are as they are stored or, with a decoder, files."""
        windows = decoder if self._random_window else None
        change = (
            None if windows else augment.augmentation(self.augmentation, image_shape=self.image_shape, flip=self.flip)
        )

        def decoded(images: tf.Tensor) -> tf.Tensor:
            return decoder.centres(images) if decoder and images.dtype == tf.string else images

        @no_autograph
        def augmented(batch: Batch, seeds: tf.Tensor, finish: Pixels | None = self._standardised) -> Batch:
            images = batch["image"]
            if windows:
                images = windows.random_windows(images, seeds, flip=self.flip, finish=finish)
            else:
                images = decoded(images) if change is None else change(decoded(images), seeds)
            return {**batch, "image": images}

        @no_autograph
        def finished(batch: Batch) -> Batch:
            return self.finish({**batch, "image": decoded(batch["image"])})

        parts: dict[str, Any] = {"train": train, "evaluation": evaluation, "mix": self.mix, "finish": finished}
        if decoder is None:
            return RandomAccessData(**parts, augment=augmented)
        return encoded.EncodedData(
            **parts, augment=augmented, augment_stored=functools.partial(augmented, finish=None), decoder=decoder
        )

    @no_autograph
    def decode(self, files: tf.Tensor) -> tf.Tensor:
        """JPEG or PNG images of any size, string [n], as evaluation has them: float32 [n, *image_shape]."""
        images = self.decoder(scaled=True).centres(files)
        # A file's brightest pixel is 255, that of the data set may be another.
        pixels = tf.cast(images, tf.float32) * (self.facts.max_value / 255.0)
        return self._standardised(pixels)

    @property
    def _random_window(self) -> bool:
        """Whether windows are cut out of photographs, which have to be whole for that and not held in memory scaled."""
        return self.augmentation == "imagenet" and not self.facts.fixed_size

    def decoder(self, *, scaled: bool) -> ImageDecoder:
        """The decoder of the images' files, see there for `scaled`."""
        return ImageDecoder(
            image_shape=self.image_shape, fraction=1.0 if self.facts.fixed_size else 0.875, scaled=scaled
        )

    def fits(self, count: int) -> bool:
        """Whether so many images are held in memory."""
        return not self._random_window and count * int(np.prod(self.image_shape)) <= self.memory_limit_bytes

    @no_autograph
    def finish(self, batch: Batch) -> Batch:
        """Stored pixels to float32 with zero mean and unit variance; what is float32 is so already."""
        images = batch["image"]
        return batch if images.dtype == tf.float32 else {**batch, "image": self._standardised(images)}

    def _standardised(self, images: tf.Tensor) -> tf.Tensor:
        std = np.asarray(self.facts.std)
        scale = (1 / (self.facts.max_value * std)).astype(np.float32)
        shift = (np.asarray(self.facts.mean) / std).astype(np.float32)
        # By rows of pixels: a CPU takes three times as long where it spreads three numbers over the last axis.
        height, width, channels = self.image_shape
        rows = tf.cast(tf.reshape(images, [-1, height, width * channels]), tf.float32)
        rows = rows * np.tile(scale, width) - np.tile(shift, width)
        return tf.reshape(rows, [-1, height, width, channels])

    def _resized(self, arrays: Arrays) -> Arrays:
        images = arrays["image"]
        if images.shape[1:] == self.image_shape:
            return arrays
        resized = tf.image.resize(images, self.image_shape[:2])
        return {**arrays, "image": augment.as_dtype(resized, tf.as_dtype(images.dtype)).numpy()}
