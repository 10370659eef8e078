"""A model of Keras's own attention layers, for gpu_check.py: images as a ViT has them, and padded text; SMALL=1: tiny.

python benchmarks/gpu_run.py --gin_file=benchmarks/gpu_keras_attention.py --engine=pjrt
"""

import os

import keras
import numpy as np
from keras import layers

import launcher

ROWS, PATCHES, TOKENS, WIDTH = (4, 9, 16, 16) if os.environ.get("SMALL") else (32, 197, 1024, 512)
HEADS, WORDS = WIDTH // 8 if os.environ.get("SMALL") else WIDTH // 64, 1000


def block(inputs, attention, **given):
    normal = layers.LayerNormalization()(inputs)
    return layers.Add()([inputs, attention(normal, normal, **given)])


def build():
    width, ends = WIDTH // HEADS, []
    patches, tokens = keras.Input((PATCHES, WIDTH)), keras.Input((TOKENS,), dtype="int32")
    # Not a causal mask besides padding: XLA took a minute and more to compile that, a constant for every row.
    words = layers.Embedding(WORDS, WIDTH, mask_zero=True)(tokens)
    for found, given in ((patches, {"use_causal_mask": True}), (words, {})):
        found = block(found, layers.MultiHeadAttention(HEADS, width))
        found = block(found, layers.GroupQueryAttention(width, HEADS, 1), **given)
        ends.append(layers.GlobalAveragePooling1D()(found))
    model = keras.Model([patches, tokens], layers.Dense(10, dtype="float32")(layers.Concatenate()(ends)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.001), loss)
    return model


random = np.random.default_rng(0)
labels = random.integers(0, 10, 2 * ROWS)
images = random.normal(labels[:, None, None] / 20, size=(2 * ROWS, PATCHES, WIDTH)).astype(np.float32)
words = random.integers(1, WORDS, (2 * ROWS, TOKENS)) * (
    np.arange(TOKENS) < random.integers(TOKENS // 2, TOKENS, (2 * ROWS, 1))
)
launcher.fit(build, ([images, words.astype(np.int32)], labels), batch_size=ROWS)
