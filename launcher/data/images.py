"""Labelled images, bound by gin: `image_data.name = 'digits'`.

    digits             1,797 scanned digits in scikit-learn's wheel; nothing to download
    fashion_mnist      70,000 pictures of clothes; python -m launcher.data.prepare fashion_mnist
    tfds:NAME          any TFDS image classification set: tfds:cifar10, tfds:imagenet2012
    folder:DIR         a folder of JPEG, PNG, GIF or BMP files for each class, in DIR or in DIR/train and DIR/val
    tfrecord:GLOB      TFRecord files with image/encoded and image/class/label, or what image_data.features says
    array_record:GLOB  the same in ArrayRecord files
    synthetic          made up, for speed runs

Batches are {"image": float32 [b, height, width, channels], standardised per channel, "label": int32 [b],
"weight": float32 [b]}. With mixup or cutmix, training batches have "label_b", int32 [b], the other label of each mixed
image, and "mix", float32 [b], the share of "label", too.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

from launcher.data import augment, digits, tfds
from launcher.data.batch_spec import BatchSpec
from launcher.data.catalog import DIGITS, TFDS, Facts
from launcher.data.encoded import OwnImages
from launcher.data.folder_images import open_folder
from launcher.data.mix import Mix
from launcher.data.pipeline import Data, RandomAccessData, Shard, identity_of
from launcher.data.record_images import FORMATS, open_records
from launcher.data.stored_images import StoredImages
from launcher.data.synthetic import SyntheticImages
from launcher.data.text.source import refuse
from launcher.errors import UsageError, advice

_TFDS_PREFIX = "tfds:"
_OWN = ("folder", *FORMATS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData:
    """Labelled images of one size: `Data`, and what a model for them has to know.

    Args:
      name: as bound.
      image_shape: (height, width, channels).
      num_classes: labels are 0 to num_classes - 1.
      source: where the batches come from.
      mixed: training images are mixed with others.
      decode: JPEG or PNG files, string [n], to images as evaluation has them; None where there are no such files.
      class_names: by label; empty if unknown.
      details: what a person should know of the set, for the plan.
    """

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int
    source: Data
    mixed: bool = False
    decode: Callable[[tf.Tensor], tf.Tensor] | None = None
    class_names: tuple[str, ...] = ()
    details: str = ""

    @property
    def num_train_examples(self) -> int | None:
        return self.source.num_train_examples

    @property
    def num_eval_examples(self) -> int | None:
        return self.source.num_eval_examples

    def check(self) -> None:
        self.source.check()

    def identity(self) -> str:
        return identity_of(self.source)

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
        return self.source.train_batches(shard)

    def eval_batches(self, shard: Shard) -> tf.data.Dataset:
        return self.source.eval_batches(shard)

    def damage(self, *, seed: int, start: int, stop: int) -> str | None:
        """See `launcher.data.encoded.EncodedData.damage`."""
        find = getattr(self.source, "damage", None)
        return None if find is None else find(seed=seed, start=start, stop=stop)


class _OpenedLater:
    """`Data` that is opened for its first batch, so that a job can be planned where the data is not."""

    def __init__(
        self,
        *,
        num_train_examples: int | None,
        num_eval_examples: int | None,
        check: Callable[[], None],
        make: Callable[[], Data],
        identity: Callable[[], str] | None = None,
    ):
        self.num_train_examples = num_train_examples
        self.num_eval_examples = num_eval_examples
        self.check = check
        self._make = make
        self.identity = identity or (lambda: identity_of(self._data))

    @functools.cached_property
    def _data(self) -> Data:
        self.check()
        return self._make()

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        return self._data.train_batches(shard)

    def eval_batches(self, shard: Shard) -> tf.data.Dataset:
        return self._data.eval_batches(shard)

    def damage(self, **where: int) -> str | None:
        find = getattr(self._data, "damage", None)
        return None if find is None else find(**where)


@gin.configurable
def image_data(
    *,
    name: str = gin.REQUIRED,
    image_size: int | None = None,
    num_classes: int | None = None,
    augmentation: str = "none",
    flip: bool | None = None,
    mixup: float | None = None,
    cutmix: float | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    train_split: str | None = None,
    eval_split: str | None = None,
    eval_files: str | None = None,
    eval_share: float | None = None,
    features: Mapping[str, str] | None = None,
    first_label: int | None = None,
    channels: int | None = None,
    train_examples: int | None = None,
    eval_examples: int | None = None,
    memory_limit_bytes: int = 2 * 1024**3,
) -> ImageData:
    """Labelled images by name. Decodes none: that happens with the first batch.

    Args:
      name: "digits", "fashion_mnist", "synthetic", "tfds:NAME", "folder:DIR", "tfrecord:GLOB" or "array_record:GLOB".
      image_size: height and width in pixels; needed where stored images differ in size and for "synthetic".
      num_classes: more classes than the data set has; needed for records and "synthetic".
      augmentation: "none", "small" (pad and crop) or "imagenet" (random resized crop); see
        `launcher.data.augment.augmentation`.
      flip: also mirror half of the training images, unless the augmentation is "none". By default, where a mirrored
        image is still one of its class.
      mixup, cutmix: alpha of the Beta distribution from which the share of each training image is drawn that is its
        own, the rest being another image's; 0.2 and 1.0 in the papers on ImageNet. With both, each image gets one of
        them with probability 1/2. See `launcher.data.mix.Mix`.
      mean, std: of each channel, of pixels scaled to [0, 1], instead of the set's; that of own files is ImageNet's.
      train_split, eval_split: of a TFDS set, such as "train[:90%]"; of "folder:DIR", folders in DIR.
      eval_files: pattern of record files to evaluate on.
      eval_share: how much of own files to hold out where none are to evaluate on: 0.1 by default; 0 for none.
      features: of records: {"image": NAME, "label": NAME}, or one of them, instead of those of ImageNet's shards.
      first_label: of records: the label of the first class, 0 by default; many shards of ImageNet count from 1.
      channels: of own files: 3, the default, or 1 for grey.
      train_examples, eval_examples: how many to make up, for "synthetic": 10,000 and 1,000 by default.
      memory_limit_bytes: a set that decodes to more is read from disk as it is needed.

    Raises:
      UsageError: an unknown name or augmentation, or arguments that do not fit the data set.
    """
    mix = None if mixup is None and cutmix is None else Mix(mixup=mixup, cutmix=cutmix)
    if augmentation not in augment.AUGMENTATIONS:
        known = advice(augmentation, augment.AUGMENTATIONS)
        raise UsageError(f"image_data.augmentation = {augmentation!r} is unknown{known}")
    if image_size is not None and image_size < 1:
        raise UsageError(f"image_data.image_size = {image_size} must be 1 or more")
    if name == "synthetic":
        return _synthetic(
            image_size=image_size,
            num_classes=num_classes,
            augmentation=augmentation,
            mix=mix,
            train_examples=10_000 if train_examples is None else train_examples,
            eval_examples=1_000 if eval_examples is None else eval_examples,
        )
    if train_examples is not None or eval_examples is not None:
        raise UsageError(
            f"image_data.train_examples and eval_examples say how many images to make up, but {name!r} has its own; "
            "for a part of a TFDS set bind image_data.train_split = 'train[:10%]'"
        )
    own = _own(
        name,
        num_classes=num_classes,
        of_files={"eval_share": eval_share, "channels": channels},
        of_records={"eval_files": eval_files, "features": features, "first_label": first_label},
        splits={"train_split": train_split, "eval_split": eval_split},
    )
    facts = _standardised(own.facts if own else _facts(name, train_split, eval_split), mean, std)
    stored = StoredImages(
        facts=facts,
        image_shape=_image_shape(name, facts, image_size),
        augmentation=augmentation,
        flip=facts.flip if flip is None else flip,
        mix=mix,
    )
    check: Callable[[], None]
    make: Callable[[], Data]
    identity: Callable[[], str] | None = None
    if own is not None:
        check, make = own.check, functools.partial(stored.from_own, own, memory_limit_bytes)
        identity = own.train.identity
    elif name == "digits":
        check, make = digits.check, stored.from_digits
    else:
        tfds_name = name.removeprefix(_TFDS_PREFIX)
        check = functools.partial(_check_tfds, tfds_name, facts)
        make = functools.partial(stored.from_tfds, tfds_name, memory_limit_bytes)
        identity = functools.partial(tfds.identity, tfds_name, facts.train_split)
    usual = "" if mean or std else ", standardised by ImageNet's mean and standard deviation"
    return ImageData(
        name=name,
        image_shape=stored.image_shape,
        num_classes=_num_classes(name, facts, num_classes),
        source=_OpenedLater(
            num_train_examples=facts.num_train_examples,
            num_eval_examples=facts.num_eval_examples,
            check=check,
            make=make,
            identity=identity,
        ),
        mixed=mix is not None,
        decode=stored.decode,
        class_names=own.class_names if own else (),
        details=f"{own.details}{usual}" if own else "",
    )


def _own(
    name: str,
    *,
    num_classes: int | None,
    of_files: Mapping[str, Any],
    of_records: Mapping[str, Any],
    splits: Mapping[str, Any],
) -> OwnImages | None:
    """The set of the user's own files that goes by this name; None where it is another kind of set."""
    kind, _, place = name.partition(":")
    if kind not in FORMATS:
        refuse("image_data", name, of_records, "'tfrecord:GLOB' or 'array_record:GLOB'")
    if kind not in _OWN:
        refuse("image_data", name, of_files, "'folder:DIR', 'tfrecord:GLOB' or 'array_record:GLOB'")
        return None
    if of_files["channels"] not in (None, 1, 3):
        raise UsageError(f"image_data.channels = {of_files['channels']} must be 1 or 3")
    common = {**of_files, "channels": of_files["channels"] or 3}
    if kind == "folder":
        return open_folder(place, **splits, **common)
    refuse("image_data", name, splits, "'tfds:NAME' or 'folder:DIR'")
    return open_records(kind, place, num_classes=num_classes, **of_records, **common)


