"""Image classification: cross-entropy over float32 logits, top-1 accuracy."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence

import gin
import keras
import tensorflow as tf

from launcher.data.images.image_data import ImageData
from launcher.data.pipeline import Batch
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph
from launcher.reporting.sinks import PICTURE, Samples
from launcher.tasks.base import Served, Sums, Task, check_builder

_PICTURE_PIXELS = 64


@gin.configurable(name_or_fn="image_classification")
class ImageClassification(Task):
    """Softmax cross-entropy with label smoothing; metrics are accuracy and, past ten classes, top-5.

    Of images that the data mixes (`image_data.mixup`, `image_data.cutmix`) both labels are the target, each with its
    share; training metrics count the label with the larger one. Evaluation neither mixes nor smooths.

    Args:
      data: images and labels, `@image_data()`.
      model: builder called with `image_shape` and `num_classes`, a reference such as `@resnet`.
      label_smoothing: share of the target spread evenly over all classes (Szegedy et al. 2015), in [0, 1).
    """

    def __init__(
        self,
        *,
        data: ImageData = gin.REQUIRED,
        model: Callable[..., keras.Model] = gin.REQUIRED,
        label_smoothing: float = 0.0,
    ):
        if not 0 <= label_smoothing < 1:
            raise UsageError(f"image_classification.label_smoothing must be in [0, 1), got {label_smoothing}")
        check_builder("image_classification.model", model, "@resnet")
        self._data = data
        self._model = model
        self._label_smoothing = label_smoothing

    def data(self) -> ImageData:
        return self._data

    def model(self) -> keras.Model:
        return self._model(image_shape=self._data.image_shape, num_classes=self._data.num_classes)

    @no_autograph
    def loss(self, model: keras.Model, batch: Batch, training: bool) -> Sums:
        logits = tf.cast(model(batch["image"], training=training), tf.float32)
        weight = batch["weight"]
        mixed = training and "mix" in batch
        label = tf.where(batch["mix"] >= 0.5, batch["label"], batch["label_b"]) if mixed else batch["label"]
        # Smoothing regularises training; evaluation reports the plain cross-entropy, comparable between recipes.
        smoothing = self._label_smoothing if training else 0.0
        target = self._target(batch["label"], smoothing)
        if mixed:
            share = batch["mix"][:, tf.newaxis]
            target = share * target + (1 - share) * self._target(batch["label_b"], smoothing)
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=target, logits=logits)
        correct = tf.cast(tf.equal(tf.argmax(logits, axis=-1, output_type=label.dtype), label), tf.float32)
        metrics = {"accuracy": tf.reduce_sum(correct * weight)}
        if self._data.num_classes > 10:
            in_top_5 = tf.cast(tf.math.in_top_k(label, logits, k=5), tf.float32)
            metrics["top_5_accuracy"] = tf.reduce_sum(in_top_5 * weight)
        return tf.reduce_sum(losses * weight), tf.reduce_sum(weight), metrics

    def served(self, model: keras.Model) -> Served | None:
        """JPEG or PNG files in, probabilities and the likeliest class out; None where data has no files."""
        decode = self.decode_images
        if decode is None:
            return None

        @no_autograph
        def serve(image: tf.Tensor) -> dict[str, tf.Tensor]:
            probabilities = self.classify(model, {"image": decode(image)})
            return {"probabilities": probabilities, "class": tf.argmax(probabilities, axis=-1)}

        return Served("image", serve, [])

    num_samples = 24

    @property
    def decode_images(self) -> Callable[[tf.Tensor], tf.Tensor] | None:
        return self._data.decode

    @property
    def class_names(self) -> Sequence[str]:
        return getattr(self._data, "class_names", ())

    @no_autograph
    def classify(self, model: keras.Model, batch: Batch) -> tf.Tensor:
        """Probabilities of the classes, float32 [b, classes]."""
        return tf.nn.softmax(tf.cast(model(batch["image"], training=False), tf.float32))

    def samples(self, model: keras.Model, batch: Batch) -> Samples:
        """(picture, the likeliest class, the true one); see `ShowsSamples`."""
        named = self.class_names or [str(number) for number in range(self._data.num_classes)]
        found = tf.argmax(self.classify(model, batch), axis=-1).numpy()
        shown = zip(map(_picture, batch["image"]), found, batch["label"].numpy(), strict=True)
        return [(picture, str(named[made]), str(named[label])) for picture, made, label in shown]

    def _target(self, label: tf.Tensor, smoothing: float) -> tf.Tensor:
        """Probabilities, float32 [batch, num_classes]."""
        off = smoothing / self._data.num_classes
        return tf.one_hot(label, self._data.num_classes, on_value=1.0 - smoothing + off, off_value=off)


def _picture(image: tf.Tensor) -> str:
    """A small PNG as a data URI; the range of its values, which were normalised, becomes that of a picture."""
    height, width, channels = image.shape
    image = tf.cast(image if channels in (1, 3) else image[..., :1], tf.float32)
    if (largest := max(height, width)) > _PICTURE_PIXELS:
        size = [max(1, edge * _PICTURE_PIXELS // largest) for edge in (height, width)]
        image = tf.image.resize(image, size, antialias=True)
    low, high = tf.reduce_min(image), tf.reduce_max(image)
    scaled = tf.cast(tf.round(255 * (image - low) / tf.maximum(high - low, 1e-3)), tf.uint8)
    return PICTURE + base64.b64encode(tf.io.encode_png(scaled).numpy()).decode()
