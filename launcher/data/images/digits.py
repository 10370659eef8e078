"""The 1,797 scanned handwritten digits that come in scikit-learn's wheel: real data with nothing to download.

They are read from its file: importing scikit-learn takes ten times as long, in every process of a job.
"""

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from launcher.data.catalog import DIGITS
from launcher.data.images.stored_images import Arrays, StoredImages
from launcher.data.pipeline import Data
from launcher.errors import UsageError
from launcher.machine import installation


class DigitImages:
    """The digits as an `ImageSource`."""

    name, of_bytes = "digits", True
    facts = DIGITS

    def check(self) -> None:
        """Raises UsageError where scikit-learn is missing."""
        _path()

    def open(self, stored: StoredImages) -> Data:
        return stored.in_memory(*load())


def load() -> tuple[Arrays, Arrays]:
    """The training and the held-out digits.

    Returns:
      Twice {"image": uint8 [n, 8, 8, 1] with values 0 to 16, "label": int32 [n]}: 1,437 and 360 examples. There is no
      official split; this one is stratified and always the same.
    """
    with gzip.open(_path(), "rt") as file:
        rows = np.array([line.split(",") for line in file], dtype=np.float32)
    order = np.array(Path(__file__).with_name("digits_split.txt").read_text().split("\n", 2)[2].split(), dtype=int)
    images = rows[order, :-1].reshape(-1, 8, 8, 1).astype(np.uint8)
    both = {"image": images, "label": rows[order, -1].astype(np.int32)}
    held_out = DIGITS.num_train_examples
    return {key: one[:held_out] for key, one in both.items()}, {key: one[held_out:] for key, one in both.items()}


def _path() -> Path:
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise UsageError(f"image_data.name = 'digits' needs scikit-learn: {installation.command('demo')}")
    path = Path(found.submodule_search_locations[0]) / "datasets/data/digits.csv.gz"
    if not path.exists():
        raise UsageError(f"image_data.name = 'digits': scikit-learn has no {path}, where 1.7 and 1.9 have it")
    return path
