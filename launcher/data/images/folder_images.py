"""Photographs in class folders: `image_data.name = 'folder:DIR'`.

DIR holds a folder a class, or DIR/train does and DIR/val (or validation, test) holds the same ones to evaluate on.
Classes count from 0 in the order of their names. Without a folder to evaluate on, a share of the files is held out by a
hash of their names, which stays the same when files are added.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import IO, Any

import gin
import numpy as np
import tensorflow as tf

from launcher.data import files
from launcher.data.images import image_header
from launcher.data.images.own_images import OwnImages
from launcher.data.pipeline import ArrayExamples
from launcher.data.text import storage
from launcher.errors import MissingInputError, UsageError, advice
from launcher.errors import listed as choices
from launcher.machine.no_autograph import no_autograph

_EVALUATION = ("val", "validation", "test")

# Reading headers is waiting for a disk or a network.
_READERS = 16

# From so many files on, what their headers say is kept in the data directory: to read them takes more than a second.
_REMEMBERED = 10_000

_END = 32  # bytes


@dataclasses.dataclass(frozen=True, eq=False)
class FolderImages:
    """Image files at paths with slashes from `root` on, and their labels; see `encoded.EncodedImages`."""

    root: str
    paths: Sequence[str]
    labels: np.ndarray  # int32 [n]

    def __len__(self) -> int:
        return len(self.paths)

    @no_autograph
    def fetch(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        chosen = self._in_memory.fetch(indices)
        paths = tf.strings.join([self.root + "/", chosen["path"]])
        image = tf.map_fn(tf.io.read_file, paths, fn_output_signature=tf.TensorSpec([], tf.string))
        return {"image": image, "label": chosen["label"]}

    @functools.cached_property
    def _in_memory(self) -> ArrayExamples:
        return ArrayExamples({"path": np.array([path.encode() for path in self.paths]), "label": self.labels})

    def name(self, index: int) -> str:
        return f"{self.root}/{self.paths[index]}"

    def key(self, index: int) -> str:
        return self.paths[index]

    def select(self, chosen: np.ndarray) -> FolderImages:
        paths = [self.paths[index] for index in chosen]
        return dataclasses.replace(self, paths=paths, labels=self.labels[chosen])

    def opened(self, index: int) -> IO[bytes]:
        return files.opened(self.name(index))

    def damaged(self) -> list[str]:
        """The files that are no whole images, by their first and last bytes."""
        return self._found["damaged"]

    @functools.cached_property
    def _found(self) -> dict[str, Any]:
        """The damaged files, and a digest of the ends of all, in which PNG has a checksum and JPEG its last pixels."""
        if len(self) < _REMEMBERED:
            return self._look()
        path = storage.folder("images") / f"found-{storage.digest(*self.paths, self._versions)}.json"
        return json.loads(storage.stored_bytes(path, lambda: json.dumps(self._look()).encode()))

    def _look(self) -> dict[str, Any]:
        damaged, ends = [], hashlib.sha256()
        with futures.ThreadPoolExecutor(_READERS) as pool:
            for index, (problem, end) in enumerate(pool.map(self._looked_at, range(len(self)))):
                ends.update(end)
                if problem:
                    damaged.append(f"{self.name(index)} ({problem})")
        return {"damaged": damaged, "ends": ends.hexdigest()}

    def _looked_at(self, index: int) -> tuple[str, bytes]:
        """The fault of a file, if it has one, and its last bytes."""
        try:
            with self.opened(index) as file:
                image_header.check(file)
                return "", image_header.last_bytes(file, _END)
        except UsageError as error:
            return str(error), b""

    def identity(self) -> str:
        return storage.digest(*self.paths, self._versions[:, 0], self._found["ends"])

    @functools.cached_property
    def _versions(self) -> np.ndarray:
        """Size and time of the last change of each file, int64 [n, 2]."""
        with futures.ThreadPoolExecutor(_READERS) as pool:
            each = pool.map if files.is_remote(self.root) else map
            versions = each(lambda path: files.version(f"{self.root}/{path}"), self.paths)
            return np.fromiter(versions, np.dtype((np.int64, 2)), len(self))


@gin.configurable
def folder_images(
    path: str,
    *,
    train_split: str | None = None,
    eval_split: str | None = None,
    eval_share: float | None = None,
    channels: int = 3,
) -> OwnImages:
    """Images of own files, a folder a class: `image_data.name = 'folder:DIR'`. Lists the folders, reads a few headers.

    Args:
      path: DIR.
      train_split, eval_split: folders in DIR instead of the usual ones.
      eval_share: how much to hold out where there is no folder to evaluate on: 0.1 by default; 0 for none.
      channels: of the images that come out: 3, or 1 for grey.
    """
    root = path if files.is_remote(path) else os.path.abspath(os.path.expanduser(path))
    train_root, eval_root = _roots(root, train_split, eval_split)
    classes = _classes(train_root)
    train, others = _images(train_root, classes)
    evaluation = None
    if eval_root is not None:
        if eval_classes := set(_classes(eval_root)) ^ set(classes):
            raise UsageError(
                f"only one of {train_root} and {eval_root} has the classes {choices(eval_classes)}; give both the same"
            )
        evaluation, more = _images(eval_root, classes)
        others += more
    first = ", ".join(classes[:3]) + (f" and {len(classes) - 3} more" if len(classes) > 3 else "")
    return OwnImages(
        train,
        evaluation,
        name=f"folder:{path}",
        num_classes=len(classes),
        channels=channels,
        eval_share=eval_share,
        evaluated_on=os.path.basename(eval_root or ""),
        class_names=tuple(classes),
        classes=f"{len(classes)} classes ({first})",
        others=others,
    )


def _roots(root: str, train_split: str | None, eval_split: str | None) -> tuple[str, str | None]:
    """The folders of classes to train and to evaluate on."""
    there = _folders(root)
    if train_split is None and "train" in there:
        train_split = "train"
    if train_split is None:
        if eval_split is not None:
            raise UsageError(f"folder_images.eval_split = {eval_split!r} needs folder_images.train_split, too")
        return root, None
    if eval_split is None:
        eval_split = next((name for name in _EVALUATION if name in there and name != train_split), None)
    for binding, split in (("train_split", train_split), ("eval_split", eval_split)):
        if split is not None and split not in there:
            raise UsageError(f"folder_images.{binding} = {split!r} is no folder in {root}{advice(split, there)}")
    return f"{root}/{train_split}", eval_split and f"{root}/{eval_split}"


def _folders(root: str) -> list[str]:
    """Names of the folders in a folder, sorted; those that begin with a dot are left out."""
    is_folder = tf.io.gfile.isdir if files.is_remote(root) else os.path.isdir
    if not is_folder(root):
        where = "" if files.is_remote(root) else f" (from {os.getcwd()})"
        raise MissingInputError(f"image_data.name = 'folder:DIR': there is no folder {root}{where}")
    return sorted(name for name, has_files in _entries(root) if has_files and not name.startswith("."))


def _entries(folder: str) -> list[tuple[str, bool]]:
    """Names in a folder, each with whether it is a folder itself."""
    with files.readable(folder):
        if files.is_remote(folder):
            names = [name.rstrip("/") for name in tf.io.gfile.listdir(folder)]
            return [(name, tf.io.gfile.isdir(f"{folder}/{name}")) for name in names]
        with os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries]


def _classes(root: str) -> list[str]:
    classes = _folders(root)
    if len(classes) < 2:
        raise (UsageError if classes else MissingInputError)(
            f"{root} needs a folder of images for each class, two or more, and has {choices(classes) or 'none'}"
        )
    return classes


def _images(root: str, classes: Sequence[str]) -> tuple[FolderImages, int]:
    """The images of each class, sorted by name, and how many other files there are."""
    paths: list[str] = []
    labels: list[int] = []
    others = 0
    for label, name in enumerate(classes):
        inside = [files.named(path.removeprefix(f"{root}/")) for path in _files_in(f"{root}/{name}")]
        images = sorted(path for path in inside if path.lower().endswith(image_header.SUFFIXES))
        if not images:
            raise UsageError(f"{root}/{name} has no image ({', '.join(image_header.SUFFIXES)}); fill it or remove it")
        paths += images
        labels += [label] * len(images)
        others += len(inside) - len(images)
    return FolderImages(root, paths, np.array(labels, np.int32)), others


def _files_in(folder: str) -> Iterator[str]:
    """Paths of the files in a folder and those inside of it, also through links; without what begins with a dot."""
    for name, is_folder in _entries(folder):
        path = f"{folder}/{name}"
        if not is_folder:
            if not name.startswith("."):
                yield path
            continue
        to = os.path.realpath(path)
        if os.path.islink(path) and f"{os.path.realpath(folder)}/".startswith(f"{to}/"):
            raise UsageError(f"{path} is a link to a folder that it lies in, {to}; remove it")
        yield from _files_in(path)
