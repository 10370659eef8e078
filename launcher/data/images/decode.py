"""From an encoded image to a stored one: decode, cut and scale. One image a call, inside `tf.data.Dataset.map`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.data.images import image_header
from launcher.data.images.augment import crop_windows, flips, window_numbers

_READ_BATCH = 1024

# What a JPEG's side may be decoded to a fraction of: means of so many pixels, for a part of the time.
_RATIOS = (2, 4, 8)

Window = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""(height, width: int32 []) -> int32 [4]: top, left, height, width."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageDecoder:
    """Decodes JPEG or PNG to uint8 images of one shape.

    Of the largest centred window, `centre` keeps a fraction in each direction: 1 for sets of small images; 0.875 (224
    of 256 pixels, as in Krizhevsky et al. 2012) for photographs of any size.
    """

    image_shape: tuple[int, int, int]  # of what comes out: height, width, channels
    fraction: float
    scaled: bool  # False if the encoded images have `image_shape` already

    def centre(self, encoded: tf.Tensor) -> tf.Tensor:
        """The middle of an image (string []) as uint8 `image_shape`."""
        if not self.scaled:
            return tf.ensure_shape(self._decoded(encoded), self.image_shape)
        return tf.cast(self._scaled_window(encoded, self._centre_window), tf.uint8)

    def random_windows(
        self, encoded: tf.Tensor, seeds: tf.Tensor, *, flip: bool, finish: Callable[[tf.Tensor], tf.Tensor] | None
    ) -> tf.Tensor:
        """`random_window` of each image of a batch, finished.

        Args:
          encoded: string [n].
          seeds: int32 [n, 2].
          flip: whether to mirror half of them.
          finish: from float32 [1, *image_shape], the pixels of one image, to what comes out, of the same shape: one by
            one, while they are in the processor's cache, and never as bytes. None for bytes.

        Returns:
          float32 or uint8 [n, *image_shape].
        """

        def cut(image: tuple[tf.Tensor, ...]) -> tf.Tensor:
            window = self.random_window(*image)
            return finish(window[tf.newaxis])[0] if finish else tf.cast(window, tf.uint8)

        return self._each(
            cut, (encoded, window_numbers(seeds), flips(seeds) & flip), tf.float32 if finish else tf.uint8
        )

    def centres(self, encoded: tf.Tensor) -> tf.Tensor:
        """`centre` of each image of a batch, string [n]."""
        return self._each(self.centre, encoded, tf.uint8)

    def _each(self, cut: Callable[..., tf.Tensor], batch: Any, dtype: tf.DType) -> tf.Tensor:
        # One after another: batches are made in parallel, and to overlap images within each halves the speed.
        signature = tf.TensorSpec(self.image_shape, dtype)
        return tf.map_fn(cut, batch, fn_output_signature=signature, parallel_iterations=1)

    def random_window(self, encoded: tf.Tensor, numbers: tf.Tensor, mirrored: tf.Tensor) -> tf.Tensor:
        """A random window of an image (string []), scaled: whole numbers of 0 to 255, float32 `image_shape`.

        Args:
          encoded: the file.
          numbers: float32 [22], see `launcher.data.images.augment.window_numbers`.
          mirrored: bool [], whether to turn left and right.
        """

        def window(height: tf.Tensor, width: tf.Tensor) -> tf.Tensor:
            return crop_windows(numbers[tf.newaxis], height[tf.newaxis], width[tf.newaxis])[0]

        image = self._scaled_window(encoded, window)
        # Not `image[:, ::-1]`, which takes ten times as long.
        return tf.cond(mirrored, lambda: tf.reverse(image, [1]), lambda: image)

    def _scaled_window(self, encoded: tf.Tensor, window: Window) -> tf.Tensor:
        """Whole numbers of 0 to 255, float32 `image_shape`."""
        height, width, channels = self.image_shape

        is_jpeg = tf.io.is_jpeg(encoded)

        def other() -> tuple[tf.Tensor, tf.Tensor]:
            image = self._decoded(encoded)
            return image, tf.shape(image)

        # No more of a JPEG is decoded than the window needs.
        none_yet = tf.zeros([0, 0, channels], tf.uint8)
        whole, size = tf.cond(is_jpeg, lambda: (none_yet, tf.image.extract_jpeg_shape(encoded)), other)
        cut = window(size[0], size[1])

        def of_jpeg(ratio: int) -> tf.Tensor:
            # Edges to the nearest pixel of the smaller image, in which the window is no smaller than what comes out.
            begin, end = ((edge + ratio // 2) // ratio for edge in (cut[:2], cut[:2] + cut[2:]))
            place = tf.concat([begin, end - begin], 0)
            return tf.image.decode_and_crop_jpeg(encoded, place, channels=channels, ratio=ratio)

        shrunk = tf.minimum(cut[2] // height, cut[3] // width)
        image = tf.switch_case(
            tf.where(is_jpeg, tf.reduce_sum(tf.cast(shrunk >= _RATIOS, tf.int32)), -1),
            [functools.partial(of_jpeg, ratio) for ratio in (1, *_RATIOS)],
            default=lambda: tf.slice(whole, tf.concat([cut[:2], [0]], 0), tf.concat([cut[2:], [channels]], 0)),
        )
        image = tf.image.resize(tf.ensure_shape(image, [None, None, channels]), [height, width])
        # Between bytes lies nothing that a byte could not hold.
        return tf.round(tf.ensure_shape(image, self.image_shape))

    def _decoded(self, encoded: tf.Tensor) -> tf.Tensor:
        is_bmp = tf.strings.regex_full_match(encoded, r"BM\C{30}\C*")
        coloured = tf.cond(is_bmp, lambda: _has_palette(encoded), lambda: False)
        with tf.control_dependencies([tf.debugging.Assert(~coloured, [image_header.PALETTE])]):
            encoded = tf.identity(encoded)
        return tf.io.decode_image(encoded, channels=self.image_shape[2], expand_animations=False)

    def _centre_window(self, height: tf.Tensor, width: tf.Tensor) -> tf.Tensor:
        to_height, to_width, _ = self.image_shape
        full_height, full_width = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
        scale = tf.minimum(full_height / to_height, full_width / to_width) * self.fraction
        cut_height = tf.clip_by_value(tf.round(to_height * scale), 1, full_height)
        cut_width = tf.clip_by_value(tf.round(to_width * scale), 1, full_width)
        top, left = tf.floor((full_height - cut_height) / 2), tf.floor((full_width - cut_width) / 2)
        return tf.cast(tf.stack([top, left, cut_height, cut_width]), tf.int32)


def _has_palette(bmp: tf.Tensor) -> tf.Tensor:
    """Whether the numbers of a BMP (string [], 32 bytes and more) stand for colours, bool []."""
    start = tf.cast(tf.io.decode_raw(tf.strings.substr(bmp, 0, 32), tf.uint8), tf.int32)
    palette = tf.strings.substr(bmp, 14 + start[14], start[10] + 256 * start[11] - 14 - start[14])
    return (start[28] == 8) & (palette != tf.strings.substr(image_header.GREYS, 0, tf.strings.length(palette)))


def in_memory(examples: tf.data.Dataset, count: int, decoder: ImageDecoder) -> dict[str, np.ndarray]:
    """Decodes examples (encoded image, label), at most `count`, in their order into memory.

    Returns:
      {"image": uint8 [n, *decoder.image_shape], "label": int32 [n]}.
    """
    images = np.empty((count, *decoder.image_shape), np.uint8)
    labels = np.empty(count, np.int32)
    batches = (
        examples.map(lambda image, label: (decoder.centre(image), label), num_parallel_calls=tf.data.AUTOTUNE)
        .batch(_READ_BATCH)
        .prefetch(1)
    )
    start = 0
    for image, label in batches.as_numpy_iterator():
        images[start : start + len(label)], labels[start : start + len(label)] = image, label
        start += len(label)
    return {"image": images[:start], "label": labels[:start]}
