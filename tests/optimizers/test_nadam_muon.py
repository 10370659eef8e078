"""Nadam and Muon as their papers have them, against NumPy in float64; Muon's matrices of attention."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from launcher import optimizers
from launcher.errors import UsageError

pytestmark = pytest.mark.slow

STEPS = 6


def attention():
    """A model whose attention has kernels with three axes and biases with two, an embedding and a convolution."""
    ids = keras.Input((5,))
    x = keras.layers.Embedding(7, 4, name="table")(ids)
    x = keras.layers.MultiHeadAttention(2, 3, name="attention")(x, x)
    x = keras.layers.Conv1D(6, 3, name="conv")(x)
    return keras.Model(ids, keras.layers.Dense(2, name="head")(x))


def gradients_of(weights):
    rng = np.random.default_rng(2)
    return [[rng.normal(size=one.shape).astype(np.float32) for one in weights] for _ in range(STEPS)]


def trained(optimizer, weights, gradients):
    optimizer.build(weights, STEPS)
    apply = tf.function(optimizer.apply)
    for step, each in enumerate(gradients):
        apply([tf.constant(one) for one in each], tf.constant(float(step)))
    return [one.numpy() for one in weights]


def assert_follows(make, update):
    """`update(path, w, g, state, t)` in float64 gives the weights that the optimizer gives."""
    model = attention()
    weights = model.trainable_variables
    gradients, expected = gradients_of(weights), [one.numpy().astype(np.float64) for one in weights]
    states = [dict[str, float]() for _ in weights]
    for step, each in enumerate(gradients, start=1):
        expected = [
            update(v.path, w, g.astype(np.float64), s, step)
            for v, w, g, s in zip(weights, expected, each, states, strict=True)
        ]
    for variable, found, wanted in zip(weights, trained(make(), weights, gradients), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=2e-7, err_msg=variable.path)


def is_decayed(path):
    return not path.endswith(("bias", "gamma", "beta"))


def test_nadam_follows_dozat_2016_and_torch():
    def update(path, w, g, state, t):
        mu, ahead = (0.9 * (1 - 0.5 * 0.96 ** (step * 0.004)) for step in (t, t + 1))
        product = state["product"] = state.get("product", 1.0) * mu
        m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
        v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g * g
        u = (ahead / (1 - product * ahead) * m + (1 - mu) / (1 - product) * g) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        return w - 0.01 * (u + (0.3 * w if is_decayed(path) else 0.0))

    assert_follows(lambda: optimizers.nadam(learning_rate=0.01, weight_decay=0.3), update)


def newton_schulz(x):
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


@pytest.mark.parametrize("rms", [None, pytest.param(0.2, marks=pytest.mark.nightly)])
def test_muon_takes_attentions_kernels_for_matrices_and_its_biases_not(rms):
    inputs = {"query/kernel": 4, "key/kernel": 4, "value/kernel": 4, "attention_output/kernel": 6, "conv/kernel": 12}
    matrices = set()

    def update(path, w, g, state, t):
        rows = next((size for end, size in {**inputs, "head/kernel": 6}.items() if path.endswith(end)), None)
        decay = 0.3 * w if is_decayed(path) else 0.0
        if rows is None:
            m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
            v = state["v"] = 0.95 * state.get("v", 0.0) + 0.05 * g * g
            return w - 0.02 * (0.5 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + decay) + 0.01 * decay
        matrices.add(path)
        b = state["b"] = 0.95 * state.get("b", 0.0) + 0.05 * g
        matrix = newton_schulz((0.95 * b + 0.05 * g).reshape(rows, -1))
        columns = matrix.shape[1]
        scale = max(1, columns / rows) ** 0.5 if rms is None else rms * max(columns, rows) ** 0.5
        return w - 0.02 * (scale * matrix.reshape(w.shape) + decay)

    assert_follows(lambda: optimizers.muon(learning_rate=0.02, rms=rms, weight_decay=0.3, adam_rate=0.5), update)
    assert len(matrices) == 6


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: optimizers.muon(learning_rate=0.1, ns_steps=0), "muon.ns_steps"),
        (lambda: optimizers.muon(learning_rate=0.1, rms=-1.0), "muon.rms"),
        (lambda: optimizers.muon(learning_rate=0.1, by_adam=("(",)), "by_adam"),
        (lambda: optimizers.nadam(learning_rate=0.1, momentum_decay=-1.0), "nadam.momentum_decay"),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(make, said):
    with pytest.raises(UsageError, match=said):
        make()
