from __future__ import annotations

import sys

import gin
import numpy as np
import pytest
import tensorflow as tf
from assembled import global_batches, joined, shards
from sources import made

from launcher.data import tfds
from launcher.data.images import digits
from launcher.data.images.image_data import image_data
from launcher.data.pipeline import Data
from launcher.errors import UsageError

pytestmark = pytest.mark.slow

FIRST_HELD_OUT = [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]
SUM_HELD_OUT = 112350


def _batch(make, size: int) -> dict[str, np.ndarray]:
    return global_batches(make, hosts=1, replicas=1, batch=size, steps=1)[0]


# ------------------------------------------------------------------------------------------------------------- digits


def test_the_digits_are_split_as_scikit_learn_does_it():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    rows = train_test_split(np.arange(1797), test_size=360, stratify=labels, random_state=0)
    for found, expected in zip(digits.load(), rows, strict=True):
        assert found["image"].dtype == np.uint8 and found["label"].dtype == np.int32
        np.testing.assert_array_equal(found["image"].reshape(-1, 64), images[expected])
        np.testing.assert_array_equal(found["label"], labels[expected])


def test_the_split_of_the_digits_is_always_the_same():
    _, held_out = digits.load()
    _, again = digits.load()
    np.testing.assert_array_equal(held_out["image"], again["image"])
    # Published with the results of the recipes: which digits those are measured on must not change.
    assert held_out["label"][:12].tolist() == FIRST_HELD_OUT
    assert int(held_out["image"].astype(int).sum()) == SUM_HELD_OUT


def test_digits_are_standardised_as_the_catalog_says():
    data = image_data(name="digits")
    assert (data.image_shape, data.num_classes) == ((8, 8, 1), 10)
    assert (data.num_train_examples, data.num_eval_examples) == (1437, 360)
    data.check()
    batch = _batch(data.train_batches, 1437)
    assert batch["image"].dtype == np.float32 and batch["label"].dtype == np.int32
    assert abs(batch["image"].mean()) < 1e-3 and abs(batch["image"].std() - 1) < 1e-3
    train, held_out = digits.load()
    np.testing.assert_array_equal(np.bincount(batch["label"]), np.bincount(train["label"]))
    evaluated = _batch(data.eval_batches, 360)
    np.testing.assert_array_equal(evaluated["label"], held_out["label"])
    np.testing.assert_allclose(evaluated["image"], (held_out["image"] / 16 - 0.3054) / 0.3761, atol=1e-5)


def test_digits_are_never_mirrored_unless_asked_for():
    def some(**options):
        return _batch(made(image_data, name="digits", augmentation="small", **options).train_batches, 64)["image"]

    np.testing.assert_array_equal(some(), some(flip=False))
    assert (some() != some(flip=True)).any()


def test_digits_can_be_scaled():
    data = image_data(name="digits", image_size=16)
    assert data.image_shape == (16, 16, 1)
    plain = _batch(image_data(name="digits").eval_batches, 360)["image"]
    large = _batch(data.eval_batches, 360)["image"]
    assert large.shape == (360, 16, 16, 1)
    assert np.abs(large.mean(axis=(1, 2, 3)) - plain.mean(axis=(1, 2, 3))).max() < 0.1


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UsageError, match=r"pip install .*\[demo\]"):
        image_data(name="digits").check()


# ---------------------------------------------------------------------------------------------------------- synthetic


def test_synthetic_images_are_the_same_every_time_and_tell_their_class():
    options = {"name": "synthetic", "image_size": 6, "num_classes": 4, "train_examples": 100, "eval_examples": 30}
    data = made(image_data, **options)
    assert (data.image_shape, data.num_train_examples, data.num_eval_examples) == ((6, 6, 3), 100, 30)
    data.check()
    first, again = (_batch(made(image_data, **options).eval_batches, 30) for _ in range(2))
    np.testing.assert_array_equal(first["image"], again["image"])
    assert set(first["label"]) == {0, 1, 2, 3}
    assert abs(first["image"].mean()) < 0.1 and abs(first["image"].std() - 1) < 0.1
    train = _batch(data.train_batches, 100)
    centres = np.stack([train["image"][train["label"] == label].mean(axis=0) for label in range(4)])
    distances = ((first["image"][:, None] - centres) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == first["label"]).mean() > 0.95


# ------------------------------------------------------------------------------------------------- planning, no data


def test_a_job_on_imagenet_is_planned_without_opening_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(tfds, "module", lambda: pytest.fail("opened"))
    data = image_data(name="tfds:imagenet2012", image_size=224, augmentation="imagenet")
    assert (data.image_shape, data.num_classes) == ((224, 224, 3), 1000)
    assert (data.num_train_examples, data.num_eval_examples) == (1_281_167, 50_000)
    fashion = image_data(name="fashion_mnist")
    assert (fashion.image_shape, fashion.num_train_examples) == ((28, 28, 1), 60_000)


def test_gin_binds_image_data():
    gin.parse_config("image_data.name = 'digits'\nimage_data.num_classes = 12")
    try:
        data: Data = image_data()
    finally:
        gin.clear_config()
    assert data.num_classes == 12
    assert data.num_train_examples == 1437


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        ({"name": "digit"}, "'digit' is unknown; did you mean 'digits'"),
        ({"name": "cifar10"}, "did you mean 'tfds:cifar10'"),
        ({"name": "digits", "augmentation": "imagnet"}, "did you mean 'imagenet'"),
        ({"name": "digits", "image_size": 0}, "image_size = 0"),
        ({"name": "digits", "num_classes": 9}, "'digits' has 10 classes"),
        ({"name": "tfds:imagenet2012"}, "bind image_data.image_size"),
        ({"name": "synthetic", "num_classes": 2}, "bind image_data.image_size"),
        ({"name": "synthetic", "image_size": 8, "num_classes": 2, "eval_examples": 0}, "eval_examples = 0"),
        (
            {"name": "synthetic", "image_size": 8, "num_classes": 2, "augmentation": "small"},
            "must be 'none' for synthetic images",
        ),
    ],
)
def test_bindings_that_make_no_data_are_refused(bindings, words):
    with pytest.raises(UsageError, match=words):
        made(image_data, **bindings)


# -------------------------------------------------------------------------------------------------- the real thing


@pytest.mark.nightly
@pytest.mark.heavy
def test_fashion_mnist_is_what_the_catalog_says():
    data = image_data(name="fashion_mnist")
    try:
        data.check()
    except UsageError as error:
        pytest.skip(str(error))
    train = global_batches(data.train_batches, hosts=1, replicas=1, batch=6000, steps=10)
    np.testing.assert_array_equal(np.bincount(joined(train, "label")), [6000] * 10)
    images = joined(train, "image")
    assert abs(images.mean()) < 1e-3 and abs(images.std() - 1) < 1e-3
    batches = global_batches(data.eval_batches, hosts=2, replicas=1, batch=128, steps=79)
    assert joined(batches, "weight").sum() == 10_000
    labels = joined(batches, "label")[joined(batches, "weight") == 1]
    np.testing.assert_array_equal(np.bincount(labels), [1000] * 10)
    (shard,) = shards(hosts=1, replicas=1, batch=128)
    assert data.train_batches(shard).element_spec["image"] == tf.TensorSpec([128, 28, 28, 1], tf.float32)