def _standardised(facts: Facts, mean: Sequence[float] | None, std: Sequence[float] | None) -> Facts:
    """The facts with the mean and the standard deviation that are bound."""
    channels = facts.image_shape[2]
    for key, values in (("mean", mean), ("std", std)):
        if values is not None and (len(values) != channels or (key == "std" and min(values) <= 0)):
            raise UsageError(
                f"image_data.{key} = {values!r} must be {channels} numbers{', all above 0' if key == 'std' else ''}"
            )
    return dataclasses.replace(facts, mean=tuple(mean or facts.mean), std=tuple(std or facts.std))


def _facts(name: str, train_split: str | None, eval_split: str | None) -> Facts:
    if name == "fashion_mnist" or name.startswith(_TFDS_PREFIX):
        return tfds.facts(name.removeprefix(_TFDS_PREFIX), train_split=train_split, eval_split=eval_split)
    if name == "digits":
        if train_split is not None or eval_split is not None:
            raise UsageError("image_data.train_split and eval_split are for TFDS sets; 'digits' has one fixed split")
        return DIGITS
    names = ("digits", "fashion_mnist", "synthetic", *(f"{own}:" for own in _OWN), *map(_TFDS_PREFIX.__add__, TFDS))
    close = advice(name if ":" not in name else f"{name.partition(':')[0]}:", names)
    if name in TFDS or os.path.isdir(os.path.expanduser(name)):
        close = f"; did you mean '{_TFDS_PREFIX if name in TFDS else 'folder:'}{name}'?"
    raise UsageError(f"image_data.name = {name!r} is unknown{close}")


