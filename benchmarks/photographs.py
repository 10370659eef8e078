"""Photographs a second beside plain tf.data that does the same, turn by turn on one machine. Prints JSON.

    python benchmarks/photographs.py --images=2000

Both read JPEGs from files in class folders, and from TFRecords, in a random order; cut a random window, decoding no
more than it needs; scale it to 224 pixels, mirror half of them, and standardise. Nothing is trained. Every round begins
with the other one and opens the data anew; the rate is that after the first batch, which is timed by itself, as is the
end of the iterator, which TensorFlow 2.21 may wait for. Ratios are plain tf.data's time divided by Launcher's in the
same round: above 1, Launcher is faster. The photographs are made up: noise at several scales, in sizes as ImageNet's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from measuring import cpu_seconds, spread

SIZE, BATCH, CLASSES = 224, 32, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Timed(NamedTuple):
    """Seconds by the clock until the first batch, for the other ones, and until the iterator is gone; processor seconds
    of all batches."""

    first: float
    rest: float
    end: float
    processor: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="made up, and read of each kind in one round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    with tempfile.TemporaryDirectory() as folder:
        make_up(Path(folder), options.images)
        print(json.dumps(compare(Path(folder), options), indent=2))


def make_up(folder: Path, count: int) -> None:
    """Writes them as files, `CLASS/NUMBER.jpg`, and once more into `all.tfrecord`."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    with tf.io.TFRecordWriter(str(folder / "all.tfrecord")) as records:
        for number in range(count):
            height, width = (375, 500) if number % 4 else (500, 375)
            pixels = sum(
                np.asarray(tf.image.resize(random.uniform(0, 255, (cells, cells, 3)), (height, width))) / 3
                for cells in (4, 16, 64)
            )
            encoded = tf.io.encode_jpeg(pixels.astype(np.uint8), quality=90).numpy()
            label = number % CLASSES
            path = folder / "files" / f"class_{label}" / f"{number:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded)
            features = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            records.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def compare(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Medians and ranges of all rounds."""
    from launcher.data.images.folder_images import folder_images
    from launcher.data.images.record_images import record_images

    sources = {
        "files": (launcher(folder_images(str(folder / "files"), eval_share=0)), plain_files(folder / "files")),
        "records": (
            launcher(record_images(str(folder / "all.tfrecord"), num_classes=CLASSES, eval_share=0)),
            plain_records(folder / "all.tfrecord"),
        ),
    }
    batches = options.images // BATCH
    result: dict[str, Any] = {"images": options.images, "rounds": options.rounds}
    for name, pair in sources.items():
        found: tuple[list[Timed], list[Timed]] = ([], [])
        for each in pair:
            _timed(each, 2)
        for number in range(options.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                found[which].append(_timed(pair[which], batches))
        ours, plain = found
        result[name] = {
            "images_per_second": spread([(batches - 1) * BATCH / one.rest for one in ours]),
            "ratio": spread([other.rest / own.rest for own, other in zip(ours, plain, strict=True)]),
            "cpu_ratio": spread([other.processor / own.processor for own, other in zip(ours, plain, strict=True)]),
        }
        for what in ("first", "end"):
            for whose, timed in (("", ours), ("plain_", plain)):
                result[name][f"{whose}{what}_seconds"] = spread([getattr(one, what) for one in timed])
    return result


def launcher(source: object):
    """Launcher's batches, as a run on one device has them."""
    from launcher.data.images.image_data import image_data
    from launcher.data.pipeline import Shard

    data = image_data(source=source, image_size=SIZE, augmentation="imagenet")
    shard = Shard(global_batch_size=BATCH, num_replicas=1, first_replica=0, local_replicas=1, seed=0)
    return data.train_batches(shard)


def plain_files(root: Path):
    """As TensorFlow's guide to tf.data reads files."""
    import tensorflow as tf

    paths = sorted(str(path) for path in root.rglob("*.jpg"))
    labels = [int(Path(path).parent.name.removeprefix("class_")) for path in paths]
    examples = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths)).repeat()
    return _plain(examples, lambda path, label: (tf.io.read_file(path), label))


def plain_records(path: Path):
    """As TensorFlow's guide to TFRecords reads them."""
    import tensorflow as tf

    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parsed = tf.io.parse_single_example(record, features)
        return parsed["image/encoded"], parsed["image/class/label"]

    return _plain(tf.data.TFRecordDataset(str(path)).shuffle(2000).repeat(), parse)


def _plain(examples, encoded):
    import tensorflow as tf

    def one(*example):
        image, label = encoded(*example)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(image),
            tf.zeros([1, 0, 4]),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.concat([begin[:2], size[:2]], axis=0)
        pixels = tf.image.resize(tf.image.decode_and_crop_jpeg(image, window, channels=3), (SIZE, SIZE))
        pixels = tf.image.random_flip_left_right(pixels)
        return (pixels / 255.0 - MEAN) / STD, label

    batches = examples.map(one, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH, drop_remainder=True)
    return batches.prefetch(tf.data.AUTOTUNE)


def _timed(batches, count: int) -> Timed:
    """Of so many batches; what is made ahead of the last is not waited for."""
    begun, used = time.perf_counter(), cpu_seconds()
    iterator = iter(batches)
    next(iterator)
    first = time.perf_counter()
    for _ in range(count - 1):
        next(iterator)
    last = time.perf_counter()
    processor = cpu_seconds() - used
    del iterator
    return Timed(first - begun, last - first, time.perf_counter() - last, processor)


if __name__ == "__main__":
    main()
