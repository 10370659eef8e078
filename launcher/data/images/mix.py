"""Mixup and cutmix: training images blended with, or patched from, another training example.

What an example is mixed with, and how, depends on (seed, epoch, example) alone and never on how the examples lie in
batches of replicas; the usual way, to mix a replica's batch with a permutation of itself, gives every topology another
training set.
"""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from launcher.data.order import example_seeds
from launcher.data.philox import uniform
from launcher.errors import UsageError

Batch = dict[str, tf.Tensor]
Boxes = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]
"""top, bottom, left, right, each int32 [n]; bottom and right are the first pixels outside."""

# Keeps these random numbers independent of those drawn from the same seeds in augment.py, which has 1 to 3.
_MIX, _PARTNER = 4, 5

_MAX_ALPHA = 100.0
_CELLS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix:
    """Mixes each example with a partner: a share of it, drawn from Beta(alpha, alpha), is the example's own.

    Args:
      mixup: alpha of mixup (Zhang et al. 2018, arXiv:1710.09412): the images are averaged with the shares as weights.
        None for none.
      cutmix: alpha of cutmix (Yun et al. 2019, arXiv:1905.04899): a rectangle of the image is replaced by the
        partner's. With both, each example gets the one or the other with probability 1/2.
    """

    mixup: float | None = None
    cutmix: float | None = None

    def __post_init__(self) -> None:
        if self.mixup is None and self.cutmix is None:
            raise UsageError("Mix needs an alpha for mixup or for cutmix; leave it out for neither")
        for name, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if alpha is not None and not 0 < alpha <= _MAX_ALPHA:
                raise UsageError(f"image_data.{name} = {alpha}: must be above 0 and at most {_MAX_ALPHA:g}, or None")

    def __call__(self, batch: Batch, partners: Batch, seeds: tf.Tensor) -> Batch:
        """Mixes a batch with a batch of partners.

        Args:
          batch: has "image", float32 [n, height, width, channels], "label", int32 [n], and maybe "weight" [n].
          partners: the same for the partner of each example.
          seeds: int32 [n, 2], the examples' own.

        Returns:
          The batch with mixed images, "label_b", int32 [n], the partner's label, and "mix", float32 [n]: the share of
          "label" in the target, 1 where nothing was mixed. An example or a partner of weight 0 leaves no trace in
          others: neither its image nor its label is mixed in. Of a mixed example's weight, each part brings its share.
        """
        numbers = uniform(seeds, 4, purpose=_MIX)
        mixed = tf.ones(tf.shape(batch["label"]), tf.bool)
        if "weight" in batch:
            mixed = (batch["weight"] > 0) & (partners["weight"] > 0)
        cut = numbers[:, 0] < (0.0 if self.cutmix is None else 1.0 if self.mixup is None else 0.5)
        image, share = batch["image"], tf.ones_like(numbers[:, 0])
        if self.mixup is not None:
            own = tf.where(mixed & ~cut, beta_quantile(numbers[:, 1], self.mixup), 1.0)
            blend = own[:, tf.newaxis, tf.newaxis, tf.newaxis]
            image, share = blend * image + (1 - blend) * partners["image"], own
        if self.cutmix is not None:
            area = tf.where(mixed & cut, 1 - beta_quantile(numbers[:, 1], self.cutmix), 0.0)
            boxes = cut_boxes(area, numbers[:, 2:], height=image.shape[1], width=image.shape[2])
            image, kept = _patched(image, partners["image"], boxes)
            share *= kept
        result = {**batch, "image": image, "label_b": partners["label"], "mix": share}
        if "weight" in batch:
            own_weight = share * tf.cast(batch["weight"], tf.float32)
            weight = own_weight + (1 - share) * tf.cast(partners["weight"], tf.float32)
            result |= {"weight": weight, "mix": tf.where(mixed, tf.math.divide_no_nan(own_weight, weight), 1.0)}
        return result


