"""The 1,797 scanned handwritten digits that come in scikit-learn's wheel: real data with nothing to download."""

from __future__ import annotations

import numpy as np

from launcher.data.catalog import DIGITS
from launcher.machine import installation

Arrays = dict[str, np.ndarray]


def check() -> None:
    """Raises UsageError where scikit-learn, which holds the images, is missing."""
    installation.required("sklearn", by="image_data.name = 'digits'", extra="demo", package="scikit-learn")


def load() -> tuple[Arrays, Arrays]:
    """The training and the held-out digits.

    Returns:
      Twice {"image": uint8 [n, 8, 8, 1] with values 0 to 16, "label": int32 [n]}: 1,437 and 360 examples. There is no
      official split; this one is stratified and always the same.
    """
    check()
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, *DIGITS.image_shape).astype(np.uint8)
    labels = labels.astype(np.int32)
    train, held_out = train_test_split(
        np.arange(len(labels)), test_size=DIGITS.num_eval_examples, stratify=labels, random_state=0
    )
    return (
        {"image": images[train], "label": labels[train]},
        {"image": images[held_out], "label": labels[held_out]},
    )
