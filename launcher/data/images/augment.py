"""Augmentations of a whole batch of images, each image by numbers of its own.

All of them are stateless: what happens to an image depends on its seed pair alone, see
`launcher.data.order.example_seeds`. Images are [batch, height, width, channels] of any dtype; they are best augmented
as stored bytes, before they become floats, because that moves a quarter of the memory.
"""

import functools
import math
from collections.abc import Callable

import tensorflow as tf

from launcher.data.philox import uniform
from launcher.errors import UsageError, advice
from launcher.machine.no_autograph import no_autograph

AUGMENTATIONS = ("none", "small", "imagenet")

ImageAugment = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""(images, seeds int32 [batch, 2]) -> images of the same shape and dtype."""

# Keeps the random numbers of one augmentation independent of those of another.
_PAD_CROP, _FLIP, _WINDOW = 1, 2, 3

_MIN_AREA = 0.08
_MIN_RATIO, _MAX_RATIO = 3 / 4, 4 / 3
_ATTEMPTS = 10


def check(kind: str) -> None:
    """Raises UsageError for an unknown augmentation."""
    if kind not in AUGMENTATIONS:
        raise UsageError(f"image_data.augmentation = {kind!r} is unknown{advice(kind, AUGMENTATIONS)}")


def augmentation(kind: str, *, image_shape: tuple[int, int, int], flip: bool) -> ImageAugment | None:
    """The augmentation that goes by a name in recipes.

    Args:
      kind: "none"; "small": padded by an eighth of the image and cropped at random (4 pixels at 32, as He et al. 2015,
        section 4.2); "imagenet": random resized crop.
      image_shape: (height, width, channels).
      flip: also mirror half of the images; "none" never does.

    Returns:
      The function, or None for "none".
    """
    small = functools.partial(pad_crop, padding=max(1, round(max(image_shape[:2]) / 8)), flip=flip)
    return {"none": None, "small": small, "imagenet": functools.partial(random_resized_crop, flip=flip)}[kind]


@no_autograph
def pad_crop(images: tf.Tensor, seeds: tf.Tensor, *, padding: int, flip: bool) -> tf.Tensor:
    """Moves each image by up to `padding` pixels in both directions and, with `flip`, mirrors half of them.

    Each of the (2 * padding + 1)**2 offsets is equally likely; what comes in from outside is 0.
    """
    images = tf.convert_to_tensor(images)
    batch, height, width, channels = images.shape
    padded_height, padded_width = height + 2 * padding, width + 2 * padding
    top, left = offsets(seeds, padding=padding)
    columns = tf.tile(tf.range(width)[tf.newaxis], [batch, 1])
    if flip:
        columns = tf.where(flips(seeds)[:, tf.newaxis], width - 1 - columns, columns)
    # One gather of whole pixels: several times faster than gathers of rows and columns with batch_dims.
    first_rows = (tf.range(batch) * padded_height + top)[:, tf.newaxis]
    rows = (first_rows + tf.range(height)) * padded_width
    pixels = rows[:, :, tf.newaxis] + (left[:, tf.newaxis] + columns)[:, tf.newaxis, :]
    images = tf.pad(images, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
    return tf.gather(tf.reshape(images, [-1, channels]), pixels)


def offsets(seeds: tf.Tensor, *, padding: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The offsets at which `pad_crop` cuts the padded images: top and left, int32 [batch] in [0, 2 * padding]."""
    numbers = tf.cast(uniform(seeds, 2, purpose=_PAD_CROP) * (2 * padding + 1), tf.int32)
    return numbers[:, 0], numbers[:, 1]


def flips(seeds: tf.Tensor) -> tf.Tensor:
    """The images that are mirrored: bool [batch], true with probability one half."""
    return uniform(seeds, 1, purpose=_FLIP)[:, 0] < 0.5


