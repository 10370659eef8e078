"""Real TFDS builders of data sets small enough to be made for a test."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

PHOTOS_TRAIN, PHOTOS_TEST = 203, 37


def photo(index: int) -> np.ndarray:
    """A photograph of its own size: a gradient, which compresses well, brighter with the index."""
    height, width = 12 + index % 5, 12 + index % 7
    rows, columns = np.mgrid[:height, :width]
    return np.repeat((index // 2 + 5 * rows + 2 * columns)[:, :, None], 3, axis=2).astype(np.uint8)


def _jpeg(image: np.ndarray) -> bytes:
    return tf.io.encode_jpeg(image, quality=100).numpy()


def define_builders() -> None:
    """Registers the data sets with TFDS, once a process: defining the class does it."""
    import tensorflow_datasets as tfds

    class LauncherTestPhotos(tfds.core.GeneratorBasedBuilder):
        """JPEGs of different sizes."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> tfds.core.DatasetInfo:
            features = {
                "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(num_classes=300),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager: object) -> dict[str, Iterator]:
            return {"train": self._generate_examples(PHOTOS_TRAIN), "test": self._generate_examples(PHOTOS_TEST)}

        def _generate_examples(self, count: int) -> Iterator:
            for index in range(count):
                yield index, {"image": io.BytesIO(_jpeg(photo(index))), "label": index}

    class LauncherTestIcons(tfds.core.GeneratorBasedBuilder):
        """PNGs of one size, taken from a file that the user provides."""

        VERSION = tfds.core.Version("1.0.0")
        MANUAL_DOWNLOAD_INSTRUCTIONS = "manual_dir should contain icons.npy,\n  drawn by yourself."

        def _info(self) -> tfds.core.DatasetInfo:
            features = {
                "image": tfds.features.Image(shape=(6, 6, 1)),
                "label": tfds.features.ClassLabel(num_classes=3),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
            icons = np.load(dl_manager.manual_dir / "icons.npy")
            return {"train": self._generate_examples(icons)}

        def _generate_examples(self, icons: np.ndarray) -> Iterator:
            for index, icon in enumerate(icons):
                yield index, {"image": icon, "label": index % 3}

    class LauncherTestSentences(tfds.core.GeneratorBasedBuilder):
        """No images at all."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> tfds.core.DatasetInfo:
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: object) -> dict[str, Iterator]:
            raise NotImplementedError

        def _generate_examples(self) -> Iterator:
            raise NotImplementedError