def _image_shape(name: str, facts: Facts, image_size: int | None) -> tuple[int, int, int]:
    height, width, channels = facts.image_shape
    if image_size is not None:
        return image_size, image_size, channels
    if height is None or width is None:
        raise UsageError(f"images of {name!r} differ in size; bind image_data.image_size, for instance to 224")
    return height, width, channels


def _num_classes(name: str, facts: Facts, num_classes: int | None) -> int:
    if num_classes is None:
        return facts.num_classes
    if num_classes < facts.num_classes:
        raise UsageError(f"image_data.num_classes = {num_classes}, but {name!r} has {facts.num_classes} classes")
    return num_classes


def _synthetic(
    *,
    image_size: int | None,
    num_classes: int | None,
    augmentation: str,
    mix: Mix | None,
    train_examples: int,
    eval_examples: int,
) -> ImageData:
    if image_size is None or num_classes is None:
        raise UsageError("image_data.name = 'synthetic' needs image_data.image_size and image_data.num_classes")
    counts = {"num_classes": num_classes, "train_examples": train_examples, "eval_examples": eval_examples}
    for key, value in counts.items():
        if value < 1:
            raise UsageError(f"image_data.{key} = {value} must be 1 or more")
    if augmentation != "none":
        raise UsageError(
            f"image_data.augmentation = {augmentation!r}: synthetic images measure a model's speed and are not "
            "augmented; bind it to 'none'"
        )
    shape = (image_size, image_size, 3)
    train, evaluation = (
        SyntheticImages(length=length, image_shape=shape, num_classes=num_classes)
        for length in (train_examples, eval_examples)
    )
    source = RandomAccessData(train=train, evaluation=evaluation, mix=mix)
    return ImageData(name="synthetic", image_shape=shape, num_classes=num_classes, source=source, mixed=mix is not None)


def _check_tfds(name: str, facts: Facts) -> None:
    tfds.check_prepared(tfds.open_builder(name), (facts.train_split, facts.eval_split))
