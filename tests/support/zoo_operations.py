"""The zoo's models of Keras's losses, optimizers and operations, each by its name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from zoo_kinds import TOLERANCE, Kind, ids, in_image, loss, numbers, operation, optimizer

L, K = keras.layers, keras.ops


def losses() -> Iterable[tuple[str, Kind]]:
    real, classes, one_of = numbers(3), ids(4), np.eye(4, dtype="float32")[ids(4)]
    yes, positive = (numbers(1) > 0).astype("float32"), np.abs(numbers(3)) + 0.1  # percentages of no small number
    of_numbers = ("MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh", "CosineSimilarity")
    yield from ((name, loss(getattr(keras.losses, name), 3, None, real)) for name in of_numbers)
    of_positive = ("MeanAbsolutePercentageError", "MeanSquaredLogarithmicError", "Poisson")
    yield from ((name, loss(getattr(keras.losses, name), 3, "softplus", positive)) for name in of_positive)
    of_both = ("BinaryCrossentropy", "BinaryFocalCrossentropy", "Dice", "Tversky")
    yield from ((name, loss(getattr(keras.losses, name), 1, "sigmoid", yes)) for name in of_both)
    yield from ((name, loss(getattr(keras.losses, name), 1, "tanh", 2 * yes - 1)) for name in ("Hinge", "SquaredHinge"))
    of_classes = (
        "CategoricalCrossentropy",
        "CategoricalFocalCrossentropy",
        "CategoricalHinge",
        "KLDivergence",
        "CategoricalGeneralizedCrossEntropy",
    )
    for name in of_classes:
        y = classes if name == "CategoricalGeneralizedCrossEntropy" else one_of
        yield name, loss(lambda name=name: getattr(keras.losses, name)(), 4, "softmax", y)
    yield "SparseCategoricalCrossentropy", loss("sparse_categorical_crossentropy", 4, "softmax", classes)
    yield (
        "SparseCategoricalCrossentropy of logits",
        loss(lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True), 4, None, classes),
    )
    yield (
        "SparseCategoricalCrossentropy without a class",
        loss(lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1), 4, None, classes),
    )
    yield (
        "BinaryCrossentropy smoothed",
        loss(lambda: keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1), 1, None, yes),
    )
    # By its own gamma, 80, losses would be rounding alone.
    yield "Circle", loss(lambda: keras.losses.Circle(gamma=1.0), 8, "relu", classes[:, None])

    def of_sequence() -> keras.Model:
        model = keras.Sequential([keras.Input((8, 4)), L.Dense(64, "tanh"), L.Dense(64, "tanh"), L.Dense(6, "softmax")])
        model.compile("sgd", keras.losses.CTC())
        return model

    yield "CTC", Kind(model=of_sequence, x=numbers(8, 4), y=1 + ids(4, 3))


def optimizers() -> Iterable[tuple[str, Kind]]:
    names = (
        "SGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Ftrl",
        "Lamb",
        "Lion",
        "Muon",
        "Nadam",
        "RMSprop",
        "ScheduleFreeAdamW",
    )
    # RMSprop's first step is 3 times a gradient's sign: weights moved by 1e-7 of themselves move its losses by 3.2e-6.
    coarse = {"RMSprop": 1e-5}
    for name in names:
        make = functools.partial(getattr(keras.optimizers, name), 0.01)
        yield f"optimizer {name}", optimizer(make, tolerance=coarse.get(name, TOLERANCE))
    made: dict[str, Callable[[], Any]] = {
        "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
        "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
        "centered": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.9),
        "clipped norm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
        "clipped global norm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
        "clipped value": lambda: keras.optimizers.Adam(0.01, clipvalue=0.01),
        "average": lambda: keras.optimizers.Adam(0.01, use_ema=True),
        "decay": lambda: keras.optimizers.SGD(0.01, weight_decay=0.01),
        "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 10)),
    }
    yield from ((f"optimizer with {name}", optimizer(make)) for name, make in made.items())


def _in_while(x: Any, w: Any) -> Any:
    state = K.while_loop(lambda n, _: n < 3, lambda n, one: (n + 1, K.tanh(one @ w)), (0, x), maximum_iterations=3)
    return state[1]


def _in_scan(x: Any, w: Any) -> Any:
    def turned(one: Any, row: Any) -> Any:
        return K.fori_loop(0, 2, lambda _, each: K.tanh(each @ w) + row, one), one

    return K.scan(turned, x, K.transpose(K.reshape(x, (-1, 4, 16)), (1, 0, 2))[..., :1])[0]


def _until_small(x: Any, w: Any) -> Any:
    def is_large(one: Any) -> Any:
        return K.sum(K.abs(one), 1, keepdims=True) > 1.0

    def halved(one: Any) -> Any:
        return (K.where(is_large(one), one / 2 + 0 * one @ w, one),)

    return K.while_loop(lambda one: K.any(is_large(one)), halved, (x,))[0]


def _corners(x: Any) -> Any:
    count = tf.shape(x)[0]
    return tf.image.crop_and_resize(x, tf.tile([[0.0, 0, 0.5, 0.5]], [count, 1]), tf.range(count), (4, 4))


def _ragged(x: Any) -> Any:
    return tf.RaggedTensor.from_row_splits(x, [0, 32, 64])


def _ctc(x: Any, w: Any) -> Any:
    count = K.shape(x)[0]
    labels, lengths = K.ones((count, 2), "int32"), (K.full((count,), 2, "int32"), K.full((count,), 16, "int32"))
    return x + K.ctc_loss(labels, K.reshape(x, (-1, 16, 4)), *lengths)[:, None] / 100


def _tripled(one: Any) -> Any:
    return one * 1.0, lambda *args, upstream=None: 3 * (args[0] if args else upstream)


def _without_neighbours(x: Any) -> Any:
    kept = tf.image.non_max_suppression(tf.ones((4, 4)), tf.ones(4), 2)
    return x + 0 * tf.cast(kept[0], tf.float32)


def operations() -> Iterable[tuple[str, Kind]]:
    wave = lambda x: K.tanh(x)  # noqa: E731
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "matmul": lambda x, w: K.matmul(x, w),
        "matmul transposed": lambda x, w: K.matmul(x, K.transpose(w)),
        "einsum": lambda x, w: K.einsum("ab,cb->ac", x, w),
        "tensordot": lambda x, w: K.tensordot(x, w, 1),
        "dot of itself": lambda x, w: x @ (w @ w),
        "weight cut": lambda x, w: x[:, :32] @ w[:32],
        "weight in pieces": lambda x, w: K.concatenate([x @ one for one in K.split(w, 2, axis=1)], 1),
        "weight reshaped": lambda x, w: x @ K.reshape(w, (64, 8, 8))[:, :, 0],
        "weight flipped": lambda x, w: x @ K.flip(w, 0),
        "weight rolled": lambda x, w: x @ K.roll(w, 3, 1),
        "weight tiled": lambda x, w: x @ K.tile(w, (1, 2)),
        "weight padded": lambda x, w: x @ K.pad(w, ((0, 0), (1, 1))),
        "weight stacked": lambda x, w: K.sum(K.matmul(x, K.stack([w.value, -w, 2 * w])), 0),
        "weight summed": lambda x, w: x * K.sum(w, 0),
        "weight normed": lambda x, w: x @ (w / K.norm(w)),
        "weight's softmax": lambda x, w: x @ K.softmax(w),
        "weight of its sign": lambda x, w: x @ (K.stop_gradient(K.sign(w) - w) + w),
        "weight clipped": lambda x, w: x @ K.clip(w, -0.1, 0.1),
        "weight sorted": lambda x, w: x @ K.sort(w, axis=0),
        "weight's diagonal": lambda x, w: x * K.diagonal(w),
        "weight's triangle": lambda x, w: x @ K.triu(w),
        "weight rounded": lambda x, w: x @ (w + K.stop_gradient(K.round(w * 8) / 8 - w)),
        "weight taken": lambda x, w: x + K.take(w, K.argmax(x, axis=1), axis=0),
        "weight gathered along": lambda x, w: x @ K.take_along_axis(w, K.argsort(K.stop_gradient(w), axis=1), axis=1),
        "weight scattered": lambda x, w: x @ K.scatter_update(w, [[0, 0], [3, 5]], [1.0, 2.0]),
        "weight's slice updated": lambda x, w: x @ K.slice_update(w, (0, 0), K.ones((2, 64))),
        "weight in a loop": lambda x, w: K.fori_loop(0, 3, lambda _, one: wave(one @ w), x),
        "weight in while": _in_while,
        "weight in loops in a scan": _in_scan,
        "weight in scan": lambda x, w: K.scan(lambda one, _: (wave(one @ w), one), x, K.arange(3))[0],
        "weight in map": lambda x, w: K.map(lambda row: K.tensordot(row, w, 1), x),
        "weight in vectorized_map": lambda x, w: K.vectorized_map(lambda row: K.tensordot(row, w, 1), x),
        "weight in cond": lambda x, w: K.cond(K.sum(w) > 0, lambda: x @ w, lambda: x @ K.transpose(w)),
        "weight in switch": lambda x, w: K.switch(K.cast(K.sum(w) > 0, "int32"), [lambda a: a @ w, lambda a: a - 1], x),
        "weight in associative_scan": lambda x, w: x @ K.associative_scan(K.add, w.value),
        "weight inverted": lambda x, w: x @ K.inv(w + 8 * K.eye(64)),
        "weight solved": lambda x, w: K.transpose(K.solve(w + 8 * K.eye(64), K.transpose(x))),
        "weight solved by triangle": lambda x, w: K.transpose(
            K.solve_triangular(w + 8 * K.eye(64), K.transpose(x), lower=True)
        ),
        "weight's cholesky": lambda x, w: x @ K.cholesky(w @ K.transpose(w) + K.eye(64)),
        "weight's qr": lambda x, w: x @ K.qr(w + 8 * K.eye(64))[0],
        "weight's svd": lambda x, w: x * K.svd(w, compute_uv=False),
        "weight's eigh": lambda x, w: x * K.eigh(w + K.transpose(w))[0],
        "weight's det": lambda x, w: x * K.det(w / 8 + K.eye(64)),
        "weight's slogdet": lambda x, w: x * K.slogdet(w + 8 * K.eye(64))[1] / 100,
        "weight's logdet": lambda x, w: x * K.logdet(w @ K.transpose(w) + K.eye(64)) / 100,
        "weight's lstsq": lambda x, w: x + K.transpose(K.lstsq(w + 8 * K.eye(64), K.ones((64, 1)))),
        "weight's pinv": lambda x, w: x @ K.pinv(w + 8 * K.eye(64)),
        "weight as complex": lambda x, w: K.real(K.fft((x @ w, 0 * x))[0]),
        "weight twice and cast": lambda x, w: x @ K.cast(K.cast(w, "bfloat16"), "float32") + x @ w,
        "weight as convolution": lambda x, w: K.conv(K.reshape(x, (-1, 8, 8)), K.reshape(w, (8, 8, 64)), 1)[:, 0],
        "weight bound by a name": lambda x, w: K.relu(x @ w.value),
        "weight read by tf": lambda x, w: tf.matmul(x, tf.convert_to_tensor(w)),
        "weight in tf.map_fn": lambda x, w: tf.map_fn(lambda row: tf.tensordot(row, w.value, 1), x),
        "weight in tf.function": lambda x, w: tf.function(lambda a: tf.tanh(a @ w.value))(x),
        "weight recomputed": lambda x, w: tf.recompute_grad(lambda a: tf.tanh(a @ w.value))(x),
        "argsort": lambda x, w: K.take_along_axis(x, K.argsort(x), 1),
        "argpartition": lambda x, w: x + K.cast(K.argpartition(w[0], 3), "float32"),
        "top_k": lambda x, w: K.top_k(x, 8)[0],
        "in_top_k": lambda x, w: x * K.cast(K.in_top_k(K.argmax(x, 1), x, 3), "float32")[:, None],
        "sort": lambda x, w: K.sort(x),
        "median": lambda x, w: x - K.median(x, 1, keepdims=True),
        "quantile": lambda x, w: x - K.quantile(x, 0.3, 1, keepdims=True),
        "cumsum": lambda x, w: K.cumsum(x, 1),
        "cumprod": lambda x, w: K.cumprod(1 + x / 10, 1),
        "logsumexp": lambda x, w: x - K.logsumexp(x, 1, keepdims=True),
        "log_softmax": lambda x, w: K.log_softmax(x),
        "var": lambda x, w: x / (1 + K.var(x, 1, keepdims=True) + K.std(x, 1, keepdims=True)),
        "segment_sum": lambda x, w: K.transpose(K.segment_sum(K.transpose(x), K.arange(64) // 2, 32)),
        "segment_max": lambda x, w: K.transpose(K.segment_max(K.transpose(x), K.arange(64) // 2, 32)),
        "segment_sum of unknown number": lambda x, w: x + 0 * K.sum(K.segment_sum(x[0], K.arange(64) // 2)),
        "scatter": lambda x, w: x + K.scatter([[1], [3]], K.ones(2), (64,)),
        "where": lambda x, w: K.where(x > 0, x, 0.1 * x),
        "nonzero": lambda x, w: x + 0 * K.cast(K.shape(K.nonzero(x > 0)[0])[0], "float32"),
        "unique": lambda x, w: x + 0 * K.cast(K.sum(K.unique(K.argmax(x, 1))), "float32"),
        "one_hot": lambda x, w: x + K.one_hot(K.argmax(x, 1), 64),
        "multi_hot": lambda x, w: x + K.multi_hot(K.top_k(x, 2)[1], 64),
        "bincount": lambda x, w: x + K.cast(K.bincount(K.argsort(x), minlength=64), "float32")[..., :64],
        "histogram": lambda x, w: x + K.cast(K.histogram(w[0], 64)[0], "float32") / 1000,
        "digitize": lambda x, w: x + K.cast(K.digitize(x, np.array([-0.5, 0.0, 0.5], "float32")), "float32"),
        "searchsorted": lambda x, w: x + K.cast(K.searchsorted(K.convert_to_tensor([-0.5, 0.0, 0.5]), w[0]), "float32"),
        "erfinv": lambda x, w: K.erfinv(0.9 * wave(x)),
        "erf": lambda x, w: K.erf(x),
        "i0": lambda x, w: K.i0(x),
        "arctan2": lambda x, w: K.arctan2(x, 1 + x * x),
        "logaddexp": lambda x, w: K.logaddexp(x, -x),
        "floor and mod": lambda x, w: x + K.mod(x, 0.3) + K.floor(x),
        "sinc": lambda x, w: K.sinc(x),
        "cdist": lambda x, w: x + K.sum(K.cdist(x[:, None], w[None]), (1, 2))[:, None] / 1e4,
        "cross": lambda x, w: K.cross(x[:, :3], x[:, 3:6]),
        "outer": lambda x, w: K.outer(x[:, 0], K.arange(4.0)),
        "kron": lambda x, w: x @ K.kron(w[:, :32], K.ones((1, 2))),
        "vander": lambda x, w: K.vander(x[:, 0], 4),
        "trapezoid": lambda x, w: x + K.trapezoid(x, axis=1)[:, None],
        "diff": lambda x, w: K.diff(x, axis=1),
        "corrcoef": lambda x, w: x @ K.corrcoef(w),
        "rfft": lambda x, w: K.rfft(x)[0],
        "fft2": lambda x, w: K.fft2((K.reshape(x, (-1, 8, 8)), 0 * K.reshape(x, (-1, 8, 8))))[0],
        "irfft": lambda x, w: K.irfft(K.rfft(x)),
        "stft": lambda x, w: K.stft(x, 16, 8, 16)[0],
        "istft": lambda x, w: K.istft(K.stft(x, 16, 8, 16), 16, 8, 16)[:, :56],
        "extract_sequences": lambda x, w: K.extract_sequences(x, 16, 8),
        "dot_product_attention": lambda x, w: K.dot_product_attention(*[K.reshape(x, (-1, 4, 2, 8))] * 3),
        "ctc_loss": _ctc,
        "sparsemax": lambda x, w: keras.activations.sparsemax(x),
        "unfold": lambda x, w: K.unfold(K.reshape(x, (-1, 1, 8, 8)), 2),
        "custom_gradient": lambda x, w: K.custom_gradient(_tripled)(x),
        "numpy_function": lambda x, w: tf.ensure_shape(tf.numpy_function(lambda one: one, [x], tf.float32), x.shape),
        "print": lambda x, w: (tf.print(tf.reduce_sum(x), output_stream="file:///dev/null"), x)[1],
        "strings": lambda x, w: x + tf.cast(tf.strings.length(tf.strings.as_string(x)), tf.float32),
        "check": lambda x, w: tf.debugging.check_numerics(x, "no number"),
        "ragged": lambda x, w: x + tf.reduce_sum(_ragged(tf.transpose(x)).to_tensor(), (0, 1))[:, None],
        "boolean_mask": lambda x, w: tf.scatter_nd(tf.where(x > 0), tf.boolean_mask(x, x > 0), tf.shape(x, "int64")),
        "sparse": lambda x, w: x + tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(tf.round(x)), w.value),
        "while of unknown length": _until_small,
    }
    # Each replica rounds its own gradient to bfloat16; a decomposition's gradient divides by small differences.
    coarse = {"weight twice and cast": 1e-4, "weight's svd": 1e-5}
    for name, function in functions.items():
        yield f"ops.{name}", operation(function, tolerance=coarse.get(name, TOLERANCE))
    activations = (
        "celu",
        "exponential",
        "glu",
        "hard_shrink",
        "hard_sigmoid",
        "hard_silu",
        "hard_tanh",
        "log_sigmoid",
        "mish",
        "relu6",
        "selu",
        "silu",
        "soft_shrink",
        "softplus",
        "softsign",
        "sparse_plus",
        "sparse_sigmoid",
        "squareplus",
        "tanh_shrink",
        "threshold",
    )
    for name in activations:
        more = (0.1, 0.0) if name == "threshold" else ()
        yield (
            f"activation {name}",
            operation(lambda x, w, name=name, more=more: getattr(keras.activations, name)(x, *more)),
        )
    image = {
        "resize bilinear": lambda x: K.image.resize(x, (6, 6)),
        "resize antialiased": lambda x: K.image.resize(x, (6, 6), antialias=True),
        "resize bicubic": lambda x: K.image.resize(x, (12, 12), interpolation="bicubic"),
        "resize nearest": lambda x: K.image.resize(x, (12, 12), interpolation="nearest"),
        "resize lanczos3": lambda x: K.image.resize(x, (6, 6), interpolation="lanczos3"),
        "resize area": lambda x: tf.image.resize(x, (4, 4), method="area"),
        "resize mitchell": lambda x: tf.image.resize(x, (6, 6), method="mitchellcubic"),
        "affine": lambda x: K.image.affine_transform(x, K.array([1.0, 0.1, 0, 0, 1, 0, 0, 0])),
        "perspective": lambda x: K.image.perspective_transform(
            x, K.array([[0.0, 0], [0, 7], [7, 0], [7, 7]]), K.array([[1.0, 0], [0, 7], [7, 0], [7, 6]])
        ),
        "map_coordinates": lambda x: K.map(
            lambda one: K.image.map_coordinates(one[..., 0], K.ones((2, 8, 8)), 1)[..., None] + one, x
        ),
        "gaussian_blur": lambda x: K.image.gaussian_blur(x),
        "extract_patches": lambda x: K.image.extract_patches(x, 2),
        "pad_images": lambda x: K.image.pad_images(x, 1, 1, 10, 10),
        "crop_images": lambda x: K.image.crop_images(x, 1, 1, target_height=4, target_width=4),
        "rgb_to_hsv": lambda x: K.image.rgb_to_hsv(K.sigmoid(x[..., :3])),
        "hsv_to_rgb": lambda x: K.image.hsv_to_rgb(K.sigmoid(x[..., :3])),
        "rgb_to_grayscale": lambda x: K.image.rgb_to_grayscale(x[..., :3]),
        "adjust_contrast": lambda x: tf.image.adjust_contrast(x, 0.5),
        "adjust_hue": lambda x: tf.image.adjust_hue(tf.sigmoid(x[..., :3]), 0.1),
        "adjust_saturation": lambda x: tf.image.adjust_saturation(tf.sigmoid(x[..., :3]), 0.5),
        "per_image_standardization": lambda x: tf.image.per_image_standardization(x),
        "sobel_edges": lambda x: tf.image.sobel_edges(x),
        "psnr": lambda x: x + tf.image.psnr(x, x + 0.1, 1.0)[:, None, None, None] / 100,
        "ssim": lambda x: x + tf.image.ssim(x, x / 2, 1.0, filter_size=3)[:, None, None, None],
        "crop_and_resize": _corners,
        "depth_to_space": lambda x: tf.nn.depth_to_space(x, 2),
        "space_to_depth": lambda x: tf.nn.space_to_depth(x, 2),
        "local_response_normalization": lambda x: tf.nn.local_response_normalization(x),
        "max_pool_with_argmax": lambda x: tf.nn.max_pool_with_argmax(x, 2, 2, "SAME")[0],
        "fractional_max_pool": lambda x: tf.nn.fractional_max_pool(x, [1, 2, 2, 1], seed=1)[0],
        "dilation2d": lambda x: tf.nn.dilation2d(x, tf.ones((2, 2, 16)), [1] * 4, "SAME", "NHWC", [1] * 4),
        "non_max_suppression": _without_neighbours,
    }
    yield from ((f"image.{name}", in_image(function)) for name, function in image.items())
