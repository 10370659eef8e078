"""Residual networks: ResNet v1.5 for photographs and the small networks of the CIFAR experiments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gin
import keras
import tensorflow as tf

from .normalization import BatchNormalization, PooledBatchNormalization
from .transformer.dimensions import check_images

Normalization = Callable[..., BatchNormalization]  # (name=, gamma_initializer=) -> layer

_SMALL = (8, 20, 32, 44, 56)  # depths, 6n + 2
# Blocks of each stage, by depth.
_BLOCKS = {depth: ((depth - 2) // 6,) * 3 for depth in _SMALL} | {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


@gin.configurable
def resnet(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    depth: int = 50,
    stem: str = "auto",
    norm_group_size: int | None = None,
    synchronized_norm: bool = False,
    norm_momentum: float = 0.9,
    norm_epsilon: float = 1e-5,
    zero_init_last_gamma: bool = True,
) -> keras.Model:
    """Builds a residual network for image classification.

    Depths 18, 34, 50, 101 and 152 are the networks of He et al. 2015 (arXiv 1512.03385, table 1) in the form called
    v1.5: the stride of a bottleneck stands in its 3x3 convolution instead of the first 1x1. Convolutions have no bias
    and their padding is explicit and symmetric, as in the networks that Goyal et al. 2017 (arXiv 1706.02677) and
    torchvision train; ResNet-50 has exactly 25,557,032 trainable parameters for 1000 classes of RGB images. The stem's
    pooling is padded as TensorFlow pads (even images below and to the right alone), as in the ResNets of TensorFlow's
    Model Garden and of Flax's examples: where torchvision's windows begin one pixel earlier, XLA would make a padded
    copy of the largest features, a twentieth of a TPU's step.

    Depths 8, 20, 32, 44 and 56 are the 6n+2 networks of He et al. 2015, section 4.2: three stages of 16, 32 and 64
    channels, and parameter-free shortcuts (the paper's option A: every second pixel, new channels zero). ResNet-20
    has 269,722 trainable parameters for 10 classes of RGB images.

    Convolutions are initialised after He et al. 2015 (arXiv 1502.01852), fan-out; the classifier with a standard
    deviation of 0.01 (Goyal et al. 2017, section 5.1). Layers are named by their place, as in
    `stage2_block1_conv1`, `stage2_block1_norm1`, `stage2_block1_shortcut_conv`, `logits`.

    Args:
        image_shape: Height and width in pixels, and channels; any size from 1 x 1 on.
        num_classes: Number of logits.
        depth: 18, 34, 50, 101, 152, or 8, 20, 32, 44, 56.
        stem: "7x7" (stride 2, then a max pooling of stride 2), "3x3" (stride 1, no pooling), or "auto": 7x7 for images
            of at least 64 pixels on the shorter side. The depths 8 to 56 of the 6n+2 kind have the 3x3 stem always.
        norm_group_size: Examples whose statistics normalise together in training, or None for the local batch.
        synchronized_norm: Whether the statistics are those of the batch of all replicas.
        norm_momentum: Share of the moving statistics that a training call keeps.
        norm_epsilon: Added to the variance.
        zero_init_last_gamma: Whether each residual block starts as the identity, by a zero scale in its last
            normalisation (Goyal et al. 2017, section 5.1).

    Returns:
        A functional model from images, float32 [batch, height, width, channels], to logits, float32
        [batch, num_classes], under any dtype policy; the layers between compute in the policy's dtype.
    """
    if depth not in _BLOCKS:
        raise ValueError(f"There is no ResNet of depth {depth}. Known depths: {', '.join(map(str, _BLOCKS))}.")
    check_images(image_shape, num_classes)
    norm = functools.partial(
        BatchNormalization,
        momentum=norm_momentum,
        epsilon=norm_epsilon,
        group_size=norm_group_size,
        synchronized=synchronized_norm,
    )
    is_small = depth in _SMALL
    all_filters = (16, 32, 64) if is_small else (64, 128, 256, 512)

    images = keras.Input(shape=tuple(image_shape), dtype="float32", name="image")
    filters = all_filters[0]
    if _stem_kind(stem, depth, image_shape) == "3x3":
        features = _convolution_norm_relu(images, name="stem", filters=filters, kernel=3, norm=norm)
    else:
        features = _convolution(images, name="stem_conv", filters=filters, kernel=7, stride=2)
        features = PooledBatchNormalization(name="stem_norm", **norm.keywords)(features)
    for stage, (blocks, filters) in enumerate(zip(_BLOCKS[depth], all_filters, strict=True), start=1):
        for block in range(1, blocks + 1):
            features = _block(
                features,
                name=f"stage{stage}_block{block}",
                kernels=(3, 3) if is_small or depth < 50 else (1, 3, 1),
                filters=filters,
                stride=2 if stage > 1 and block == 1 else 1,
                norm=norm,
                last_gamma="zeros" if zero_init_last_gamma else "ones",
                projects=not is_small,
            )
    # The head is float32: 16 bits would round a mean over many positions, and the logits.
    pooled = keras.layers.GlobalAveragePooling2D(dtype="float32", name="pool")(features)
    initializer = keras.initializers.RandomNormal(stddev=0.01)
    logits = keras.layers.Dense(num_classes, kernel_initializer=initializer, dtype="float32", name="logits")(pooled)
    return keras.Model(images, logits, name=f"resnet{depth}")


def _stem_kind(stem: str, depth: int, image_shape: tuple[int, int, int]) -> str:
    if stem not in ("auto", "7x7", "3x3"):
        raise ValueError(f"There is no stem {stem!r}. Known stems: auto, 7x7, 3x3.")
    if depth in _SMALL:
        if stem == "7x7":
            raise ValueError(f"ResNet-{depth} has a 3x3 stem. Set stem to 'auto', or use depth 18.")
        return "3x3"
    if stem == "auto":
        return "7x7" if min(image_shape[:2]) >= 64 else "3x3"
    return stem


def _block(
    inputs: Any,
    *,
    name: str,
    kernels: Sequence[int],
    filters: int,
    stride: int,
    norm: Normalization,
    last_gamma: str,
    projects: bool,
) -> Any:
    """Convolutions of these kernels, the first 3x3 with the stride (v1.5), beside a shortcut.

    Two kernels are a basic block; three a bottleneck, whose last one makes four times the channels.

    Args:
        inputs: Features [batch, height, width, channels].
        name: Prefix of the layers' names.
        kernels: Edges of the kernels.
        filters: Channels inside the block.
        stride: Of the first 3x3 convolution, and of the shortcut.
        norm: Makes a normalisation, by `name` and perhaps `gamma_initializer`.
        last_gamma: Initial scale of the last normalisation.
        projects: Where the shape changes, the shortcut is a 1x1 convolution and its normalisation (the paper's option
            B), or else a selection of pixels (option A).
    """
    features, count = inputs, len(kernels)
    for index, kernel in enumerate(kernels[:-1]):
        strides = stride if index == kernels.index(3) else 1
        features = _convolution_norm_relu(
            features, name=name, index=str(index + 1), filters=filters, kernel=kernel, stride=strides, norm=norm
        )
    filters *= 4 if count == 3 else 1
    features = _convolution(features, name=f"{name}_conv{count}", filters=filters, kernel=kernels[-1])
    features = norm(name=f"{name}_norm{count}", gamma_initializer=last_gamma)(features)
    beside = inputs
    if stride > 1 or inputs.shape[-1] != filters:
        if projects:
            beside = _convolution(inputs, name=f"{name}_shortcut_conv", filters=filters, kernel=1, stride=stride)
            beside = norm(name=f"{name}_shortcut_norm")(beside)
        else:
            beside = SubsamplingShortcut(filters=filters, stride=stride, name=f"{name}_shortcut")(inputs)
    total = keras.layers.Add(name=f"{name}_add")([features, beside])
    return keras.layers.ReLU(name=f"{name}_relu")(total)


@keras.saving.register_keras_serializable(package="models")
class SubsamplingShortcut(keras.layers.Layer):
    """The parameter-free shortcut of He et al. 2015 (option A): every `stride`-th pixel, and zeros for new channels.

    Args:
        filters: Channels of the output, at least those of the input; the zeros go half before, half after them.
        stride: Step between the pixels that are kept, in both directions.
    """

    def __init__(self, *, filters: int, stride: int, name: str | None = None, dtype: Any = None, **kwargs: Any) -> None:
        super().__init__(name=name, dtype=dtype, **kwargs)
        self.filters = filters
        self.stride = stride

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        new = self.filters - inputs.shape[-1]
        kept = inputs[:, :: self.stride, :: self.stride, :]
        return tf.pad(kept, [[0, 0], [0, 0], [0, 0], [new // 2, new - new // 2]])

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        batch, *sizes, _ = input_shape
        return (batch, *(None if size is None else -(-size // self.stride) for size in sizes), self.filters)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"filters": self.filters, "stride": self.stride}


def _convolution_norm_relu(
    inputs: Any, *, name: str, filters: int, kernel: int, norm: Normalization, stride: int = 1, index: str = ""
) -> Any:
    features = _convolution(inputs, name=f"{name}_conv{index}", filters=filters, kernel=kernel, stride=stride)
    features = norm(name=f"{name}_norm{index}")(features)
    return keras.layers.ReLU(name=f"{name}_relu{index}")(features)


def _convolution(inputs: Any, *, name: str, filters: int, kernel: int, stride: int = 1) -> Any:
    padding = "same"
    if stride > 1 and kernel > 1:
        # "same" would pad an even image on one side only when there is a stride, and shift it by a pixel.
        inputs = keras.layers.ZeroPadding2D(kernel // 2, name=f"{name}_pad")(inputs)
        padding = "valid"
    # A new initializer each: one instance would give equal values to all kernels of a shape.
    initializer = keras.initializers.VarianceScaling(scale=2.0, mode="fan_out", distribution="untruncated_normal")
    return keras.layers.Conv2D(
        filters, kernel, strides=stride, padding=padding, use_bias=False, kernel_initializer=initializer, name=name
    )(inputs)
