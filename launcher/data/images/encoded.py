"""Encoded images of the user's own that can be had in any order: what such a set offers, and its batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import tensorflow as tf

from launcher.data import files
from launcher.data.catalog import TFDS, Facts
from launcher.data.images.decode import ImageDecoder, in_memory
from launcher.data.images.mix import partner_positions
from launcher.data.order import shuffled
from launcher.data.pipeline import Data, Examples, RandomAccessData
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph

if TYPE_CHECKING:
    from launcher.data.images.stored_images import StoredImages

_NAMED = 5

# Images whose headers say whether a set has one size.
_PROBED = 64


class EncodedImages(Examples, Protocol):
    """Images as files hold them; `fetch` gives {"image": string [n], "label": int32 [n]}."""

    def name(self, index: int) -> str:
        """Of an example, for messages."""

    def key(self, index: int) -> str:
        """A name that stays when the files are moved to another folder, or others are added."""

    def select(self, chosen: np.ndarray) -> EncodedImages:
        """Some of them, by their indices."""

    def size(self, index: int) -> tuple[int, int] | None:
        """Height and width of an image in pixels, by its header; None where something is wrong with it."""

    def problem(self, index: int) -> str | None:
        """What is wrong with an example as far as it shows without decoding its image; None if nothing."""

    def identity(self) -> str:
        """See `launcher.data.pipeline.Data`: of names, sizes and a glance, so that a copy of the files is the same."""

    def damaged(self) -> list[str]:
        """Examples that are damaged as far as it shows without decoding, each with what is wrong with it.

        Raises:
          UsageError: they are not what they are bound to be.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnImages:
    """A set of the user's own, without evaluation if none are held out; see `image_data.ImageSource`."""

    name: str
    facts: Facts
    train: EncodedImages
    evaluation: EncodedImages | None
    class_names: tuple[str, ...]
    details: str

    def check(self) -> None:
        """Raises UsageError where something shows to be damaged without decoding."""
        found = [one for part in (self.train, self.evaluation) if part is not None for one in part.damaged()]
        if found:
            raise UsageError(listed(found))

    def identity(self) -> str:
        return self.train.identity()

    def open(self, stored: StoredImages) -> Data:
        return stored.from_own(self)


def own_images(
    train: EncodedImages,
    evaluation: EncodedImages | None,
    *,
    name: str,
    num_classes: int,
    channels: int,
    eval_share: float | None,
    evaluated_on: str,
    class_names: tuple[str, ...] = (),
    classes: str,
    others: int = 0,
) -> OwnImages:
    """The set of these examples, with ImageNet's mean and standard deviation.

    Its images have one size if a few that are spread over it do.

    Args:
      train, evaluation: the examples; without any to evaluate on, a share of those to train on is held out by a hash of
        their keys.
      eval_share: how much to hold out; None for the usual share.
      evaluated_on: where the examples to evaluate on come from.
      classes: what a person should know of them.
      others: files that are left out.

    Raises:
      UsageError: nothing to train on, nothing to evaluate on where that is not optional, or not one image in order.
    """
    binding = "folder_images" if name.startswith("folder:") else "record_images"
    if channels not in (1, 3):
        raise UsageError(f"{binding}.channels = {channels} must be 1 or 3")
    if evaluation is None:
        share = files.check_share(eval_share, binding)
        held_out = np.array([files.is_held_out(train.key(index), share) for index in range(len(train))])
        train, evaluation = (train.select(np.flatnonzero(chosen)) for chosen in (~held_out, held_out))
        how = files.share_words(share)
    elif eval_share is not None:
        raise UsageError(f"{binding}.eval_share holds images out, and {evaluated_on} has those to evaluate on")
    else:
        how = f"evaluated on {evaluated_on}"
    if not len(train) or not (len(evaluation) or eval_share == 0):
        raise UsageError(
            f"there are {len(train)} images to train and {len(evaluation)} to evaluate on; bind {binding}.eval_share "
            "to another share to hold out, or to 0 for none"
        )
    chosen = np.unique(np.linspace(0, len(train) - 1, _PROBED).astype(int))
    sizes = {size for index in chosen if (size := train.size(int(index)))}
    if not sizes:
        raise UsageError(f"{train.name(int(chosen[0]))}: {train.problem(int(chosen[0])) or 'damaged'}")
    height, width = sizes.pop() if len(sizes) == 1 else (None, None)
    usual = TFDS["imagenet2012"]
    return OwnImages(
        name=name,
        facts=Facts(
            image_shape=(height, width, channels),
            num_classes=num_classes,
            num_train_examples=len(train),
            num_eval_examples=len(evaluation) or None,
            mean=_of_channels(usual.mean, channels),
            std=_of_channels(usual.std, channels),
        ),
        train=train,
        evaluation=evaluation if len(evaluation) else None,
        class_names=class_names,
        details=f"{classes}, {how}" + (f"; {others} other files left out" if others else ""),
    )


def _of_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return values if len(values) == channels else (float(np.mean(values)),) * channels


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
    """`RandomAccessData` of images that are decoded as they are needed."""

    train: EncodedImages
    evaluation: EncodedImages | None = None
    decoder: ImageDecoder

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
        found = damage(train, chosen.numpy().tolist(), self.decoder)
        if found is None and evaluation is not None:
            return damage(evaluation, range(len(evaluation)), self.decoder)
        return found


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
    told = [f"{images.name(index)} ({images.problem(index) or 'cannot be decoded'})" for index in failing[:_NAMED]]
    return listed(told, len(failing)) if failing else None


def listed(problems: Sequence[str], count: int | None = None) -> str:
    """The message about `count` images that cannot be used; `problems` says of all, or of the first, what is wrong."""
    count = len(problems) if count is None else count
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    images = "image" if count == 1 else "images"
    return f"{count} {images} cannot be used: {', '.join(problems[:_NAMED])}{more}; repair or remove what is damaged"
