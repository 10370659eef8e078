"""A network for images that stands for the ResNets where they are not the point: a second instead of three to trace."""

from __future__ import annotations

import gin
import keras

from launcher.models.normalization import BatchNormalization


@gin.configurable
def two_convolutions(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    group_size: int | None = 4,
    synchronized: bool = False,
) -> keras.Model:
    """Two strided convolutions, each normalised as a ResNet's are."""
    images = x = keras.Input(image_shape)
    for number, filters in enumerate((8, 16), start=1):
        x = keras.layers.Conv2D(filters, 3, 2, padding="same", use_bias=False, name=f"conv{number}")(x)
        norm = BatchNormalization(group_size=group_size, synchronized=synchronized, name=f"norm{number}")
        x = keras.layers.ReLU()(norm(x))
    x = keras.layers.GlobalAveragePooling2D(dtype="float32")(x)
    return keras.Model(images, keras.layers.Dense(num_classes, dtype="float32", name="logits")(x))
