"""Loss and metrics of image classification, against NumPy in float64."""

from __future__ import annotations

import base64

import gin
import numpy as np
import pytest
import tensorflow as tf
from building import build_session
from places import SMALL_DIGITS

from launcher.data.images.image_data import ImageData, image_data
from launcher.data.pipeline import ArrayExamples, RandomAccessData
from launcher.errors import UsageError
from launcher.models.mlp import mlp
from launcher.tasks.image_classification import ImageClassification

pytestmark = pytest.mark.slow

BATCH = 40


def _logits_as_images(num_classes: int) -> ImageData:
    """Data of which only the number of classes matters here."""
    source = RandomAccessData(train=ArrayExamples({"label": [0]}))
    return ImageData(name="made up", image_shape=(1, 1, num_classes), num_classes=num_classes, source=source)


def _task(num_classes: int, label_smoothing: float = 0.0) -> ImageClassification:
    return ImageClassification(data=_logits_as_images(num_classes), model=mlp, label_smoothing=label_smoothing)


def _identity(images, training):
    """A model that takes its images for logits."""
    return images


def _batch(num_classes: int, mixed: bool) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(num_classes)
    batch = {
        "image": 3 * numbers.standard_normal((BATCH, num_classes)).astype(np.float32),
        "label": numbers.integers(num_classes, size=BATCH).astype(np.int32),
        "weight": np.tile(np.array([1, 0, 0.5, 1], np.float32), BATCH // 4),
    }
    if mixed:
        batch["label_b"] = numbers.integers(num_classes, size=BATCH).astype(np.int32)
        batch["mix"] = np.tile(np.array([0.9, 0.3, 1.0, 0.1, 0.5], np.float32), BATCH // 5)
    return batch


def _measured(task: ImageClassification, batch: dict[str, np.ndarray], training: bool, model=_identity):
    loss, weight, metrics = task.loss(model, {key: tf.constant(value) for key, value in batch.items()}, training)
    for value in (loss, weight, *metrics.values()):
        assert value.dtype == tf.float32 and value.shape == ()
    return float(loss), float(weight), {name: float(value) for name, value in metrics.items()}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _expected_loss(batch: dict[str, np.ndarray], smoothing: float, mixed: bool) -> float:
    num_classes = batch["image"].shape[1]
    target = np.eye(num_classes)[batch["label"]]
    if mixed:
        share = batch["mix"].astype(np.float64)[:, None]
        target = share * target + (1 - share) * np.eye(num_classes)[batch["label_b"]]
    target = (1 - smoothing) * target + smoothing / num_classes
    losses = -(target * _log_softmax(batch["image"])).sum(axis=1)
    return float((losses * batch["weight"]).sum())


@pytest.mark.parametrize("num_classes", [4, 12])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("mixed", [False, True])
def test_training_loss_is_the_weighted_cross_entropy_of_smoothed_and_mixed_targets(num_classes, smoothing, mixed):
    batch = _batch(num_classes, mixed)
    loss, weight, _ = _measured(_task(num_classes, smoothing), batch, training=True)
    np.testing.assert_allclose(loss, _expected_loss(batch, smoothing, mixed), rtol=2e-6)
    assert weight == batch["weight"].sum()


@pytest.mark.parametrize("mixed", [False, True])
def test_evaluation_is_neither_smoothed_nor_mixed(mixed):
    batch = _batch(12, mixed)
    loss, _, metrics = _measured(_task(12, label_smoothing=0.3), batch, training=False)
    np.testing.assert_allclose(loss, _expected_loss(batch, 0.0, mixed=False), rtol=2e-6)
    right = batch["image"].argmax(axis=1) == batch["label"]
    np.testing.assert_allclose(metrics["accuracy"], (right * batch["weight"]).sum())


def test_a_mix_of_share_1_is_no_mix():
    plain = _batch(4, mixed=False)
    mixed = {**_batch(4, mixed=True), "mix": np.ones(BATCH, np.float32)}
    assert _measured(_task(4, 0.1), plain, training=True) == _measured(_task(4, 0.1), mixed, training=True)


def test_accuracies_in_training_count_the_label_with_the_larger_share():
    batch = _batch(12, mixed=True)
    _, _, metrics = _measured(_task(12), batch, training=True)
    label = np.where(batch["mix"] >= 0.5, batch["label"], batch["label_b"])
    above = (batch["image"] > batch["image"][np.arange(BATCH), label][:, None]).sum(axis=1)
    np.testing.assert_allclose(metrics["accuracy"], ((above == 0) * batch["weight"]).sum())
    np.testing.assert_allclose(metrics["top_5_accuracy"], ((above < 5) * batch["weight"]).sum())


def test_top_5_counts_labels_among_the_five_largest_logits():
    logits = np.tile(np.arange(12, dtype=np.float32)[::-1], (12, 1))  # class 0 first
    batch = {"image": logits, "label": np.arange(12, dtype=np.int32), "weight": np.ones(12, np.float32)}
    _, _, metrics = _measured(_task(12), batch, training=False)
    assert metrics == {"accuracy": 1.0, "top_5_accuracy": 5.0}


def test_up_to_ten_classes_there_is_no_top_5():
    assert set(_measured(_task(10), _batch(10, mixed=False), training=False)[2]) == {"accuracy"}
    assert set(_measured(_task(11), _batch(11, mixed=False), training=False)[2]) == {"accuracy", "top_5_accuracy"}


@pytest.mark.parametrize("training", [True, False])
def test_examples_of_weight_0_count_nowhere(training):
    batch = _batch(12, mixed=True)
    real = batch["weight"] > 0
    garbage = {**batch, "image": np.where(real[:, None], batch["image"], 100 * batch["image"][::-1])}
    without = {key: value[real] for key, value in batch.items()}
    task = _task(12, label_smoothing=0.1)
    loss, weight, metrics = _measured(task, without, training)
    other_loss, other_weight, other_metrics = _measured(task, garbage, training)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    assert (other_weight, other_metrics) == (weight, metrics)


def test_logits_in_16_bits_are_judged_in_float32():
    batch = _batch(4, mixed=True)
    rounded = {**batch, "image": tf.cast(tf.cast(batch["image"], tf.bfloat16), tf.float32).numpy()}
    found = _measured(_task(4, 0.1), batch, True, model=lambda images, training: tf.cast(images, tf.bfloat16))
    assert found == _measured(_task(4, 0.1), rounded, True)


def test_the_loss_of_mixed_batches_compiles_with_xla():
    batch = {key: tf.constant(value) for key, value in _batch(4, mixed=True).items()}
    task = _task(4, 0.1)
    compiled = tf.function(lambda part: task.loss(_identity, part, True), jit_compile=True)
    for found, expected in zip(compiled(batch)[:2], task.loss(_identity, batch, True)[:2], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------- training

PARAMS = (
    "image_data.mixup = 0.2",
    "image_data.cutmix = 1.0",
    "image_classification.label_smoothing = 0.1",
    "train.steps = 6",
    "train.global_batch_size = 32",
    "cosine.decay_steps = 60",
)


def _trained(replicas: int, microbatches: int):
    params = (*PARAMS, f"train.microbatches = {microbatches}")
    made = build_session(SMALL_DIGITS, params, replicas)
    records = made.trainer.train(made.trainer.batches(made.plan.data), 6)
    return records.loss / records.weight, made.trainer.state.snapshot()


@pytest.mark.nightly  # that its batches are, test_mix.py has
def test_training_on_mixed_images_is_the_same_on_every_topology():
    losses, state = _trained(1, 1)
    other_losses, other_state = _trained(2, 2)
    np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
    assert other_state.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_allclose(other_state[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_training_trains_on_the_mixed_images_and_labels():
    made = build_session(SMALL_DIGITS, PARAMS)
    batch = next(made.trainer.batches(made.plan.data))
    logits = tf.constant(made.model(batch["image"], training=True)).numpy()
    batch = {key: value.numpy() for key, value in batch.items()}
    assert 0 < batch["mix"].min() < 0.4
    made = build_session(SMALL_DIGITS, PARAMS)
    records = made.trainer.train(made.trainer.batches(made.plan.data), 1)
    expected = _expected_loss({**batch, "image": logits}, 0.1, mixed=True) / 32
    np.testing.assert_allclose(records.loss[0] / records.weight[0], expected, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("shape", [(2, 2, 1), (100, 50, 3)])
def test_samples_show_the_picture_and_both_classes(shape):
    source = RandomAccessData(train=ArrayExamples({"label": [0]}))
    data = ImageData(name="made up", image_shape=shape, num_classes=2, class_names=("cat", "dog"), source=source)
    task = ImageClassification(data=data, model=mlp)
    pictures = np.stack(
        [np.full(shape, -1.0, np.float32), np.linspace(-2, 2, np.prod(shape), dtype=np.float32).reshape(shape)]
    )
    batch = {"image": tf.constant(pictures), "label": tf.constant([0, 1])}
    logits = tf.constant([[1.0, 0.0], [1.0, 0.0]])
    (plain, *said), (ramp, *said_of_ramp) = task.samples(lambda images, training: logits, batch)
    assert (said, said_of_ramp) == (["cat", "cat"], ["cat", "dog"])
    decoded = [tf.io.decode_png(base64.b64decode(one.partition("base64,")[2])).numpy() for one in (plain, ramp)]
    assert decoded[0].max() == 0 and decoded[1].min() == 0 and decoded[1].max() == 255
    assert decoded[1].shape == (shape if max(shape) <= 64 else (64, 32, 3))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 1.5, float("nan")])
def test_label_smoothing_out_of_range_is_refused(smoothing):
    with pytest.raises(UsageError, match=rf"label_smoothing must be in \[0, 1\), got {smoothing}"):
        _task(4, smoothing)


def test_a_model_given_with_parentheses_is_refused():
    built = mlp(image_shape=(2, 2, 1), num_classes=4, units=3)
    for wrong in (built, "resnet"):
        with pytest.raises(UsageError, match=rf"without parentheses, such as @resnet, got {type(wrong).__name__}"):
            ImageClassification(data=_logits_as_images(4), model=wrong)


def test_the_model_is_built_for_the_shape_and_classes_of_the_data():
    gin.parse_config("mlp.units = 3")
    model = ImageClassification(data=image_data(name="digits"), model=mlp).model()
    assert model.input_shape == (None, 8, 8, 1) and model.output_shape == (None, 10)
