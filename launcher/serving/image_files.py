"""Image files for `--mode=predict`: found, decoded on the host, those that are damaged told apart."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.errors import UsageError
from launcher.serving.inputs import Batch, Inputs, is_pattern, what_is_wrong
from launcher.tasks.base import ReadsImages

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_SHOWN = 5


class Images(Inputs):
    """Image files for a task that classifies them; JSON with class and probability out.

    Args:
      path: a folder, looked through at any depth, a pattern with * or ?, or one file; anything `tf.io.gfile` reads.
      task: with `decode_images`, which is `decode`.
    """

    def __init__(self, path: str, task: ReadsImages, decode: Callable[[tf.Tensor], tf.Tensor]):
        self._task = task
        self._unreadable: list[str] = []
        self._folder = path if tf.io.gfile.isdir(path) else None
        self._files = _image_files(path)
        self.total = len(self._files)
        self._decode = tf.function(decode, input_signature=[tf.TensorSpec([None], tf.string)])

    def batches(self, size: int) -> Iterator[list[str]]:
        for first in range(0, len(self._files), size):
            yield self._files[first : first + size]

    def encode(self, records: Sequence[str], rows: int) -> tuple[Batch, dict[int, str]]:
        contents: dict[int, bytes] = {}
        damaged: dict[int, str] = {}
        for index, path in enumerate(records):
            try:
                with tf.io.gfile.GFile(path, "rb") as file:
                    contents[index] = file.read()
            except (OSError, tf.errors.OpError) as error:
                damaged[index] = what_is_wrong(error)
        images = self._decoded(contents, damaged)
        shape = next((image.shape for image in images.values()), None)
        if shape is None:  # all are damaged: there is nothing to answer
            return {}, damaged
        batch = np.zeros([rows, *shape], np.float32)
        for index, image in images.items():
            batch[index] = image
        return {"image": batch}, damaged

    def _decoded(self, contents: Mapping[int, bytes], damaged: dict[int, str]) -> dict[int, np.ndarray]:
        """Images by index; where some of them are damaged, one at a time to find out which."""
        try:
            if contents:
                return dict(zip(contents, self._pixels(list(contents.values())), strict=True))
        except tf.errors.OpError as error:
            if len(contents) == 1:
                damaged[next(iter(contents))] = what_is_wrong(error)
                return {}
            single = ({index: content} for index, content in contents.items())
            return {index: image for one in single for index, image in self._decoded(one, damaged).items()}
        return {}

    def _pixels(self, files: list[bytes]) -> np.ndarray:
        with tf.device("CPU:0"):  # no accelerator takes strings
            return self._decode(tf.constant(files)).numpy()

    def answer(self, model: Any, batch: Any) -> Any:
        return self._task.classify(model, batch)

    def answers(self, records: Sequence[str], outputs: Any, damaged: Mapping[int, str]) -> list[str]:
        names = self._task.class_names
        lines = []
        for index, path in enumerate(records):
            record: dict[str, Any] = {"file": os.path.relpath(path, self._folder) if self._folder else path}
            if index in damaged:
                record["error"] = damaged[index]
                self._unreadable.append(f"  {record['file']}: {record['error']}")
            else:
                number = int(np.argmax(outputs[index]))
                label = {"label": names[number]} if number < len(names) else {}
                record |= {"class": number, **label, "probability": float(outputs[index][number])}
            lines.append(json.dumps(record, ensure_ascii=False))
        return lines

    def remarks(self) -> list[str]:
        count = len(self._unreadable)
        if not count:
            return []
        more = [f"  and {count - _SHOWN} more"] if count > _SHOWN else []
        return [f"{count:,} of {self.total:,} images could not be read:", *self._unreadable[:_SHOWN], *more]


def _image_files(path: str) -> list[str]:
    if not tf.io.gfile.isdir(path):
        found = tf.io.gfile.glob(path) if is_pattern(path) else [path]
        if not found or not tf.io.gfile.exists(found[0]):
            raise UsageError(f"--input={path}: there is no such file")
        return sorted(file for file in found if not tf.io.gfile.isdir(file)) or _no_images(path)
    every = [os.path.join(folder, name) for folder, _, names in tf.io.gfile.walk(path) for name in names]
    return sorted(file for file in every if file.lower().endswith(IMAGE_SUFFIXES)) or _no_images(path, len(every))


def _no_images(path: str, others: int = 0) -> list[str]:
    more = f" among its {others} files" if others else ""
    raise UsageError(f"--input={path}: there is no image{more} ({', '.join(IMAGE_SUFFIXES)})")
