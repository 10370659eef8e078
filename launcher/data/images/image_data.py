"""Labelled images, bound by gin: `image_data.name = 'digits'`.

    digits             1,797 scanned digits in scikit-learn's wheel; nothing to download
    fashion_mnist      70,000 pictures of clothes; python -m launcher.data.prepare fashion_mnist
    tfds:NAME          any TFDS image classification set: tfds:cifar10, tfds:imagenet2012
    folder:DIR         a folder of JPEG, PNG, GIF or BMP files for each class, in DIR or in DIR/train and DIR/val
    tfrecord:GLOB      TFRecord files with image/encoded and image/class/label, or what record_images.features says
    synthetic          made up, for speed runs

Batches are {"image": float32 [b, height, width, channels], standardised per channel, "label": int32 [b],
"weight": float32 [b]}. With mixup or cutmix, training batches have "label_b", int32 [b], the other label of each mixed
image, and "mix", float32 [b], the share of "label", too.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gin
import tensorflow as tf

from launcher.config.bound_types import check_value
from launcher.data import tfds
from launcher.data.batch_spec import BatchSpec
from launcher.data.catalog import TFDS, Facts
from launcher.data.images import augment
from launcher.data.images.digits import DigitImages
from launcher.data.images.folder_images import folder_images
from launcher.data.images.mix import Mix
from launcher.data.images.record_images import images_of_split, record_images
from launcher.data.images.stored_images import StoredImages
from launcher.data.images.synthetic import SyntheticSource
from launcher.data.kinds import DataOfFiles, identity_of
from launcher.data.pipeline import Batch, Data, Shard
from launcher.data.text.source import chosen
from launcher.errors import UsageError


class ImageSource(Protocol):
    """Labelled images as they are stored. Making one decodes none.

    It may also have `class_names`, by label; `details`, what a person should know of the set, for the plan; and
    `of_bytes = True`, where it opens them by `stored` or leaves `stored.finish` out of a training batch of a shard that
    is `as_stored`.
    """

    name: str

    @property
    def facts(self) -> Facts:
        """The stored images; height and width None where image_data.image_size must be bound."""

    def check(self) -> None:
        """Raises UsageError where the images are not to be had."""

    def open(self, stored: StoredImages) -> Data:
        """The batches that are made of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData:
    """Labelled images of one size: `Data`, and what a model for them has to know.

    Args:
      source: where the batches come from: `Data`, or with `open` what has `check`.
      open: gives the batches where they are opened with the first of them, so that a job can be planned without data.
      finish_stored: what makes images float32, in a training batch that has them as bytes; None where batches never do.
      decode: JPEG or PNG files, string [n], to images as evaluation has them; None where there are no such files.
    """

    name: str  # as bound
    image_shape: tuple[int, int, int]  # height, width, channels
    num_classes: int  # labels are 0 to num_classes - 1
    source: Any
    open: Callable[[], Data] | None = None
    num_train_examples: int | None = None
    num_eval_examples: int | None = None
    mixed: bool = False  # training images are mixed with others
    finish_stored: Callable[[Batch], Batch] | None = None
    decode: Callable[[tf.Tensor], tf.Tensor] | None = None
    class_names: tuple[str, ...] = ()  # by label; empty if unknown
    details: str = ""  # what a person should know of the set, for the plan

    @functools.cached_property
    def _data(self) -> Data:
        self.check()
        return self.source if self.open is None else self.open()

    def check(self) -> None:
        self.source.check()

    def identity(self) -> str:
        return identity_of(self._data)

    def batch_spec(self, size: int) -> BatchSpec:
        """See `launcher.data.batch_spec`."""
        spec = {
            "image": tf.TensorSpec([size, *self.image_shape], tf.float32),
            "label": tf.TensorSpec([size], tf.int32),
            "weight": tf.TensorSpec([size], tf.float32),
        }
        if self.mixed:
            spec |= {"label_b": spec["label"], "mix": tf.TensorSpec([size], tf.float32)}
        return spec

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        return self._data.train_batches(shard)

    def eval_batches(self, shard: Shard) -> tf.data.Dataset:
        return self._data.eval_batches(shard)

    def damage(self, *, seed: int, start: int, stop: int) -> str | None:
        """See `launcher.data.pipeline.DataOfFiles`."""
        return self._data.damage(seed=seed, start=start, stop=stop) if isinstance(self._data, DataOfFiles) else None


@gin.configurable("tfds_images")
class TfdsImages:
    """Images of a TFDS classification set: `image_data.name = 'tfds:NAME'`.

    Args:
      name: as TFDS writes it.
      train_split, eval_split: such as "train[:90%]"; by default the usual ones of the set.
    """

    of_bytes = True

    def __init__(self, name: str, *, train_split: str | None = None, eval_split: str | None = None):
        self.name = name if name == "fashion_mnist" else f"tfds:{name}"
        self._set = name
        self._splits = {"train_split": train_split, "eval_split": eval_split}

    @functools.cached_property
    def facts(self) -> Facts:
        return tfds.facts(self._set, **self._splits)

    def check(self) -> None:
        tfds.check_prepared(tfds.open_builder(self._set), (self.facts.train_split, self.facts.eval_split))

    def open(self, stored: StoredImages) -> Data:
        builder, splits = tfds.open_builder(self._set), (self.facts.train_split, self.facts.eval_split)
        counts = [tfds.num_examples(builder, split) for split in splits]
        decoder = stored.decoder(scaled=stored.image_shape != self.facts.image_shape)
        if stored.fits(sum(counts)):
            # Version, size and split in place of the content, which may be gigabytes.
            identity = f"{builder.info.full_name} {builder.info.dataset_size} {splits[0]} {counts[0]}"
            train, held_out = (tfds.load(builder, split, decoder) for split in splits)
            return stored.in_memory(train, held_out, identity)
        if tfds.is_array_record(builder):
            raise UsageError(
                f"{builder.data_dir} is in array_record, which is read into memory alone: raise "
                "image_data.memory_limit_bytes, or prepare it as tfrecord"
            )
        parts = [images_of_split(builder, split, self.facts.num_classes) for split in splits]
        return stored.batches_of(parts[0], parts[1], decoder)


