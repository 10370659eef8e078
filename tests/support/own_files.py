"""Images as users have them: in class folders, TFRecords, all of one set of small pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image

CLASSES = ("ash", "birch", "cedar")
EACH = 20
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])  # of ImageNet


def picture(number: int, *, one_size: bool) -> np.ndarray:
    """Two gradients, brighter with the number, by whose corner it is known."""
    height, width = (8, 8) if one_size else (12 + number % 5, 12 + number % 7)
    rows, columns = np.mgrid[:height, :width]
    return np.stack([number + 3 * rows, number + 5 * columns, np.full((height, width), number)], -1).astype(np.uint8)


def encoded(number: int, *, one_size: bool = True, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.fromarray(picture(number, one_size=one_size)).save(content, kind)
    return content.getvalue()


def standardised(number: int) -> np.ndarray:
    """A picture of one size as batches have it."""
    return (picture(number, one_size=True) / 255 - MEAN) / STD


def write_folders(root: Path, *, one_size: bool = True, numbers: Iterable[int] = range(EACH)) -> Path:
    """Class c has the pictures numbered 20 * c and so on; every third is a JPEG where sizes differ."""
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for index in numbers:
            kind = "PNG" if one_size or index % 3 else "JPEG"
            content = encoded(EACH * label + index, one_size=one_size, kind=kind)
            (root / name / f"{index}.{kind.lower()}").write_bytes(content)
    return root


def example(image: bytes, label: int, names: tuple[str, str] = ("image/encoded", "image/class/label")) -> bytes:
    features = {
        names[0]: tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        names[1]: tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def examples(first_label: int = 0) -> list[bytes]:
    """All pictures, each with its class."""
    return [example(encoded(number), number // EACH + first_label) for number in range(EACH * len(CLASSES))]


def write_tfrecords(root: Path, records: list[bytes], shards: int = 3) -> str:
    """Deals the records out to files; returns their pattern."""
    root.mkdir(parents=True, exist_ok=True)
    return _dealt(records, shards, lambda shard: tf.io.TFRecordWriter(f"{root}/{shard}.tfrecord"), f"{root}/*.tfrecord")


def _dealt(records: list[bytes], shards: int, open_writer: Callable, pattern: str) -> str:
    for shard in range(shards):
        writer = open_writer(shard)
        for record in records[shard::shards]:
            writer.write(record)
        writer.close()
    return pattern
