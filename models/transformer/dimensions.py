"""Sizes that are refused."""

from collections.abc import Sequence

import tensorflow as tf


def at_least(**sizes: tuple[int, int]) -> None:
    """Refuses sizes below their least value, given as name=(size, least)."""
    for name, (size, least) in sizes.items():
        if size < least:
            raise ValueError(f"{name} must be at least {least}, and is {size}.")


def check_images(image_shape: Sequence[int], num_classes: int) -> None:
    """Refuses images and classes that cannot be."""
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise ValueError(f"image_shape must be (height, width, channels), each at least 1, and is {image_shape}.")
    at_least(num_classes=(num_classes, 1))


def check_heads(width: int, heads: int, kv_heads: int | None = None) -> None:
    """Refuses heads that do not divide the width, or each other."""
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, and is {width} with heads = {heads}.")
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise ValueError(f"kv_heads must divide heads = {heads}, and is {kv_heads}.")


def check_even(**sizes: int) -> None:
    for name, size in sizes.items():
        if size % 2:
            raise ValueError(f"{name} must be even for these positions, and is {size}.")


def check_share(**shares: float) -> None:
    """Refuses dropout that is no share in [0, 1)."""
    for name, share in shares.items():
        if not 0.0 <= share < 1.0:
            raise ValueError(f"{name} must lie in [0, 1), and is {share}.")


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"There is no {name} {value!r}. Known: {', '.join(known)}.")


def check_length(tokens: tf.Tensor, max_length: int) -> None:
    """Refuses rows [batch, length] that are longer than the model was made for."""
    length = tokens.shape[1]
    if length is not None and length > max_length:
        raise ValueError(f"Rows of {length} tokens are longer than the model's max_length = {max_length}.")


def check_steps(steps: int, max_length: int) -> None:
    """Refuses to decode further than the model was made for."""
    if not 1 <= steps <= max_length:
        raise ValueError(f"Decoding can take 1 to {max_length} steps (the model's max_length), and not {steps}.")
