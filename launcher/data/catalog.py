"""What is known of common image data sets without opening them, so that a job can be planned where no data is."""

from __future__ import annotations

import dataclasses


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


# No official split: `launcher.data.images.digits` holds out a fixed, stratified fifth.
DIGITS = Facts(
    image_shape=(8, 8, 1),
    num_classes=10,
    num_train_examples=1437,
    num_eval_examples=360,
    mean=(0.3054,),
    std=(0.3761,),
    flip=False,
    max_value=16.0,
)

_CIFAR10 = Facts(
    image_shape=(32, 32, 3),
    num_classes=10,
    num_train_examples=50_000,
    num_eval_examples=10_000,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
_FASHION = Facts(
    image_shape=(28, 28, 1),
    num_classes=10,
    num_train_examples=60_000,
    num_eval_examples=10_000,
    mean=(0.2860,),
    std=(0.3530,),
)

# Mean and standard deviation are the values the field uses; those of CIFAR-100 and MNIST are computed the same way.
TFDS = {
    "cifar10": _CIFAR10,
    "cifar100": dataclasses.replace(
        _CIFAR10, num_classes=100, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)
    ),
    "fashion_mnist": _FASHION,
    "imagenet2012": Facts(
        image_shape=(None, None, 3),
        num_classes=1000,
        num_train_examples=1_281_167,
        num_eval_examples=50_000,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        eval_split="validation",
    ),
    "mnist": dataclasses.replace(_FASHION, mean=(0.1307,), std=(0.3081,), flip=False),
}
