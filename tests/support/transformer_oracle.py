"""Transformers a second time: NumPy in float64, from a model's weights by their paths, one row at a time."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6


class Weights:
    """A model's weights by path, in float64."""

    def __init__(self, model):
        self._arrays = {weight.path.split("/", 1)[1]: weight.numpy().astype(np.float64) for weight in model.weights}

    def __getitem__(self, path):
        return self._arrays[path]

    def get(self, path, default=0.0):
        return self._arrays.get(path, default)


def softmax(scores):
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attention(query, key, value, allowed):
    """One head of one row: [queries, width], [keys, width] twice, and bool [queries, keys]."""
    outputs = np.zeros((len(query), value.shape[-1]))
    for place, vector in enumerate(query):
        seen = np.flatnonzero(allowed[place])
        if seen.size:
            outputs[place] = softmax(key[seen] @ vector / np.sqrt(len(vector))) @ value[seen]
    return outputs


def sinusoids(positions, width):
    table = np.zeros((len(positions), width))
    for row, position in enumerate(positions):
        for element in range(width):
            angle = position / 10000.0 ** (2 * (element // 2) / width)
            table[row, element] = np.cos(angle) if element % 2 else np.sin(angle)
    return table


def rotate(vectors, positions):
    """Each pair (i, i + width / 2) is a complex number, turned by its position: [length, width]."""
    half = vectors.shape[-1] // 2
    speeds = 10000.0 ** (-np.arange(half) / half)
    turned = (vectors[:, :half] + 1j * vectors[:, half:]) * np.exp(1j * np.outer(positions, speeds))
    return np.concatenate([turned.real, turned.imag], -1)


def normalize(x, weights, path):
    """Layer normalisation where there is a beta, RMS normalisation otherwise."""
    beta = weights.get(f"{path}/beta", None)
    if beta is None:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPSILON) * weights[f"{path}/gamma"]
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * weights[
        f"{path}/gamma"
    ] + beta


def heads_attention(x, memory, weights, path, allowed, heads, kv_heads=None, positions=None):
    """Multi-head attention of one row; query head h uses key head h // (heads / kv_heads)."""
    kv_heads = kv_heads or heads
    query = np.split(x @ weights[f"{path}/query/kernel"], heads, -1)
    key = np.split(memory @ weights[f"{path}/key/kernel"], kv_heads, -1)
    value = np.split(memory @ weights[f"{path}/value/kernel"], kv_heads, -1)
    smear = weights.get(f"{path}/smear", None)
    if smear is not None:
        own = 1 / (1 + np.exp(-smear))
        key = [
            np.concatenate([part[:1], share * part[1:] + (1 - share) * part[:-1]])
            for share, part in zip(own, key, strict=True)
        ]
    if positions is not None:
        query, key = ([rotate(part, positions) for part in parts] for parts in (query, key))
    outputs = [
        attention(part, key[head * kv_heads // heads], value[head * kv_heads // heads], allowed)
        for head, part in enumerate(query)
    ]
    return np.concatenate(outputs, -1) @ weights[f"{path}/output/kernel"]


def gelu(x):
    """The exact one, x times the distribution function of the normal distribution."""
    from math import erf

    return x * 0.5 * (1.0 + np.vectorize(erf)(x / np.sqrt(2.0)))


def feed_forward(x, weights, path, activation):
    up = x @ weights[f"{path}/up/kernel"] + weights.get(f"{path}/up/bias")
    if activation == "swiglu":
        gate = x @ weights[f"{path}/gate/kernel"]
        inner = gate / (1.0 + np.exp(-gate)) * up
    else:
        inner = {"relu": lambda x: np.maximum(x, 0.0), "gelu": gelu}[activation](up)
    return inner @ weights[f"{path}/down/kernel"] + weights.get(f"{path}/down/bias")


def sublayer(x, function, weights, path, norm_first):
    if norm_first:
        return x + function(normalize(x, weights, path))
    return normalize(x + function(x), weights, path)


def embed(tokens, weights, path):
    matrix = weights[f"{path}/embeddings"]
    return matrix[tokens] * np.sqrt(matrix.shape[1])


def causal(length):
    return np.tril(np.ones((length, length), bool))


def encoder_decoder(weights, source, target, *, layers, heads, norm_first=False, shared=True):
    """Logits of one pair without padding."""
    names = ["embedding"] * 3 if shared else ["source_embedding", "target_embedding", "output_embedding"]
    width = weights[f"{names[0]}/embeddings"].shape[1]

    def block(x, path, allowed, memory=None):
        x = sublayer(
            x,
            lambda x: heads_attention(x, x, weights, f"{path}/attention", allowed, heads),
            weights,
            f"{path}/attention_norm",
            norm_first,
        )
        if memory is not None:
            everywhere = np.ones((len(x), len(memory)), bool)
            x = sublayer(
                x,
                lambda x: heads_attention(x, memory, weights, f"{path}/memory_attention", everywhere, heads),
                weights,
                f"{path}/memory_norm",
                norm_first,
            )
        return sublayer(
            x,
            lambda x: feed_forward(x, weights, f"{path}/feed_forward", "relu"),
            weights,
            f"{path}/feed_forward_norm",
            norm_first,
        )

    memory = embed(source, weights, names[0]) + sinusoids(range(len(source)), width)
    for number in range(1, layers + 1):
        memory = block(memory, f"encoder_block{number}", np.ones((len(source), len(source)), bool))
    if norm_first:
        memory = normalize(memory, weights, "encoder_norm")
    x = embed(target, weights, names[1]) + sinusoids(range(len(target)), width)
    for number in range(1, layers + 1):
        x = block(x, f"decoder_block{number}", causal(len(target)), memory)
    if norm_first:
        x = normalize(x, weights, "decoder_norm")
    return x @ weights[f"{names[2]}/embeddings"].T


def language_model(weights, tokens, *, layers, heads, kv_heads=None, activation="swiglu", positions="rotary"):
    """Logits of one text without padding."""
    places = np.arange(len(tokens))
    x = embed(tokens, weights, "embedding")
    if positions == "learned":
        x = x + embed(places, weights, "position_embedding")
    if positions == "sinusoidal":
        x = x + sinusoids(places, x.shape[1])
    rotary = places if positions == "rotary" else None
    for number in range(1, layers + 1):
        path = f"block{number}"
        x = sublayer(
            x,
            lambda x, path=path: heads_attention(
                x, x, weights, f"{path}/attention", causal(len(tokens)), heads, kv_heads, rotary
            ),
            weights,
            f"{path}/attention_norm",
            True,
        )
        x = sublayer(
            x,
            lambda x, path=path: feed_forward(x, weights, f"{path}/feed_forward", activation),
            weights,
            f"{path}/feed_forward_norm",
            True,
        )
    x = normalize(x, weights, "norm")
    head = weights.get("head/kernel", None)
    return x @ (weights["embedding/embeddings"].T if head is None else head)
