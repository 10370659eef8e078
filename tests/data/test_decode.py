from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from launcher.data.images.augment import crop_windows, window_numbers
from launcher.data.images.decode import ImageDecoder
from launcher.data.order import example_seeds


def _image(height: int, width: int) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 5, columns * 4, rows + columns], axis=-1).astype(np.uint8)


def _encoded(kind: str, image: np.ndarray) -> tf.Tensor:
    return tf.io.encode_jpeg(image, quality=100) if kind == "jpeg" else tf.io.encode_png(image)


def _cut_and_scaled(encoded: tf.Tensor, window, size: tuple[int, int]) -> np.ndarray:
    """Decoded as a whole, then cut: the slow way."""
    top, left, height, width = window
    cut = tf.io.decode_image(encoded)[top : top + height, left : left + width]
    return np.rint(tf.image.resize(cut, size).numpy())


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_centre_keeps_the_middle_of_a_photograph(kind):
    encoded = _encoded(kind, _image(40, 48))
    decoder = ImageDecoder(image_shape=(20, 20, 3), fraction=0.875, scaled=True)
    # 0.875 of the shorter side, 40, is 35; (40 - 35) // 2 = 2 and (48 - 35) // 2 = 6.
    np.testing.assert_array_equal(decoder.centre(encoded), _cut_and_scaled(encoded, (2, 6, 35, 35), (20, 20)))


@pytest.mark.parametrize(("side", "ratio"), [(39, 1), (40, 2), (79, 2), (80, 4), (161, 8)])
def test_a_jpeg_of_twice_the_size_and_more_is_decoded_to_means_of_blocks(side, ratio):
    rows, columns = np.mgrid[:side, : side + 7]
    image = np.stack([rows, columns, 200 - rows], axis=-1).astype(np.uint8)
    image[::2] += 16  # lines of one pixel, which are gone where blocks are averaged
    encoded = tf.io.encode_jpeg(image, quality=100, chroma_downsampling=False)
    decoder = ImageDecoder(image_shape=(20, 20, 3), fraction=1.0, scaled=True)
    # 3 of the 7 columns lie left of the middle; edges are those of the nearest blocks.
    top, left, bottom, right = ((edge + ratio // 2) // ratio * ratio for edge in (0, 3, side, side + 3))
    cut = np.pad(tf.io.decode_jpeg(encoded), ((0, ratio), (0, ratio), (0, 0)), "edge")[top:bottom, left:right]
    means = cut.reshape((bottom - top) // ratio, ratio, (right - left) // ratio, ratio, 3).mean(axis=(1, 3))
    result = np.asarray(decoder.centre(encoded), np.float32)
    np.testing.assert_allclose(result, tf.image.resize(means, (20, 20)), atol=5, rtol=0)


def test_centre_keeps_the_ratio_that_is_asked_for():
    encoded = _encoded("png", _image(40, 40))
    decoder = ImageDecoder(image_shape=(10, 20, 3), fraction=1.0, scaled=True)
    np.testing.assert_array_equal(decoder.centre(encoded), _cut_and_scaled(encoded, (10, 0, 20, 40), (10, 20)))


def test_images_of_the_right_size_are_decoded_to_the_byte():
    image = _image(9, 7)
    decoder = ImageDecoder(image_shape=(9, 7, 3), fraction=1.0, scaled=False)
    np.testing.assert_array_equal(decoder.centre(_encoded("png", image)), image)


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_random_window_is_the_one_of_its_numbers(kind, mirrored):
    encoded = _encoded(kind, _image(30, 44))
    decoder = ImageDecoder(image_shape=(16, 16, 3), fraction=0.875, scaled=True)
    numbers = window_numbers(example_seeds(seed=0, epoch=0, index=tf.range(5, dtype=tf.int64)))
    windows = crop_windows(numbers, tf.fill([5], 30), tf.fill([5], 44)).numpy()
    assert len({tuple(window) for window in windows}) == 5
    for row, window in zip(numbers, windows, strict=True):
        expected = _cut_and_scaled(encoded, window, (16, 16))
        result = decoder.random_window(encoded, row, tf.constant(mirrored)).numpy()
        # A JPEG that is decoded in part lacks the neighbours its colours are smoothed with at the window's edge.
        tolerance = 3 if kind == "jpeg" else 0
        np.testing.assert_allclose(result, expected[:, ::-1] if mirrored else expected, atol=tolerance, rtol=0)


def test_shapes_are_static_inside_a_pipeline():
    decoder = ImageDecoder(image_shape=(12, 10, 3), fraction=0.875, scaled=True)
    dataset = tf.data.Dataset.from_tensors(_encoded("jpeg", _image(30, 30))).map(decoder.centre)
    assert dataset.element_spec == tf.TensorSpec([12, 10, 3], tf.uint8)
    assert next(iter(dataset)).shape == (12, 10, 3)
