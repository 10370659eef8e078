"""Labelled images, bound by gin: `image_data.name = 'digits'`.

    digits             1,797 scanned digits in scikit-learn's wheel; nothing to download
    fashion_mnist      70,000 pictures of clothes; python -m launcher.data.prepare fashion_mnist
    tfds:NAME          any TFDS image classification set: tfds:cifar10, tfds:imagenet2012
    synthetic          made up, for speed runs

Batches are {"image": float32 [b, height, width, channels], standardised per channel, "label": int32 [b],
"weight": float32 [b]}. With mixup or cutmix, training batches have "label_b", int32 [b], the other label of each mixed
image, and "mix", float32 [b], the share of "label", too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import gin
import tensorflow as tf

from launcher.data import augment, digits, tfds
from launcher.data.batch_spec import BatchSpec
from launcher.data.catalog import DIGITS, TFDS, Facts
from launcher.data.mix import Mix
from launcher.data.pipeline import Data, RandomAccessData, Shard
from launcher.data.stored_images import StoredImages
from launcher.data.synthetic import SyntheticImages
from launcher.errors import UsageError, advice

_TFDS_PREFIX = "tfds:"


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
    """

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int
    source: Data
    mixed: bool = False
    decode: Callable[[tf.Tensor], tf.Tensor] | None = None

    @property
    def num_train_examples(self) -> int | None:
        return self.source.num_train_examples

    @property
    def num_eval_examples(self) -> int | None:
        return self.source.num_eval_examples

    def check(self) -> None:
        self.source.check()

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


class _OpenedLater:
    """`Data` that is opened for its first batch, so that a job can be planned where the data is not."""

    def __init__(
        self,
        *,
        num_train_examples: int | None,
        num_eval_examples: int | None,
        check: Callable[[], None],
        make: Callable[[], Data],
    ):
        self.num_train_examples = num_train_examples
        self.num_eval_examples = num_eval_examples
        self.check = check
        self._make = make

    @functools.cached_property
    def _data(self) -> Data:
        self.check()
        return self._make()

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        return self._data.train_batches(shard)

    def eval_batches(self, shard: Shard) -> tf.data.Dataset:
        return self._data.eval_batches(shard)


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
    train_split: str | None = None,
    eval_split: str | None = None,
    train_examples: int | None = None,
    eval_examples: int | None = None,
    memory_limit_bytes: int = 2 * 1024**3,
) -> ImageData:
    """Labelled images by name. Reads no image: that happens with the first batch.

    Args:
      name: "digits", "fashion_mnist", "synthetic" or "tfds:NAME".
      image_size: height and width in pixels; needed where stored images differ in size and for "synthetic".
      num_classes: more classes than the data set has; needed for "synthetic".
      augmentation: "none", "small" (pad and crop) or "imagenet" (random resized crop); see
        `launcher.data.augment.augmentation`.
      flip: also mirror half of the training images, unless the augmentation is "none". By default, where a mirrored
        image is still one of its class.
      mixup, cutmix: alpha of the Beta distribution from which the share of each training image is drawn that is its
        own, the rest being another image's; 0.2 and 1.0 in the papers on ImageNet. With both, each image gets one of
        them with probability 1/2. See `launcher.data.mix.Mix`.
      train_split, eval_split: of a TFDS set, such as "train[:90%]".
      train_examples, eval_examples: how many to make up, for "synthetic": 10,000 and 1,000 by default.
      memory_limit_bytes: a TFDS set that decodes to more is streamed from disk.

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
    facts = _facts(name, train_split, eval_split)
    stored = StoredImages(
        facts=facts,
        image_shape=_image_shape(name, facts, image_size),
        augmentation=augmentation,
        flip=facts.flip if flip is None else flip,
        mix=mix,
    )
    if name == "digits":
        check, make = digits.check, stored.from_digits
    else:
        tfds_name = name.removeprefix(_TFDS_PREFIX)
        check = functools.partial(_check_tfds, tfds_name, facts)
        make = functools.partial(stored.from_tfds, tfds_name, memory_limit_bytes)
    return ImageData(
        name=name,
        image_shape=stored.image_shape,
        num_classes=_num_classes(name, facts, num_classes),
        source=_OpenedLater(
            num_train_examples=facts.num_train_examples,
            num_eval_examples=facts.num_eval_examples,
            check=check,
            make=make,
        ),
        mixed=mix is not None,
        decode=stored.decode,
    )


def _facts(name: str, train_split: str | None, eval_split: str | None) -> Facts:
    if name == "fashion_mnist" or name.startswith(_TFDS_PREFIX):
        return tfds.facts(name.removeprefix(_TFDS_PREFIX), train_split=train_split, eval_split=eval_split)
    if name == "digits":
        if train_split is not None or eval_split is not None:
            raise UsageError("image_data.train_split and eval_split are for TFDS sets; 'digits' has one fixed split")
        return DIGITS
    names = ("digits", "fashion_mnist", "synthetic", *(_TFDS_PREFIX + known for known in TFDS))
    close = f"; did you mean {_TFDS_PREFIX + name!r}?" if name in TFDS else advice(name, names)
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