@no_autograph
def random_resized_crop(images: tf.Tensor, seeds: tf.Tensor, *, flip: bool) -> tf.Tensor:
    """Cuts a random window out of each image and scales it (bilinear) to the size the images have.

    With `flip`, half are then mirrored. For images already decoded to one size; `launcher.data.images.decode` cuts the
    window before decoding where it can.
    """
    images = tf.convert_to_tensor(images)
    batch, height, width, _ = images.shape
    heights, widths = tf.fill([batch], height), tf.fill([batch], width)
    windows = tf.cast(crop_windows(window_numbers(seeds), heights, widths), tf.float32)
    # crop_and_resize counts from the first pixel (0) to the last (1), and mirrors where right comes before left.
    scale = [1 / max(height - 1, 1), 1 / max(width - 1, 1)]
    top, left = tf.unstack(windows[:, :2] * scale, axis=1)
    bottom, right = tf.unstack((windows[:, :2] + windows[:, 2:] - 1) * scale, axis=1)
    if flip:
        mirrored = flips(seeds)
        left, right = tf.where(mirrored, right, left), tf.where(mirrored, left, right)
    boxes = tf.stack([top, left, bottom, right], axis=1)
    crops = tf.image.crop_and_resize(images, boxes, tf.range(batch), (height, width))
    return as_dtype(crops, images.dtype)


def as_dtype(images: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Interpolated values back in the dtype of the stored image."""
    return tf.saturate_cast(tf.round(images), dtype) if dtype.is_integer else tf.cast(images, dtype)


def window_numbers(seeds: tf.Tensor) -> tf.Tensor:
    """The random numbers `crop_windows` needs: float32 [batch, 22] in [0, 1)."""
    return uniform(seeds, 2 * _ATTEMPTS + 2, purpose=_WINDOW)


def crop_windows(numbers: tf.Tensor, heights: tf.Tensor, widths: tf.Tensor) -> tf.Tensor:
    """Windows of 8 to 100 percent of an image's area, 3:4 to 4:3 (Szegedy et al. 2015, section 6).

    The first of ten tries that fits is taken, else the largest centred window of a permitted ratio.

    Args:
      numbers: float32 [batch, 22], see `window_numbers`.
      heights, widths: int32 [batch], size of each image in pixels.

    Returns:
      int32 [batch, 4]: top, left, height, width.
    """
    full_height, full_width = tf.cast(heights, tf.float32), tf.cast(widths, tf.float32)
    area = (full_height * full_width)[:, tf.newaxis] * (_MIN_AREA + (1 - _MIN_AREA) * numbers[:, :_ATTEMPTS])
    log_ratio = math.log(_MIN_RATIO) + math.log(_MAX_RATIO / _MIN_RATIO) * numbers[:, _ATTEMPTS : 2 * _ATTEMPTS]
    # The last, fall-back "try" is the image narrowed or flattened until its ratio is permitted.
    fallback_width = tf.minimum(full_width, tf.round(full_height * _MAX_RATIO))
    fallback_height = tf.minimum(full_height, tf.round(full_width / _MIN_RATIO))
    width = tf.concat([tf.round(tf.sqrt(area * tf.exp(log_ratio))), fallback_width[:, tf.newaxis]], axis=1)
    height = tf.concat([tf.round(tf.sqrt(area * tf.exp(-log_ratio))), fallback_height[:, tf.newaxis]], axis=1)
    width, height = tf.maximum(width, 1), tf.maximum(height, 1)

    fits = (width <= full_width[:, tf.newaxis]) & (height <= full_height[:, tf.newaxis])
    chosen = tf.argmax(tf.cast(fits, tf.int32), axis=1, output_type=tf.int32)
    width, height = tf.gather(width, chosen, batch_dims=1), tf.gather(height, chosen, batch_dims=1)
    centred = chosen == _ATTEMPTS
    top = tf.where(centred, (full_height - height) / 2, numbers[:, -2] * (full_height - height + 1))
    left = tf.where(centred, (full_width - width) / 2, numbers[:, -1] * (full_width - width + 1))
    return tf.cast(tf.stack([tf.floor(top), tf.floor(left), height, width], axis=1), tf.int32)
