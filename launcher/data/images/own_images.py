"""Images of the user's own, in folders or records: a set with what is to be known of it before it is read."""

import contextlib

import numpy as np

from launcher.config.bound_types import check_value
from launcher.data import files
from launcher.data.catalog import TFDS, Facts
from launcher.data.images import image_header
from launcher.data.images.encoded import EncodedImages, listed, problem
from launcher.data.images.stored_images import StoredImages
from launcher.data.pipeline import Data
from launcher.errors import UsageError

# Images whose headers say whether a set has one size.
_PROBED = 64


class OwnImages:
    """A set of the user's own, with ImageNet's mean and standard deviation; see `image_data.ImageSource`.

    Its images have one size if a few that are spread over it do. It has no evaluation if none are held out.

    Args:
      train, evaluation: the examples; without any to evaluate on, a share of those to train on is held out by a hash of
        their keys.
      eval_share: how much to hold out; None for the usual share.
      evaluated_on: where the examples to evaluate on come from.
      classes: what a person should know of them.
      others: files that are left out.

    Raises:
      UsageError: nothing to train on, nothing to evaluate on where that is not optional, or not one image in order.
    """

    of_bytes = True

    def __init__(
        self,
        train: EncodedImages,
        evaluation: EncodedImages | None,
        *,
        name: str,
        num_classes: int,
        channels: int,
        eval_share: float | None,
        evaluated_on: str,
        class_names: tuple[str, ...] = (),
        classes: str,
        others: int = 0,
    ):
        binding = "folder_images" if name.startswith("folder:") else "record_images"
        check_value(f"{binding}.channels", channels, channels in (1, 3), "1 or 3")
        if evaluation is None:
            share = files.check_share(eval_share, binding)
            held_out = np.array([files.is_held_out(train.key(index), share) for index in range(len(train))])
            train, evaluation = (train.select(np.flatnonzero(chosen)) for chosen in (~held_out, held_out))
            how = files.share_words(share)
        elif eval_share is not None:
            raise UsageError(f"{binding}.eval_share holds images out, and {evaluated_on} has those to evaluate on")
        else:
            how = f"evaluated on {evaluated_on}"
        if not len(train) or not (len(evaluation) or eval_share == 0):
            raise UsageError(
                f"{len(train)} images to train, {len(evaluation)} to evaluate on; bind {binding}.eval_share"
            )
        chosen = np.unique(np.linspace(0, len(train) - 1, _PROBED).astype(int)).tolist()
        sizes = {size for index in chosen if (size := _size(train, index))}
        if not sizes:
            raise UsageError(f"{train.name(chosen[0])}: {problem(train, chosen[0]) or 'damaged'}")
        height, width = sizes.pop() if len(sizes) == 1 else (None, None)
        usual = TFDS["imagenet2012"]
        self.name, self.class_names, self.train = name, class_names, train
        self.evaluation = evaluation if len(evaluation) else None
        self.details = f"{classes}, {how}" + (f"; {others} other files left out" if others else "")
        self.facts = Facts(
            image_shape=(height, width, channels),
            num_classes=num_classes,
            num_train_examples=len(train),
            num_eval_examples=len(evaluation) or None,
            mean=_of_channels(usual.mean, channels),
            std=_of_channels(usual.std, channels),
        )

    def check(self) -> None:
        """Raises UsageError where something shows to be damaged without decoding."""
        damaged = self.train.damaged() + ([] if self.evaluation is None else self.evaluation.damaged())
        if damaged:
            raise UsageError(listed(damaged))

    def open(self, stored: StoredImages) -> Data:
        return stored.from_encoded(self.train, self.evaluation)


def _size(images: EncodedImages, index: int) -> tuple[int, int] | None:
    """Height and width of an image in pixels, by its header; None where something is wrong with it."""
    with contextlib.suppress(UsageError), images.opened(index) as file:
        return image_header.size(file)
    return None


def _of_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return values if len(values) == channels else (float(np.mean(values)),) * channels