_KINDS: dict[str, Callable[..., ImageSource]] = {
    "digits": DigitImages,
    "fashion_mnist": functools.partial(TfdsImages, "fashion_mnist"),
    "synthetic": SyntheticSource,
    "tfds:": TfdsImages,
    "folder:": folder_images,
    "tfrecord:": record_images,
}


@gin.configurable
def image_data(
    *,
    name: str | None = None,
    source: ImageSource | None = None,
    image_size: int | None = None,
    num_classes: int | None = None,
    augmentation: str = "none",
    flip: bool | None = None,
    mixup: float | None = None,
    cutmix: float | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    memory_limit_bytes: int = 2 * 1024**3,
) -> ImageData:
    """Labelled images by name or from a source. Decodes none: that happens with the first batch.

    Args:
      name: "digits", "fashion_mnist", "synthetic", "tfds:NAME", "folder:DIR" or "tfrecord:GLOB".
      source: in place of a name: `@tfds_images()`, `@folder_images()`, `@record_images()` or `@synthetic_images()`.
      image_size: height and width in pixels; needed where stored images differ in size and for "synthetic".
      num_classes: more classes than the data set has.
      augmentation: "none", "small" (pad and crop) or "imagenet" (random resized crop); see
        `launcher.data.images.augment.augmentation`.
      flip: also mirror half of the training images, unless the augmentation is "none". By default, where a mirrored
        image is still one of its class.
      mixup, cutmix: alpha of the Beta distribution from which the share of each training image is drawn that is its
        own, the rest being another image's; 0.2 and 1.0 in the papers on ImageNet. With both, each image gets one of
        them with probability 1/2. See `launcher.data.images.mix.Mix`.
      mean, std: of each channel, of pixels scaled to [0, 1], instead of the set's; that of own files is ImageNet's.
      memory_limit_bytes: a set that decodes to more is read from disk as it is needed.
    """
    mix = None if mixup is None and cutmix is None else Mix(mixup=mixup, cutmix=cutmix)
    augment.check(augmentation)
    check_value("image_data.image_size", image_size, image_size is None or image_size >= 1, "1 or more")
    source = _source(name, source)
    is_synthetic = isinstance(source, SyntheticSource)
    if is_synthetic and augmentation != "none":
        raise UsageError(f"image_data.augmentation = {augmentation!r}: must be 'none' for synthetic images")
    facts = _standardised(source.facts, mean, std)
    height, width = (image_size, image_size) if image_size is not None else facts.image_shape[:2]
    if height is None or width is None:
        raise UsageError(f"images of {source.name!r} differ in size; bind image_data.image_size, for instance to 224")
    if num_classes is not None and num_classes < facts.num_classes:
        raise UsageError(f"image_data.num_classes = {num_classes}, but {source.name!r} has {facts.num_classes} classes")
    stored = StoredImages(
        facts=facts,
        image_shape=(height, width, facts.image_shape[2]),
        augmentation=augmentation,
        flip=facts.flip if flip is None else flip,
        mix=mix,
        memory_limit_bytes=memory_limit_bytes,
    )
    details = getattr(source, "details", "")
    if details and not (mean or std):
        details += ", standardised by ImageNet's mean and standard deviation"
    return ImageData(
        name=source.name,
        image_shape=stored.image_shape,
        num_classes=num_classes or facts.num_classes,
        source=source,
        open=functools.partial(source.open, stored),
        num_train_examples=facts.num_train_examples,
        num_eval_examples=facts.num_eval_examples,
        mixed=mix is not None,
        finish_stored=stored.finish if mix is None and getattr(source, "of_bytes", False) else None,
        decode=None if is_synthetic else stored.decode,
        class_names=getattr(source, "class_names", ()),
        details=details,
    )


def _source(name: str | None, source: ImageSource | None) -> ImageSource:
    prefix = "tfds:" if name in TFDS else "folder:" if name and os.path.isdir(os.path.expanduser(name)) else None
    if prefix and name not in _KINDS:
        raise UsageError(f"image_data.name = {name!r} is unknown; did you mean '{prefix}{name}'?")
    return chosen("image_data", name, source, _KINDS, map("tfds:".__add__, TFDS))


def _standardised(facts: Facts, mean: Sequence[float] | None, std: Sequence[float] | None) -> Facts:
    channels = facts.image_shape[2]
    for key, values in (("mean", mean), ("std", std)):
        if values is not None and (len(values) != channels or (key == "std" and min(values) <= 0)):
            raise UsageError(f"image_data.{key} = {values!r} must be {channels} numbers, std above 0")
    return dataclasses.replace(facts, mean=tuple(mean or facts.mean), std=tuple(std or facts.std))
