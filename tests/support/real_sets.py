"""Tiny ImageNet, CIFAR-10, WMT 2014, lm1b and PG-19: prepared by TFDS's own builders, from files in their formats.

Only what is in the archives is made up, and nothing is downloaded: the download manager hands over a folder.
"""

from __future__ import annotations

import importlib
import io
import itertools
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

# Of ImageNet and of CIFAR-10, and of neither as it was published.
TRAIN_IMAGES, HELD_OUT_IMAGES = 45, 19

_SYNSETS = ("n01440764", "n02066245", "n03126707", "n04525305", "n13133613")

_NUMBERS = {
    "en": ("one", "two", "three", "four", "five", "six", "seven", "eight"),
    "de": ("eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"),
}


def photo(index: int) -> np.ndarray:
    """A photograph of its own size, uint8 [height, width, 3]."""
    height, width = 36 + index % 9, 36 + index % 13
    rows, columns = np.mgrid[:height, :width]
    return np.stack([(index * 9 + step * rows + 2 * columns) % 256 for step in (1, 3, 5)], axis=-1).astype(np.uint8)


def sentences(language: str, count: int) -> list[str]:
    """Sentence n in one language is the translation of sentence n in the other."""
    triples = itertools.cycle(itertools.product(_NUMBERS[language], repeat=3))
    word = {"en": "and", "de": "und"}[language]
    return [f"{a} {word} {b} {word} {c}" for a, b, c in itertools.islice(triples, count)]


def prepare(folder: Path) -> None:
    """Prepares imagenet2012, cifar10, wmt14_translate/de-en, lm1b and pg19 in `folder`, in several files a split."""
    import tensorflow_datasets as tfds

    source = folder / "source"
    _write_imagenet(source)
    _write_cifar(source / "cifar-10-batches-bin")
    _write_wmt(source)
    _write_lm1b(source / "1-billion-word-language-modeling-benchmark-r13output")
    _write_pg19(source / "pg19")
    tfds.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tfds.download.DownloadManager,
            "download_and_extract",
            lambda self, urls: tf.nest.map_structure(lambda _: str(source), urls),
        )
        books = importlib.import_module("tensorflow_datasets.datasets.pg19.pg19_dataset_builder")
        patch.setattr(books, "_DATA_DIR", str(source / "pg19"))
        for name in ("imagenet2012", "cifar10", "wmt14_translate/de-en", "lm1b", "pg19"):
            tfds.builder(name, data_dir=folder, try_gcs=False).download_and_prepare(
                download_config=tfds.download.DownloadConfig(manual_dir=source, num_shards=3, try_download_gcs=False)
            )


def _jpeg(index: int) -> bytes:
    return tf.io.encode_jpeg(photo(index), quality=95).numpy()


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _write_imagenet(folder: Path) -> None:
    folder.mkdir(parents=True)
    classes = {
        f"{synset}.tar": _tar(
            {f"{synset}_{index}.JPEG": _jpeg(index) for index in range(number, TRAIN_IMAGES, len(_SYNSETS))}
        )
        for number, synset in enumerate(_SYNSETS)
    }
    held_out = {f"ILSVRC2012_val_{index + 1:08}.JPEG": _jpeg(100 + index) for index in range(HELD_OUT_IMAGES)}
    (folder / "ILSVRC2012_img_train.tar").write_bytes(_tar(classes))
    (folder / "ILSVRC2012_img_val.tar").write_bytes(_tar(held_out))


def _write_cifar(folder: Path) -> None:
    folder.mkdir()
    random = np.random.default_rng(0)
    (folder / "batches.meta.txt").write_text("\n".join(f"class{label}" for label in range(10)) + "\n")
    sizes = {**{f"data_batch_{part}.bin": TRAIN_IMAGES // 5 for part in range(1, 6)}, "test_batch.bin": HELD_OUT_IMAGES}
    for name, count in sizes.items():
        records = random.integers(0, 256, (count, 1 + 32 * 32 * 3), np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())


def _write_wmt(folder: Path) -> None:
    parallel = {
        "training/europarl-v7.de-en": slice(0, 40),
        "commoncrawl.de-en": slice(40, 80),
        "training/news-commentary-v9.de-en": slice(80, 120),
        "dev/newstest2013": slice(0, 10),
    }
    for name, part in parallel.items():
        for language in _NUMBERS:
            path = folder / f"{name}.{language}"
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(sentences(language, 120)[part]))
    for role, language in (("src", "de"), ("ref", "en")):
        segments = [f'<seg id="{number}">{line}</seg>' for number, line in enumerate(sentences(language, 11), 1)]
        (folder / f"dev/newstest2014-deen-{role}.{language}.sgm").write_text("\n".join(segments) + "\n")


def _write_lm1b(folder: Path) -> None:
    lines = sentences("en", 170)
    parts = {
        "training-monolingual.tokenized.shuffled/news.en-00001-of-00100": lines[:150],
        "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": lines[150:],
    }
    for name, part in parts.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(part) + "\n")


def _write_pg19(folder: Path) -> None:
    """Books, each a file named by its number."""
    lines, books = sentences("en", 170), {"train": range(1, 5), "validation": range(5, 8), "test": range(8, 11)}
    for split, numbers in books.items():
        (folder / split).mkdir(parents=True)
        for number in numbers:
            (folder / split / f"{number}.txt").write_text("\n".join(lines[number * 14 : number * 14 + 25]) + "\n")
    every = [number for numbers in books.values() for number in numbers]
    (folder / "metadata.csv").write_text("".join(f"{number},Title,1900,http://book\n" for number in every))
