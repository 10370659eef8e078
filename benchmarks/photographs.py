"""Photographs a second beside plain tf.data that does the same, turn by turn on one machine. Prints JSON.

    python benchmarks/photographs.py --images=2000
    PEER_PYTHON=/path/to/venv/bin/python python benchmarks/photographs.py --images=2000

Both read JPEGs from files in class folders, and from TFRecords, in a random order; cut a random window, decoding no
more than it needs; scale it to 224 pixels, mirror half of them, and standardise. Nothing is trained. Every round begins
with the other one and opens the data anew; the rate is that after the first batch, which is timed by itself, as is the
end of the iterator, which TensorFlow 2.21 may wait for. Ratios are plain tf.data's time divided by Launcher's in the
same round: above 1, Launcher is faster. The photographs are made up: noise at several scales, in sizes as ImageNet's.

With PEER_PYTHON, whose environment needs grain, torch and pillow, torch's DataLoader (two worker processes) and Grain
(two threads) read the same files with Pillow: window, scaling, mirroring and standardising as torchvision's transforms
have them. Each, Launcher too, is then a process of its own, and a ratio is a peer's time divided by Launcher's.

"stored" are photographs decoded once to 256 x 256 bytes in one memory-mapped .npy: a random window of 224, half of them
mirrored, standardised, by a `RandomAccessData` of them and by NumPy, a batch at a time in one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from measuring import cpu_seconds, spread

SIZE, STORED, BATCH, CLASSES = 224, 256, 32, 2
SIDES = ("launcher", "torch", "grain")
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
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if options.side:
        print(json.dumps(_side(options.side, Path(options.folder), options.images // BATCH)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_up(folder, options.images)
        result = compare(folder, options)
        if "PEER_PYTHON" in os.environ:
            result["peers"] = beside_peers(folder, options)
        print(json.dumps(result, indent=2))


def make_up(folder: Path, count: int) -> None:
    """Writes them as files, `CLASS/NUMBER.jpg`, and once more into `all.tfrecord`."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    shape = (count, STORED, STORED, 3)
    stored = np.lib.format.open_memmap(folder / "stored.npy", mode="w+", dtype=np.uint8, shape=shape)
    with tf.io.TFRecordWriter(str(folder / "all.tfrecord")) as records:
        for number in range(count):
            height, width = (375, 500) if number % 4 else (500, 375)
            pixels = sum(
                np.asarray(tf.image.resize(random.uniform(0, 255, (cells, cells, 3)), (height, width))) / 3
                for cells in (4, 16, 64)
            )
            encoded = tf.io.encode_jpeg(pixels.astype(np.uint8), quality=90).numpy()
            stored[number] = tf.cast(tf.image.resize(pixels, (STORED, STORED)), tf.uint8).numpy()
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
        "stored": (launcher_stored(folder / "stored.npy"), plain_stored(folder / "stored.npy")),
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


