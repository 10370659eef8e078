"""Images in the tf.train.Examples of TFRecord files: `image_data.name = 'tfrecord:GLOB'`.

Each record has an image's file and its label. Without `eval_files`, a share of the records is held out by a
hash of their file's name and their number in it.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from launcher.data import files
from launcher.data.images.encoded import problem
from launcher.data.images.own_images import OwnImages
from launcher.data.records import TFRecords
from launcher.errors import UsageError, listed
from launcher.machine.no_autograph import no_autograph

FEATURES = {"image": "image/encoded", "label": "image/class/label"}
"""The names in everybody's ImageNet shards."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordImages:
    """Images of records; see `launcher.data.images.encoded.EncodedImages`."""

    records: TFRecords  # each a `tf.train.Example`
    features: Mapping[str, str]  # what it calls its "image", a JPEG, PNG, GIF or BMP file, and its "label", one integer
    first_label: int  # of the first class; labels of batches count from 0
    num_classes: int
    otherwise: str = "record_images.num_classes, or record_images.first_label where labels do not count from 0"
    """The bindings to look at where a label is of no class."""

    def __len__(self) -> int:
        return len(self.records)

    @no_autograph
    def fetch(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        image, label = self.features["image"], self.features["label"]
        features = {image: tf.io.FixedLenFeature([], tf.string), label: tf.io.FixedLenFeature([], tf.int64)}
        parsed = tf.io.parse_example(self.records.fetch(indices), features)
        labels = parsed[label] - self.first_label
        is_class = (labels >= 0) & (labels < self.num_classes)
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(is_class), ["label out of range"])]):
            return {"image": parsed[image], "label": tf.cast(labels, tf.int32)}

    def name(self, index: int) -> str:
        return self.records.name(index)

    def key(self, index: int) -> str:
        return self.records.key(index)

    def select(self, chosen: np.ndarray) -> RecordImages:
        return dataclasses.replace(self, records=self.records.select(chosen))

    def opened(self, index: int) -> io.BytesIO:
        image, label = self._image_and_label(index)
        last = self.first_label + self.num_classes - 1
        if not self.first_label <= label <= last:
            classes = f"{self.num_classes} classes are labelled {self.first_label} to {last}"
            raise UsageError(f"its label is {label}, and {classes}; bind {self.otherwise}")
        return io.BytesIO(image)

    def identity(self) -> str:
        return self.records.identity()

    def damaged(self) -> list[str]:
        """Raises UsageError where the first record of a file is no labelled image; the others are not read."""
        for index in self.records.firsts():
            self.check(index)
        return []

    def check(self, index: int) -> None:
        """Raises UsageError where a record is no labelled image."""
        if wrong := problem(self, index):
            raise UsageError(f"{self.name(index)}: {wrong}")

    def _image_and_label(self, index: int) -> tuple[bytes, int]:
        content = self.records.read(index)
        try:
            features = tf.train.Example.FromString(content).features.feature
        except Exception as error:  # protobuf's implementations have exceptions of their own
            raise UsageError(f"it is no tf.train.Example ({type(error).__name__})") from None
        image, label = self.features["image"], self.features["label"]
        for role, name, kind in (("image", image, "bytes_list"), ("label", label, "int64_list")):
            if name not in features:
                raise UsageError(f"no feature {name!r} but {listed(features) or 'none'}; bind record_images.features")
            if len(getattr(features[name], kind).value) != 1:
                raise UsageError(f"its feature {name!r}, the {role}, is not one value of {kind}")
        return features[image].bytes_list.value[0], features[label].int64_list.value[0]


def images_of_split(builder: Any, split: str, num_classes: int) -> RecordImages:
    """Images of a prepared TFDS split in tfrecord, in the order of its files.

    Raises:
      UsageError: a file is damaged or cut, or the split has no labels.
    """
    parts = builder.info.splits[split].file_instructions
    records = TFRecords.open([str(part.filename) for part in parts])
    for part, count in zip(parts, np.bincount(records.file, minlength=len(parts)), strict=True):
        if count != part.examples_in_shard:
            raise UsageError(f"{part.filename} has {count} of its {part.examples_in_shard} examples: prepare it anew")
    first, last = (
        np.array(column)[records.file] for column in zip(*((p.skip, p.skip + p.take) for p in parts), strict=True)
    )
    images = RecordImages(
        records=records.select((records.number >= first) & (records.number < last)),
        features={"image": "image", "label": "label"},
        first_label=0,
        num_classes=num_classes,
        otherwise="tfds_images.train_split or tfds_images.eval_split to a split with labels",
    )
    images.check(0)
    return images


@gin.configurable
def record_images(
    pattern: str,
    *,
    num_classes: int = gin.REQUIRED,
    features: Mapping[str, str] | None = None,
    first_label: int = 0,
    eval_files: str | None = None,
    eval_share: float | None = None,
    channels: int = 3,
) -> OwnImages:
    """Images of own records: `image_data.name = 'tfrecord:GLOB'`. Finds where records are and reads a few of them.

    Args:
      pattern: of the files to train on.
      num_classes: how many classes there are, which records do not say.
      features: {"image": NAME, "label": NAME}, or one of them, instead of those of ImageNet's shards.
      first_label: the label of the first class; many shards of ImageNet count from 1.
      eval_files: pattern of files to evaluate on.
      eval_share: how much to hold out where there are none: 0.1 by default; 0 for none.
      channels: of the images that come out: 3, or 1 for grey.
    """
    for key, value in (features or {}).items():
        if key not in FEATURES or not isinstance(value, str):
            raise UsageError(f"record_images.features = {features!r} must name 'image', 'label' or both")

    name = f"tfrecord:{pattern}"

    def images(files_of: str, binding: str) -> RecordImages:
        return RecordImages(
            records=TFRecords.open(files.matching(files_of, binding)),
            features={**FEATURES, **(features or {})},
            first_label=first_label,
            num_classes=num_classes,
        )

    return OwnImages(
        images(pattern, name),
        images(eval_files, "record_images.eval_files") if eval_files is not None else None,
        name=name,
        num_classes=num_classes,
        channels=channels,
        eval_share=eval_share,
        evaluated_on=eval_files or "",
        classes=f"{num_classes} classes",
    )
