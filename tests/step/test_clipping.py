"""Every way of clipping against its definition in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from launcher.errors import UsageError
from launcher.step.clipping import Clipping

SHAPES = [(3, 3, 4, 8), (16, 5), (5,)]


def tensors(seed, size):
    source = np.random.default_rng(seed)
    return [(source.normal(size=shape) * size).astype("float32") for shape in SHAPES]


def clipped(clipping, gradients, weights):
    norm = np.float32(np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients)))
    constants = [tf.constant(gradient) for gradient in gradients]
    return [value.numpy() for value in clipping.apply(constants, tf.constant(norm), [tf.constant(w) for w in weights])]


def unit_norm(value):
    """Brock et al. 2021: over the fan-in of each output unit; over all of a vector."""
    axes = tuple(range(value.ndim - 1)) if value.ndim > 1 else (0,)
    return np.sqrt(np.sum(np.square(value), axis=axes, keepdims=True))


DEFINITIONS = {
    "global_norm": lambda g, w, every, bound: g * min(1, bound / np.sqrt(sum(np.sum(e**2) for e in every))),
    "value": lambda g, w, every, bound: np.clip(g, -bound, bound),
    "layer_norm": lambda g, w, every, bound: g * min(1, bound / np.linalg.norm(g)),
    "adaptive": lambda g, w, every, bound: (
        g * np.minimum(1, bound * np.maximum(unit_norm(w), 1e-3) / np.maximum(unit_norm(g), 1e-12))
    ),
}


@pytest.mark.parametrize("kind", sorted(DEFINITIONS))
@pytest.mark.parametrize("bound", [0.01, 0.5, 100.0])
def test_clipping_is_its_definition(kind, bound):
    gradients, weights = tensors(0, 0.2), tensors(1, 1.0)
    expected = [
        DEFINITIONS[kind](gradient, weight, gradients, bound)
        for gradient, weight in zip(gradients, weights, strict=True)
    ]
    found = clipped(Clipping(**{kind: bound}), gradients, weights)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", sorted(DEFINITIONS))
def test_zero_gradients_and_zero_weights_stay_finite(kind):
    zeros = [np.zeros(shape, "float32") for shape in SHAPES]
    for value in clipped(Clipping(**{kind: 0.1}), zeros, zeros):
        np.testing.assert_array_equal(value, np.zeros_like(value))
    moved = clipped(Clipping(**{kind: 0.1}), tensors(0, 1.0), zeros)
    assert all(np.isfinite(value).all() and np.abs(value).max() > 0 for value in moved)


def test_two_bounds_or_a_bound_of_nothing_are_refused():
    with pytest.raises(UsageError, match=r"Clipping.global_norm = 1.0, Clipping.value = 2.0"):
        Clipping(global_norm=1.0, value=2.0)
    with pytest.raises(UsageError, match=r"Clipping.adaptive = 0"):
        Clipping(adaptive=0)
