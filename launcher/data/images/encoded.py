"""Encoded images that can be had in any order, of the user's own or of TFDS: what a set offers, and its batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import IO, Protocol

import numpy as np
import tensorflow as tf

from launcher.data.images import image_header
from launcher.data.images.decode import ImageDecoder, in_memory
from launcher.data.images.mix import partner_positions
from launcher.data.order import shuffled
from launcher.data.pipeline import Augment, Examples, RandomAccessData, Shard
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph

_NAMED = 5


class EncodedImages(Examples, Protocol):
    """Images as files hold them; `fetch` gives {"image": string [n], "label": int32 [n]}."""

    def name(self, index: int) -> str:
        """The name of an example, for messages."""

    def key(self, index: int) -> str:
        """A name that stays when the files are moved to another folder, or others are added."""

    def select(self, chosen: np.ndarray) -> EncodedImages:
        """Some of them, by their indices."""

    def opened(self, index: int) -> IO[bytes]:
        """The file of an image; raises UsageError where that, or its label, is not what it is bound to be."""

    def identity(self) -> str:
        """A digest of names, sizes and a glance, so that a copy of the files is the same; see `DataWithIdentity`."""

    def damaged(self) -> list[str]:
        """Examples that are damaged as far as it shows without decoding, each with what is wrong with it.

        Raises:
          UsageError: they are not what they are bound to be.
        """


def problem(images: EncodedImages, index: int) -> str:
    """The fault of an example as far as it shows without decoding its image; "" if there is none."""
    try:
        with images.opened(index) as file:
            image_header.check(file)
    except UsageError as error:
        return str(error)
    return ""


def load(images: EncodedImages, decoder: ImageDecoder) -> dict[str, np.ndarray]:
    """Reads all images into memory, see `in_memory`; raises UsageError where some cannot be read or decoded."""

    @no_autograph
    def one(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = images.fetch(index[tf.newaxis])
        return example["image"][0], example["label"][0]

    examples = tf.data.Dataset.range(len(images)).map(one, num_parallel_calls=tf.data.AUTOTUNE)
    try:
        return in_memory(examples, len(images), decoder)
    except tf.errors.OpError:
        if (found := damage(images, range(len(images)), decoder)) is not None:
            raise UsageError(found) from None
        raise


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class EncodedData(RandomAccessData):
    """`RandomAccessData` of images that are decoded as they are needed; `augment` to bytes is `augment_stored`."""

    train: EncodedImages
    evaluation: EncodedImages | None = None
    decoder: ImageDecoder
    augment_stored: Augment

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        data = dataclasses.replace(self, augment=self.augment_stored) if shard.as_stored else self
        return RandomAccessData.train_batches(data, shard)

    def damage(self, *, seed: int, start: int, stop: int) -> str | None:
        """Says which images cannot be read and decoded, after a run has failed for one; None if all can.

        It looks at positions `start` to `stop` of the training stream and, if all is well there, at the images to
        evaluate on.
        """
        train, evaluation = self.train, self.evaluation
        positions = tf.range(start, stop, dtype=tf.int64)
        if self.mix is not None:
            partners = partner_positions(positions, seed=seed, size=len(train))
            positions = tf.concat([positions, partners], axis=0)
        _, chosen = shuffled(positions, seed=seed, size=len(train))
        told = damage(train, chosen.numpy().tolist(), self.decoder)
        if told is None and evaluation is not None:
            return damage(evaluation, range(len(evaluation)), self.decoder)
        return told


def damage(images: EncodedImages, chosen: Iterable[int], decoder: ImageDecoder) -> str | None:
    """Says which of the chosen images cannot be read and decoded; None if all can."""

    @no_autograph
    def decoded(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return index, decoder.centre(images.fetch(index[tf.newaxis])["image"][0])

    indices = sorted(set(chosen))
    readable = (
        tf.data.Dataset.from_tensor_slices(np.array(indices, np.int64))
        .map(decoded, num_parallel_calls=tf.data.AUTOTUNE)
        .ignore_errors()
        .map(lambda index, image: index)
    )
    failing = sorted(set(indices) - set(readable.as_numpy_iterator()))
    told = [f"{images.name(index)} ({problem(images, index) or 'cannot be decoded'})" for index in failing[:_NAMED]]
    return listed(told, len(failing)) if failing else None


def listed(problems: Sequence[str], count: int | None = None) -> str:
    """The message about `count` images that cannot be used; `problems` says of all, or of the first, what is wrong."""
    count = len(problems) if count is None else count
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    images = "image" if count == 1 else "images"
    return f"{count} {images} cannot be used: {', '.join(problems[:_NAMED])}{more}; repair or remove what is damaged"
