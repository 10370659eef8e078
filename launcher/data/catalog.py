"""Facts of common image data sets, known without opening them, so that a job can be planned where no data is."""

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """An image classification set as it is stored; numbers of examples are None where it is not prepared."""

    image_shape: tuple[int | None, int | None, int]  # height and width, None where images differ in size; channels
    num_classes: int  # labels are 0 to num_classes - 1
    num_train_examples: int | None
    num_eval_examples: int | None
    mean: tuple[float, ...]  # of each channel over the training images, pixels scaled to [0, 1]
    std: tuple[float, ...]
    flip: bool = True  # a mirrored image is still an example of its class
    train_split: str = "train"  # as TFDS names it
    eval_split: str = "test"
    max_value: float = 255.0  # the brightest stored pixel

    @property
    def fixed_size(self) -> bool:
        """Whether all images are stored in one size."""
        return None not in self.image_shape


def _facts(row: dict[str, Any]) -> Facts:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Facts(**fields)


_KNOWN = json.loads(Path(__file__).with_name("catalog.json").read_text("utf-8"))
# No official split: `launcher.data.images.digits` holds out a fixed, stratified fifth.
DIGITS = _facts(_KNOWN["digits"])
# Mean and standard deviation are the values the field uses; those of CIFAR-100 and MNIST are computed the same way.
TFDS = {name: _facts(row) for name, row in _KNOWN["tfds"].items()}