def partner_positions(position: tf.Tensor, *, seed: int, size: int) -> tf.Tensor:
    """The position of the partner of each position in the training stream: in the same epoch, at a distance of its own.

    So in every epoch each example is the partner of exactly one other and, with two examples or more, never its own.

    Positions are int64 [n], places in the endless stream; an epoch has `size` examples.
    """
    epoch, place = position // size, position % size
    # No example has the number -1, so these are no example's seeds.
    seeds = example_seeds(seed=seed, epoch=epoch, index=-tf.ones_like(position))
    # float64, because 24 random bits times a size of 31 bits must not be rounded up to the size.
    number = tf.cast(uniform(seeds, 1, purpose=_PARTNER)[:, 0], tf.float64)
    distance = 1 + tf.cast(tf.floor(number * (size - 1)), tf.int64)
    return epoch * size + (place + distance) % size


def beta_quantile(numbers: tf.Tensor, alpha: float) -> tf.Tensor:
    """Quantiles of Beta(alpha, alpha), float32 [n]: of uniform numbers it makes numbers of that distribution.

    By a table of the distribution function at 4,097 places that lie denser towards 0, linear in between: for numbers
    from 2**-24 to 1 - 2**-24 off by less than 2e-6 at any permitted alpha. Only exactly rounded operations are done
    for each number, therefore the result does not depend on the batch it is in.
    """
    places, below = _beta_table(alpha)
    numbers = tf.cast(numbers, tf.float64)
    # The distribution is symmetric: a table of its lower half is enough, and more exact than one of the whole.
    lower = tf.minimum(numbers, 1 - numbers)
    cell = tf.searchsorted(below, lower, side="right") - 1
    cell = tf.minimum(cell, _CELLS - 1)
    left, right = tf.gather(places, cell), tf.gather(places, cell + 1)
    start, end = tf.gather(below, cell), tf.gather(below, cell + 1)
    quantile = left + (lower - start) / (end - start) * (right - left)
    return tf.cast(tf.where(numbers < 0.5, quantile, 1 - quantile), tf.float32)


@functools.lru_cache(maxsize=16)
def _beta_table(alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Places from 0 to 1/2 and the probability below each, both float64 [_CELLS + 1]."""
    places = 0.5 * (np.arange(_CELLS + 1) / _CELLS) ** 4
    with tf.init_scope(), tf.device("CPU:0"):
        shape = tf.constant(alpha, tf.float64)
        below = tf.math.betainc(shape, shape, tf.constant(places)).numpy()
    below[-1] = 0.5  # by symmetry; computed, it is off by up to 1e-13
    return places, np.minimum(np.maximum.accumulate(below), 0.5)


def _patched(image: tf.Tensor, other: tf.Tensor, boxes: Boxes) -> tuple[tf.Tensor, tf.Tensor]:
    """The image with the other inside its box; and the share of its pixels that are still its own."""
    height, width = image.shape[1:3]
    top, bottom, left, right = boxes
    rows, columns = tf.range(height), tf.range(width)
    in_rows = (rows >= top[:, tf.newaxis]) & (rows < bottom[:, tf.newaxis])
    in_columns = (columns >= left[:, tf.newaxis]) & (columns < right[:, tf.newaxis])
    inside = in_rows[:, :, tf.newaxis] & in_columns[:, tf.newaxis, :]
    area = tf.cast((bottom - top) * (right - left), tf.float32)
    return tf.where(inside[..., tf.newaxis], other, image), 1 - area / (height * width)


def cut_boxes(area: tf.Tensor, centre: tf.Tensor, *, height: int, width: int) -> Boxes:
    """The rectangles of cutmix (Yun et al. 2019, equation 2), their edges rounded to whole pixels.

    Sides are sqrt(area) of those of the image, centres anywhere in it; what sticks out is cut off.

    Args:
      area: float32 [n], share of the image's area; 0 gives an empty rectangle.
      centre: float32 [n, 2] in [0, 1): vertical, horizontal.
      height, width: of the images, in pixels.
    """
    side = tf.sqrt(area) / 2

    def edges(middle: tf.Tensor, length: int) -> tuple[tf.Tensor, tf.Tensor]:
        first, last = tf.round((middle - side) * length), tf.round((middle + side) * length)
        first, last = (tf.cast(tf.clip_by_value(edge, 0, length), tf.int32) for edge in (first, last))
        return first, last

    return *edges(centre[:, 0], height), *edges(centre[:, 1], width)
