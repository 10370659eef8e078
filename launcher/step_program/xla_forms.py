"""Operations on images that XLA has no kernel of, said by those that it has: what resizes, turns and shifts a picture.

`FORMS` has them by the type of the operation: each is given the operation as it stands in a graph, whose sizes are
known, and returns a function of its inputs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

Form = Callable[..., tf.Tensor]


def _resized(one: tf.Operation) -> Form:
    """Resizing, or its gradient: on each axis a product with a matrix, which is what the kernel makes of ones."""
    name, is_gradient = one.type.removesuffix("Grad"), one.type.endswith("Grad")
    about = {key: one.get_attr(key) for key in _ATTRIBUTES if key in one.node_def.attr}
    about = {key: value.decode() if isinstance(value, bytes) else value for key, value in about.items()}

    def of_axis(axis: int) -> np.ndarray:
        sizes = (int(one.inputs[0].shape[axis]), int(one.outputs[0].shape[axis]))
        before, after = reversed(sizes) if is_gradient else sizes
        ones = np.eye(before, dtype=np.float32).reshape(1, before, 1, before)
        moved = {"scale": [after / before, 1.0], "translation": [0.0, 0.0]} if name == "ScaleAndTranslate" else {}
        return getattr(tf.raw_ops, name)(images=ones, size=[after, 1], **moved, **about).numpy()[0, :, 0]

    rows, columns, result = of_axis(1), of_axis(2), one.outputs[0].dtype
    equation = "bhwc,hy,wx->byxc" if is_gradient else "byxc,hy,wx->bhwc"
    return lambda image, *_: tf.cast(tf.einsum(equation, tf.cast(image, tf.float32), rows, columns), result)


def _projected(one: tf.Operation) -> Form:
    """ImageProjectiveTransformV3, each place of the output read where the transform says, as its kernel does."""
    size = [int(length) for length in one.outputs[0].shape[1:3]]
    mode, interpolation = one.get_attr("fill_mode").decode(), one.get_attr("interpolation").decode()

    def mapped(at: tf.Tensor, length: int) -> tf.Tensor:
        if mode == "REFLECT":
            at = tf.math.floormod(at, 2.0 * length)
            at = tf.where(at > length - 1, tf.where(at >= length, 2.0 * length - at - 1, at), at)
        elif mode == "WRAP":
            turns = max(length - 1, 1)
            below = at + length * (tf.floor(-at / turns) + 1)
            at = tf.where(at < 0, below, tf.where(at > length - 1, at - length * tf.floor(at / turns), at))
        return at if mode == "CONSTANT" else tf.clip_by_value(at, 0.0, length - 1.0)

    def form(images: tf.Tensor, transforms: tf.Tensor, _: tf.Tensor, fill: tf.Tensor) -> tf.Tensor:
        count, height, width, depth = images.shape
        y, x = tf.meshgrid(tf.range(size[0], dtype=tf.float32), tf.range(size[1], dtype=tf.float32), indexing="ij")
        a, b, c, d, e, f, g, h = (each[:, None, None] for each in tf.unstack(transforms, axis=1))
        by = g * x + h * y + 1.0
        along = mapped(tf.math.divide_no_nan(a * x + b * y + c, by), width)
        down = mapped(tf.math.divide_no_nan(d * x + e * y + f, by), height)
        flat = tf.reshape(images, [count, height * width, depth])

        def read(rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
            is_there = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width) & (by != 0)
            place = tf.clip_by_value(rows, 0, height - 1) * width + tf.clip_by_value(columns, 0, width - 1)
            place = tf.broadcast_to(tf.cast(place, tf.int32), [count, *size])
            found = tf.gather(flat, tf.reshape(place, [count, -1]), batch_dims=1)
            found = tf.reshape(tf.cast(found, tf.float32), [count, *size, depth])
            return tf.where(is_there[..., None], found, fill)

        if interpolation == "NEAREST":  # halves go away from zero
            near = [tf.sign(each) * tf.floor(tf.abs(each) + 0.5) for each in (down, along)]
            return tf.cast(read(*near), images.dtype)
        above, left = tf.floor(down), tf.floor(along)
        share_down, share_along = (down - above)[..., None], (along - left)[..., None]
        upper = (1 - share_along) * read(above, left) + share_along * read(above, left + 1)
        lower = (1 - share_along) * read(above + 1, left) + share_along * read(above + 1, left + 1)
        return tf.cast((1 - share_down) * upper + share_down * lower, images.dtype)

    return form


_RESIZES = ("ResizeArea", "ResizeBicubic", "ResizeBicubicGrad", "ResizeNearestNeighborGrad", "ScaleAndTranslate")
_ATTRIBUTES = ("align_corners", "half_pixel_centers", "kernel_type", "antialias")
FORMS: dict[str, Callable[[tf.Operation], Form]] = {
    **dict.fromkeys((*_RESIZES, "ScaleAndTranslateGrad"), _resized),
    "ImageProjectiveTransformV3": _projected,
}


def replace(node: Any, one: tf.Operation, library: Any) -> Any:
    """Has a node of a graph's definition call its form, if it has one, which is added to the library.

    Returns what has to be kept for as long as the graph is used.
    """
    if one.type not in FORMS or not all(each.shape.is_fully_defined() for each in (one.inputs[0], *one.outputs)):
        return None
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in one.inputs]
    made = tf.function(FORMS[one.type](one), autograph=False).get_concrete_function(*specs)
    library.function.add().CopyFrom(made.function_def)
    node.op = "PartitionedCall"
    node.attr.clear()
    node.attr["Tin"].list.type.extend(each.dtype.as_datatype_enum for each in one.inputs)
    node.attr["Tout"].list.type.extend(each.dtype.as_datatype_enum for each in one.outputs)
    node.attr["f"].func.name = made.function_def.signature.name
    return made