def launcher_stored(path: Path):
    """Launcher's batches of stored images, with a function of a user's own that cuts, mirrors and standardises."""
    import numpy as np
    import tensorflow as tf

    from launcher.data.images.augment import flips, offsets
    from launcher.data.pipeline import ArrayExamples, RandomAccessData, Shard

    images = np.load(path, mmap_mode="r")
    scale = np.tile(1 / (255 * np.asarray(STD)), SIZE).astype(np.float32)
    shift = np.tile(np.asarray(MEAN) / np.asarray(STD), SIZE).astype(np.float32)

    def cut(batch, seeds):
        def one(of):
            image, top, left, mirrored = of
            window = tf.slice(image, [top, left, 0], [SIZE, SIZE, 3])
            window = tf.cond(mirrored, lambda: tf.reverse(window, [1]), lambda: window)
            return tf.reshape(
                tf.cast(tf.reshape(window, [SIZE, 3 * SIZE]), tf.float32) * scale - shift, [SIZE, SIZE, 3]
            )

        places = *offsets(seeds, padding=(STORED - SIZE) // 2), flips(seeds)
        return {**batch, "image": tf.map_fn(one, (batch["image"], *places), fn_output_signature=tf.float32)}

    labels = np.arange(len(images), dtype=np.int32) % CLASSES
    data = RandomAccessData(train=ArrayExamples({"image": images, "label": labels}), augment=cut)
    return data.train_batches(Shard(global_batch_size=BATCH, seed=0))


def plain_stored(path: Path):
    """The read that one writes in NumPy: what of a memory-mapped file is needed, one image after another."""
    import numpy as np

    images = np.load(path, mmap_mode="r")
    scale = np.tile(1 / (255 * np.asarray(STD)), SIZE).astype(np.float32)
    shift = np.tile(np.asarray(MEAN) / np.asarray(STD), SIZE).astype(np.float32)

    class Batches:
        def __iter__(self):
            random = np.random.default_rng(0)
            while True:
                order = random.permutation(len(images))
                for first in range(0, len(order) - BATCH + 1, BATCH):
                    batch = np.empty([BATCH, SIZE, 3 * SIZE], np.float32)
                    for place, number in enumerate(order[first : first + BATCH]):
                        top, left = random.integers(STORED - SIZE + 1, size=2)
                        window = images[number, top : top + SIZE, left : left + SIZE]
                        window = window[:, ::-1] if random.random() < 0.5 else window
                        np.multiply(window.reshape(SIZE, -1), scale, out=batch[place])
                    batch -= shift
                    yield batch.reshape(BATCH, SIZE, SIZE, 3), order[first : first + BATCH] % CLASSES

    return Batches()


def beside_peers(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Each reads the files in a process of its own, in turns."""
    rounds = [
        {side: _run(side, folder, options.images) for side in SIDES[number % 3 :] + SIDES[: number % 3]}
        for number in range(options.rounds)
    ]
    result: dict[str, Any] = {}
    for side in SIDES:
        each = [one[side] for one in rounds]
        result[side] = {key: spread([one[key] for one in each]) for key in each[0]}
        for key in ("seconds", "processor"):
            result[side][f"{key}_ratio"] = spread([one[side][key] / one["launcher"][key] for one in rounds])
    return result


def _run(side: str, folder: Path, images: int) -> dict[str, float]:
    python = sys.executable if side == "launcher" else os.environ["PEER_PYTHON"]
    command = [python, __file__, f"--side={side}", f"--folder={folder}", f"--images={images}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _side(side: str, folder: Path, count: int) -> dict[str, float]:
    """Reads two batches, then `count` timed ones; processes that it started have ended when their time is read."""
    if side == "launcher":
        from launcher.data.images.folder_images import folder_images

        iterator = iter(launcher(folder_images(str(folder / "files"), eval_share=0)))
    else:
        iterator = iter({"torch": _torch, "grain": _grain}[side](folder / "files", count + 2))
    next(iterator), next(iterator)
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(iterator)
    seconds, own = time.perf_counter() - begun, time.process_time() - used
    del iterator
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "images_per_second": count * BATCH / seconds,
        "seconds": seconds,
        # Of worker processes all is counted, their first two batches, too.
        "processor": own + (children.ru_utime + children.ru_stime) * count / (count + 2),
    }


class _Photographs:
    """Files of class folders by number, as a map-style data set of torch has them and a source of Grain."""

    def __init__(self, root: Path):
        self.paths = sorted(str(path) for path in root.rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int):
        import math
        import random

        import numpy as np
        from PIL import Image

        image = Image.open(self.paths[number]).convert("RGB")
        for _ in range(10):
            area = image.width * image.height * random.uniform(0.08, 1)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= image.width and 0 < height <= image.height:
                break
        else:
            width = height = min(image.size)
        left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = (np.asarray(image, np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
        return pixels, int("class_1" in self.paths[number])


def _torch(root: Path, batches: int):
    import torch

    photographs = _Photographs(root)
    epochs = torch.utils.data.RandomSampler(photographs, num_samples=batches * BATCH)
    return torch.utils.data.DataLoader(photographs, BATCH, sampler=epochs, num_workers=2, drop_last=True)


def _grain(root: Path, batches: int):
    import grain

    photographs = _Photographs(root)
    stream = grain.MapDataset.range(len(photographs)).shuffle(seed=0).repeat().map(photographs.__getitem__)
    return stream.to_iter_dataset(grain.ReadOptions(num_threads=2)).batch(BATCH, drop_remainder=True)


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
