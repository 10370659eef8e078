"""What a model of the zoo is made of: data of some shape, a layer or a function in its middle, and a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

L, K = keras.layers, keras.ops
ROWS = 64
TOLERANCE = 1e-6
WORDS = np.array(["red", "green", "blue", "violet", "unknown"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One model.

    Attributes:
      model: makes it, compiled.
      x, y: its data, of ROWS examples.
      draws: whether its numbers are an engine's own.
      tolerance: relative, of losses.
    """

    model: Callable[[], keras.Model]
    x: Any
    y: np.ndarray
    draws: bool = False
    tolerance: float = TOLERANCE


@keras.saving.register_keras_serializable("zoo")
class Does(keras.layers.Layer):
    """A function of features and of a weight [64, 64]."""

    def __init__(self, function: Callable[..., Any], **rest: Any):
        super().__init__(**rest)
        self.function = function

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(64, 64), name="kernel")

    def call(self, x: Any) -> Any:
        return self.function(x, self.kernel)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=(ROWS, *shape)).astype("float32")


def ids(most: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(most).integers(0, most, (ROWS, *shape)).astype("int32")


def compiled(inputs: Any, features: Any, optimizer: Any = "sgd") -> keras.Model:
    if len(features.shape) > 2:
        features = L.Flatten()(features)
    model = keras.Model(inputs, L.Dense(1, "tanh")(L.Dense(64, "tanh")(features)))
    model.compile(optimizer() if callable(optimizer) else optimizer, "mse", metrics=["mae"])
    return model


def _of(x: Any, before: Callable[[Any], Any], make: Callable[[], Any], **about: Any) -> Kind:
    """A model of features with what `make` gives in its middle: a layer, or a function of a tensor."""

    def model() -> keras.Model:
        inputs = keras.Input(x.shape[1:], dtype="string" if x.dtype.kind == "U" else x.dtype.name)
        return compiled(inputs, make()(before(inputs)))

    return Kind(model=model, x=x, y=numbers(1), **about)


def vectors(make: Callable[[], Any], **about: Any) -> Kind:
    return _of(numbers(8), lambda x: L.Dense(64, "tanh")(x), make, **about)


def sequences(make: Callable[[], Any], **about: Any) -> Kind:
    return _of(numbers(8, 4), lambda x: L.Dense(64, "tanh")(x), make, **about)


def images(make: Callable[[], Any], **about: Any) -> Kind:
    return _of(numbers(8, 8, 3), lambda x: L.Conv2D(16, 3, padding="same", activation="tanh")(x), make, **about)


def pictures(make: Callable[[], Any], **about: Any) -> Kind:
    x = np.random.default_rng(0).integers(0, 256, (ROWS, 8, 8, 3)).astype("float32")
    return _of(x, lambda x: x, make, **about)


def volumes(make: Callable[[], Any], **about: Any) -> Kind:
    return _of(numbers(4, 4, 4, 2), lambda x: L.Conv3D(4, 1)(x), make, **about)


def tokens(make: Callable[[], Any], **about: Any) -> Kind:
    return _of(ids(32, 8), lambda x: x, make, **about)


def raw(x: np.ndarray, make: Callable[[], Any], **about: Any) -> Kind:
    return _of(x, lambda x: x, make, **about)


def merged(make: Callable[[], Any]) -> Kind:
    return vectors(lambda: lambda x: make()([x, L.Dense(64, "tanh")(x)]))


def attends(make: Callable[[], Any]) -> Kind:
    return sequences(lambda: lambda x: make()(x, x))


def operation(function: Callable[..., Any], **about: Any) -> Kind:
    """Of a [batch, 64] tensor x and a weight w [64, 64]."""
    return vectors(lambda: Does(function, name="does"), **about)


def in_image(function: Callable[[Any], Any], **about: Any) -> Kind:
    return images(lambda: Does(lambda x, w: function(x), name="does"), **about)


def loss(loss: Any, units: int, activation: str | None, y: np.ndarray, **about: Any) -> Kind:
    def model() -> keras.Model:
        layers = [keras.Input((8,)), L.Dense(64, "tanh"), L.Dense(64, "tanh"), L.Dense(units, activation)]
        model = keras.Sequential(layers)
        model.compile("sgd", loss() if callable(loss) else loss)
        return model

    return Kind(model=model, x=numbers(8), y=y, **about)


def optimizer(make: Callable[[], Any], **about: Any) -> Kind:
    def model() -> keras.Model:
        inputs = keras.Input((8,))
        return compiled(inputs, L.Dense(64, "tanh")(L.Dense(64, "tanh")(inputs)), make)

    return Kind(model=model, x=numbers(8), y=numbers(1), **about)
