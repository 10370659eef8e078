from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from launcher.data.images import augment
from launcher.data.order import example_seeds
from launcher.errors import UsageError


def _seeds(count: int) -> tf.Tensor:
    return example_seeds(seed=1, epoch=0, index=tf.range(count, dtype=tf.int64))


def _images(count: int, shape=(6, 5, 2), dtype=np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (count, *shape)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("flip", [False, True])
def test_pad_crop_is_numpys_pad_slice_and_reverse(flip, dtype):
    images, seeds, padding = _images(64, dtype=dtype), _seeds(64), 2
    top, left = (offset.numpy() for offset in augment.offsets(seeds, padding=padding))
    mirrored = augment.flips(seeds).numpy() & flip
    padded = np.pad(images, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    expected = np.stack([image[y : y + 6, x : x + 5] for image, y, x in zip(padded, top, left, strict=True)])
    expected[mirrored] = expected[mirrored, :, ::-1]
    result = augment.pad_crop(images, seeds, padding=padding, flip=flip)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, expected)


def test_every_offset_is_equally_likely():
    top, left = augment.offsets(_seeds(81_000), padding=4)
    counts = np.bincount(top.numpy() * 9 + left.numpy(), minlength=81)
    assert ((counts - 1000) ** 2 / 1000).sum() / 80 < 1.6  # standard deviation 0.16


def test_half_of_the_images_are_mirrored_whatever_their_offset():
    seeds = _seeds(40_000)
    mirrored = augment.flips(seeds).numpy()
    top, _ = augment.offsets(seeds, padding=1)
    assert abs(mirrored.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(mirrored, top)[0, 1]) < 0.02


def _numpy_window(numbers, height, width):
    """The same in a loop, from the paper's description."""
    for area_number, ratio_number in zip(numbers[:10], numbers[10:20], strict=True):
        area = height * width * (0.08 + 0.92 * area_number)
        ratio = math.exp(math.log(3 / 4) + ratio_number * (math.log(4 / 3) - math.log(3 / 4)))
        w, h = max(1, round(math.sqrt(area * ratio))), max(1, round(math.sqrt(area / ratio)))
        if w <= width and h <= height:
            return math.floor(numbers[20] * (height - h + 1)), math.floor(numbers[21] * (width - w + 1)), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize(("height", "width"), [(40, 60), (33, 33), (3, 200), (200, 3), (1, 1)])
def test_windows_are_those_of_a_plain_loop(height, width):
    numbers = augment.window_numbers(_seeds(300)).numpy()
    windows = augment.crop_windows(numbers, tf.fill([300], height), tf.fill([300], width)).numpy()
    expected = np.array([_numpy_window(row, height, width) for row in numbers.astype(np.float64)])
    # float32 may round a size of exactly one half the other way.
    assert (windows == expected).all(axis=1).mean() > 0.98
    top, left, h, w = windows.T
    assert (top >= 0).all() and (left >= 0).all() and (h >= 1).all() and (w >= 1).all()
    assert (top + h <= height).all() and (left + w <= width).all()


def test_windows_cover_the_areas_and_ratios_of_the_paper():
    heights, widths = tf.fill([5000], 400), tf.fill([5000], 500)
    windows = augment.crop_windows(augment.window_numbers(_seeds(5000)), heights, widths).numpy().astype(float)
    area, ratio = windows[:, 2] * windows[:, 3] / 200_000, windows[:, 3] / windows[:, 2]
    assert 0.08 * 0.98 < area.min() < 0.09 and 0.9 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.77 and 1.3 < ratio.max() < 1.35


@pytest.mark.parametrize("flip", [False, True])
def test_random_resized_crop_shows_its_window_in_full(flip):
    # On a ramp, bilinear sampling is exact: from the first to the last pixel of the window.
    height, width, count = 9, 13, 50
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    images = np.tile(np.stack([rows, columns], axis=-1), (count, 1, 1, 1))
    seeds = _seeds(count)
    result = augment.random_resized_crop(images, seeds, flip=flip).numpy()
    windows = augment.crop_windows(
        augment.window_numbers(seeds), tf.fill([count], height), tf.fill([count], width)
    ).numpy()
    mirrored = augment.flips(seeds).numpy() & flip
    for image, (top, left, h, w), mirror in zip(result, windows, mirrored, strict=True):
        across = np.linspace(left, left + w - 1, width)
        np.testing.assert_allclose(image[:, :, 1], np.tile(across[::-1] if mirror else across, (height, 1)), atol=1e-4)
        np.testing.assert_allclose(image[:, 0, 0], np.linspace(top, top + h - 1, height), atol=1e-4)


def test_random_resized_crop_keeps_the_dtype_of_stored_images():
    images = _images(8)
    result = augment.random_resized_crop(images, _seeds(8), flip=True)
    assert result.dtype == tf.uint8 and result.shape == images.shape


@pytest.mark.parametrize("kind", ["small", "imagenet"])
def test_an_image_is_augmented_alike_in_any_batch(kind):
    change = augment.augmentation(kind, image_shape=(6, 5, 2), flip=True)
    images, seeds = _images(12), _seeds(12)
    together = change(images, seeds).numpy()
    alone = np.concatenate([change(images[i : i + 1], seeds[i : i + 1]) for i in range(12)])
    np.testing.assert_array_equal(together, alone)
    assert (together != images).any()


def test_small_pads_by_an_eighth():
    for size, padding in ((8, 1), (28, 4), (32, 4)):
        images = np.ones([400, size, size, 1], np.uint8)
        change = augment.augmentation("small", image_shape=(size, size, 1), flip=False)
        empty_rows = (change(images, _seeds(400)).numpy() == 0).all(axis=(2, 3)).sum(axis=1)
        assert empty_rows.max() == padding


def test_no_augmentation_is_none_and_an_unknown_one_is_refused():
    assert augment.augmentation("none", image_shape=(8, 8, 1), flip=True) is None
    with pytest.raises(UsageError, match="'smal' is unknown; did you mean 'small'"):
        augment.check("smal")
