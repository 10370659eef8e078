"""The 1,797 scanned handwritten digits that come in scikit-learn's wheel: real data with nothing to download.

They are read from the wheel's file: importing scikit-learn, with SciPy and pandas under it, takes longer than building
the model of a small recipe, at every start of every worker.
"""

from __future__ import annotations

import importlib.util
import pathlib

import numpy as np

from launcher.data.catalog import DIGITS
from launcher.errors import UsageError
from launcher.machine import installation

Arrays = dict[str, np.ndarray]
_FILE = pathlib.PurePath("datasets", "data", "digits.csv.gz")


def check() -> None:
    """Raises UsageError where scikit-learn is missing."""
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError(
            f"image_data.name = 'digits' needs scikit-learn, which holds the images: {installation.command('demo')}"
        )


def load() -> tuple[Arrays, Arrays]:
    """The training and the held-out digits.

    Returns:
      Twice {"image": uint8 [n, 8, 8, 1] with values 0 to 16, "label": int32 [n]}: 1,437 and 360 examples. There is no
      official split; this one is stratified and always the same.

    Raises:
      UsageError: scikit-learn is not installed.
    """
    check()
    assert DIGITS.num_eval_examples is not None
    images, labels = _read()
    images = images.reshape(-1, 8, 8, 1).astype(np.uint8)
    labels = labels.astype(np.int32)
    train, held_out = _split(labels, DIGITS.num_eval_examples)
    return (
        {"image": images[train], "label": labels[train]},
        {"image": images[held_out], "label": labels[held_out]},
    )


def _read() -> tuple[np.ndarray, np.ndarray]:
    found = importlib.util.find_spec("sklearn")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = pathlib.Path(folder, _FILE)
        if path.is_file():
            table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits  # a version that keeps them elsewhere

    images, labels = load_digits(return_X_y=True)
    return np.asarray(images), np.asarray(labels)


def _split(labels: np.ndarray, num_held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices for training and of the held-out examples, each class in equal shares.

    These are the numbers of `sklearn.model_selection.train_test_split(…, stratify=labels, random_state=0)`.
    """
    random = np.random.RandomState(0)  # whose stream NumPy has frozen
    counts = np.bincount(labels)
    num_train = _shares(counts, len(labels) - num_held_out, random)
    num_test = _shares(counts - num_train, num_held_out, random)
    train, held_out = [], []
    for label, (first, then) in enumerate(zip(num_train, num_test, strict=True)):
        shuffled = np.flatnonzero(labels == label)[random.permutation(counts[label])]
        train.append(shuffled[:first])
        held_out.append(shuffled[first : first + then])
    return random.permutation(np.concatenate(train)), random.permutation(np.concatenate(held_out))


def _shares(counts: np.ndarray, total: int, random: np.random.RandomState) -> np.ndarray:
    """How many of `total` each class gives; what rounding leaves over goes to the largest remainders."""
    exact = counts / counts.sum() * total
    shares = np.floor(exact)
    left = int(total - shares.sum())
    remainders = exact - shares
    for value in np.unique(remainders)[::-1]:
        equal = np.flatnonzero(remainders == value)
        chosen = random.choice(equal, size=min(len(equal), left), replace=False) if left else equal[:0]
        shares[chosen] += 1
        left -= len(chosen)
    return shares.astype(int)
