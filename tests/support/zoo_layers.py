"""The zoo's models of Keras's layers, each by its name: what trains, what draws numbers, and what prepares data."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import numpy as np
from zoo_kinds import (
    WORDS,
    Kind,
    attends,
    compiled,
    ids,
    images,
    merged,
    numbers,
    pictures,
    raw,
    sequences,
    tokens,
    vectors,
    volumes,
)

L = keras.layers


def layers() -> Iterable[tuple[str, Kind]]:
    of_vectors = {
        "Dense": lambda: L.Dense(64, "gelu"),
        "EinsumDense": lambda: L.EinsumDense("ab,bc->ac", 64, bias_axes="c"),
        "Identity": L.Identity,
        "ELU": L.ELU,
        "LeakyReLU": L.LeakyReLU,
        "PReLU": L.PReLU,
        "ReLU": lambda: L.ReLU(6.0),
        "Softmax": L.Softmax,
        "ActivityRegularization": lambda: L.ActivityRegularization(0.01),
        "BatchNormalization": L.BatchNormalization,
        "LayerNormalization": L.LayerNormalization,
        "UnitNormalization": L.UnitNormalization,
        "SpectralNormalization": lambda: L.SpectralNormalization(L.Dense(64)),
        "Reshape": lambda: L.Reshape((8, 8)),
        "RepeatVector": lambda: L.RepeatVector(3),
        "Lambda": lambda: L.Lambda(lambda x: x * 2),
        "Dense with constraint": lambda: L.Dense(64, kernel_constraint="max_norm"),
        "Dense with regularizer": lambda: L.Dense(64, kernel_regularizer="l2"),
        "Dense with orthogonal regularizer": lambda: L.Dense(
            64, kernel_regularizer=keras.regularizers.OrthogonalRegularizer()
        ),
        "Dense frozen": lambda: L.Dense(64, trainable=False),
        "Dense twice": lambda: (lambda one: lambda x: one(one(x)))(L.Dense(64)),
        "Normalization": lambda: L.Normalization(mean=0.1, variance=2.0),
    }
    yield from ((name, vectors(make)) for name, make in of_vectors.items())
    for name in ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract"):
        yield name, merged(getattr(L, name))
    yield "Dot", merged(lambda: L.Dot(1))
    of_sequences = {
        "LSTM": lambda: L.LSTM(64),
        "GRU": lambda: L.GRU(64),
        "SimpleRNN": lambda: L.SimpleRNN(64),
        "LSTM of sequences": lambda: L.LSTM(64, return_sequences=True),
        "LSTM unrolled": lambda: L.LSTM(64, unroll=True),
        "GRU backwards": lambda: L.GRU(64, go_backwards=True, reset_after=False),
        "RNN of cells": lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(32), L.GRUCell(32)])),
        "Bidirectional": lambda: L.Bidirectional(L.LSTM(32)),
        "TimeDistributed": lambda: L.TimeDistributed(L.Dense(64)),
        "Masking": lambda: lambda x: L.LSTM(64)(L.Masking()(x)),
        "Conv1D": lambda: L.Conv1D(64, 3),
        "Conv1D causal": lambda: L.Conv1D(64, 3, padding="causal", dilation_rate=2),
        "Conv1DTranspose": lambda: L.Conv1DTranspose(64, 3, strides=2),
        "SeparableConv1D": lambda: L.SeparableConv1D(64, 3),
        "DepthwiseConv1D": lambda: L.DepthwiseConv1D(3),
        "Cropping1D": lambda: L.Cropping1D(1),
        "ZeroPadding1D": lambda: L.ZeroPadding1D(1),
        "UpSampling1D": lambda: L.UpSampling1D(2),
        "AveragePooling1D": lambda: L.AveragePooling1D(2),
        "MaxPooling1D": lambda: L.MaxPooling1D(2),
        "GlobalAveragePooling1D": L.GlobalAveragePooling1D,
        "GlobalMaxPooling1D": L.GlobalMaxPooling1D,
        "AdaptiveAveragePooling1D": lambda: L.AdaptiveAveragePooling1D(3),
        "AdaptiveMaxPooling1D": lambda: L.AdaptiveMaxPooling1D(3),
        "Permute": lambda: L.Permute((2, 1)),
        "GroupNormalization": lambda: L.GroupNormalization(8),
        "RMSNormalization": lambda: L.RMSNormalization(),
    }
    yield from ((name, sequences(make)) for name, make in of_sequences.items())
    attention = {
        "MultiHeadAttention": lambda: L.MultiHeadAttention(4, 16),
        "GroupQueryAttention": lambda: L.GroupQueryAttention(16, 4, 2),
    }
    yield from ((name, attends(make)) for name, make in attention.items())
    for name in ("Attention", "AdditiveAttention"):
        yield name, sequences(lambda name=name: lambda x: getattr(L, name)()([x, x]))
    of_images = {
        "Conv2D": lambda: L.Conv2D(16, 3, strides=2),
        "Conv2D in groups": lambda: L.Conv2D(16, 3, groups=2),
        "Conv2D dilated": lambda: L.Conv2D(16, 3, dilation_rate=2),
        "Conv2DTranspose": lambda: L.Conv2DTranspose(16, 3, strides=2),
        "SeparableConv2D": lambda: L.SeparableConv2D(16, 3),
        "DepthwiseConv2D": lambda: L.DepthwiseConv2D(3, depth_multiplier=2),
        "Cropping2D": lambda: L.Cropping2D(1),
        "ZeroPadding2D": lambda: L.ZeroPadding2D(1),
        "UpSampling2D": lambda: L.UpSampling2D(2),
        "UpSampling2D bilinear": lambda: L.UpSampling2D(2, interpolation="bilinear"),
        "UpSampling2D bicubic": lambda: L.UpSampling2D(2, interpolation="bicubic"),
        "AveragePooling2D": lambda: L.AveragePooling2D(2),
        "MaxPooling2D": lambda: L.MaxPooling2D(2),
        "GlobalAveragePooling2D": L.GlobalAveragePooling2D,
        "GlobalMaxPooling2D": L.GlobalMaxPooling2D,
        "AdaptiveAveragePooling2D": lambda: L.AdaptiveAveragePooling2D(3),
        "AdaptiveMaxPooling2D": lambda: L.AdaptiveMaxPooling2D(3),
        "BatchNormalization of images": L.BatchNormalization,
        "Resizing inside": lambda: L.Resizing(6, 6),
        "Resizing nearest inside": lambda: L.Resizing(6, 6, interpolation="nearest"),
        "Resizing bicubic inside": lambda: L.Resizing(6, 6, interpolation="bicubic"),
        "Resizing area inside": lambda: L.Resizing(4, 4, interpolation="area"),
        "CenterCrop inside": lambda: L.CenterCrop(4, 4),
        "ConvLSTM1D": lambda: L.ConvLSTM1D(16, 3),
    }
    yield from ((name, images(make)) for name, make in of_images.items())
    of_volumes = {
        "Conv3D": lambda: L.Conv3D(64, 3),
        "Conv3DTranspose": lambda: L.Conv3DTranspose(8, 3),
        "Cropping3D": lambda: L.Cropping3D(1),
        "ZeroPadding3D": lambda: L.ZeroPadding3D(1),
        "UpSampling3D": lambda: L.UpSampling3D(2),
        "AveragePooling3D": lambda: L.AveragePooling3D(2),
        "MaxPooling3D": lambda: L.MaxPooling3D(2),
        "GlobalAveragePooling3D": L.GlobalAveragePooling3D,
        "GlobalMaxPooling3D": L.GlobalMaxPooling3D,
        "AdaptiveAveragePooling3D": lambda: L.AdaptiveAveragePooling3D(2),
        "AdaptiveMaxPooling3D": lambda: L.AdaptiveMaxPooling3D(2),
        "ConvLSTM2D": lambda: L.ConvLSTM2D(16, 3),
    }
    yield from ((name, volumes(make)) for name, make in of_volumes.items())
    of_tokens = {
        "Embedding": lambda: L.Embedding(32, 64),
        "Embedding with mask": lambda: lambda x: L.GRU(64)(L.Embedding(32, 64, mask_zero=True)(x)),
        "ReversibleEmbedding": lambda: lambda x: (one := L.ReversibleEmbedding(32, 64)) and one(one(x), reverse=True),
    }
    yield from ((name, tokens(make)) for name, make in of_tokens.items())


def drawing() -> Iterable[tuple[str, Kind]]:
    """What draws numbers: in a model it is off where nothing trains, so that all there is to see is that it trains."""
    of_vectors = {
        "Dropout": lambda: L.Dropout(0.3),
        "AlphaDropout": lambda: L.AlphaDropout(0.3),
        "GaussianDropout": lambda: L.GaussianDropout(0.3),
        "GaussianNoise": lambda: L.GaussianNoise(0.3),
    }
    yield from ((name, vectors(make, draws=True)) for name, make in of_vectors.items())
    yield "SpatialDropout1D", sequences(lambda: L.SpatialDropout1D(0.3), draws=True)
    yield "LSTM with dropout", sequences(lambda: L.LSTM(64, dropout=0.2, recurrent_dropout=0.2), draws=True)
    yield "SpatialDropout2D", images(lambda: L.SpatialDropout2D(0.3), draws=True)
    yield "SpatialDropout3D", volumes(lambda: L.SpatialDropout3D(0.3), draws=True)
    of_pictures = {
        "AugMix": lambda: L.AugMix(),
        "RandAugment": lambda: L.RandAugment(),
        "RandomBrightness": lambda: L.RandomBrightness(0.2),
        "RandomColorDegeneration": lambda: L.RandomColorDegeneration(0.5),
        "RandomColorJitter": lambda: L.RandomColorJitter(brightness_factor=0.2),
        "RandomContrast": lambda: L.RandomContrast(0.2),
        "RandomCrop": lambda: lambda x: L.Resizing(8, 8)(L.RandomCrop(6, 6)(x)),  # not cropped to evaluate
        "RandomElasticTransform": lambda: L.RandomElasticTransform(),
        "RandomErasing": lambda: L.RandomErasing(),
        "RandomFlip": lambda: L.RandomFlip(),
        "RandomGaussianBlur": lambda: L.RandomGaussianBlur(),
        "RandomGrayscale": lambda: L.RandomGrayscale(0.5),
        "RandomHue": lambda: L.RandomHue(0.2),
        "RandomInvert": lambda: L.RandomInvert(0.5),
        "RandomPerspective": lambda: L.RandomPerspective(),
        "RandomPosterization": lambda: L.RandomPosterization(4),
        "RandomRotation": lambda: L.RandomRotation(0.2),
        "RandomSaturation": lambda: L.RandomSaturation(0.4),
        "RandomSharpness": lambda: L.RandomSharpness(0.5),
        "RandomShear": lambda: L.RandomShear(0.2, 0.2),
        "RandomTranslation": lambda: L.RandomTranslation(0.2, 0.2),
        "RandomZoom": lambda: L.RandomZoom(0.2),
    }
    for name, make in of_pictures.items():
        yield name, pictures(lambda make=make: lambda x: L.Conv2D(16, 3, activation="tanh")(make()(x)), draws=True)
    for name in ("RandomContrast", "RandomZoom", "RandomBrightness"):  # behind weights, so that it has a gradient
        yield f"{name} inside", images(lambda name=name: getattr(L, name)(0.2), draws=True)


def preprocessing() -> Iterable[tuple[str, Kind]]:
    """Layers at a model's input."""
    of_pictures = {
        "AutoContrast": lambda: L.AutoContrast(),
        "CenterCrop": lambda: L.CenterCrop(6, 6),
        "Equalization": lambda: L.Equalization(),
        "Rescaling": lambda: L.Rescaling(1 / 255),
        "Resizing": lambda: L.Resizing(6, 6),
        "Resizing with padding": lambda: L.Resizing(6, 4, pad_to_aspect_ratio=True),
        "Resizing lanczos": lambda: L.Resizing(6, 6, interpolation="lanczos3"),
        "Solarization": lambda: L.Solarization(),
    }
    for name, make in of_pictures.items():
        yield (
            name,
            pictures(lambda make=make: lambda x: L.Conv2D(16, 3, activation="tanh")(L.Rescaling(1 / 255)(make()(x)))),
        )
    yield (
        "MelSpectrogram",  # `top_db` is below the loudest of the batch, which replicas have in parts
        raw(
            numbers(512),
            lambda: lambda x: L.Rescaling(0.01)(L.MelSpectrogram(fft_length=128, sequence_stride=64, top_db=1e3)(x)),
            tolerance=1e-5,
        ),
    )
    yield (
        "STFTSpectrogram",  # logarithms of what is next to 0
        raw(numbers(512, 1), lambda: L.STFTSpectrogram(frame_length=64, fft_length=64, frame_step=64), tolerance=1e-4),
    )
    kinds, words = ids(20, 1), WORDS[ids(5, 1)]
    embedded = lambda layer: lambda x: L.Embedding(32, 64)(layer(x))  # noqa: E731
    text = np.array([" ".join(WORDS[row]) for row in ids(5, 4)])
    numeric = {
        "CategoryEncoding one_hot": lambda: L.CategoryEncoding(20, output_mode="one_hot"),
        "CategoryEncoding multi_hot": lambda: L.CategoryEncoding(20, output_mode="multi_hot"),
        "CategoryEncoding count": lambda: L.CategoryEncoding(20, output_mode="count"),
        "IntegerLookup": lambda: embedded(L.IntegerLookup(vocabulary=[1, 2, 3])),
        "IntegerLookup one_hot": lambda: L.IntegerLookup(vocabulary=[1, 2, 3], output_mode="one_hot"),
        "IntegerLookup count": lambda: L.IntegerLookup(vocabulary=[1, 2, 3], output_mode="count"),
        "Hashing": lambda: embedded(L.Hashing(8)),
        "Hashing one_hot": lambda: L.Hashing(8, output_mode="one_hot"),
        "HashedCrossing": lambda: lambda x: L.HashedCrossing(8, output_mode="one_hot")((x, x)),
    }
    yield from ((name, raw(kinds, make)) for name, make in numeric.items())
    yield "Discretization", raw(numbers(1), lambda: embedded(L.Discretization([-1.0, 0.0, 1.0])))
    yield "Discretization one_hot", raw(numbers(1), lambda: L.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot"))
    strings = {
        "StringLookup": lambda: embedded(L.StringLookup(vocabulary=WORDS[:4])),
        "StringLookup one_hot": lambda: L.StringLookup(vocabulary=WORDS[:4], output_mode="one_hot"),
        "StringLookup multi_hot": lambda: L.StringLookup(vocabulary=WORDS[:4], output_mode="multi_hot"),
        "Hashing of strings": lambda: L.Hashing(8, output_mode="one_hot"),
        "HashedCrossing of strings": lambda: lambda x: L.HashedCrossing(8, output_mode="one_hot")((x, x)),
    }
    yield from ((name, raw(words, make)) for name, make in strings.items())
    texts = {
        "TextVectorization": lambda: embedded(L.TextVectorization(vocabulary=WORDS[:4], output_sequence_length=6)),
        "TextVectorization multi_hot": lambda: L.TextVectorization(vocabulary=WORDS[:4], output_mode="multi_hot"),
        "TextVectorization count": lambda: L.TextVectorization(vocabulary=WORDS[:4], output_mode="count"),
        "TextVectorization tf_idf": lambda: L.TextVectorization(
            vocabulary=list(WORDS[:4]), idf_weights=[0.5, 1.0, 1.5, 2.0], output_mode="tf_idf"
        ),
        "TextVectorization of characters": lambda: embedded(
            L.TextVectorization(vocabulary=list("abcde"), split="character", output_sequence_length=6)
        ),
        "TextVectorization of unknown length": lambda: (
            lambda x: L.GlobalAveragePooling1D()(embedded(L.TextVectorization(vocabulary=WORDS[:4]))(x))
        ),
    }
    yield from ((name, raw(text[:, None], make)) for name, make in texts.items())
    yield "several inputs", _several(words)


def _several(words: np.ndarray) -> Kind:
    """Named columns, of which some are looked up, and a weight that is used three times."""

    def model() -> keras.Model:
        shapes = {"text": "string", "colour": "string", "kind": "int32", "age": "float32"}
        inputs = {name: keras.Input((1,), dtype=dtype, name=name) for name, dtype in shapes.items()}
        of_text = L.TextVectorization(vocabulary=list(WORDS[:4]), output_sequence_length=6)(inputs["text"])
        features = [
            L.Flatten()(L.Embedding(8, 8)(of_text)),
            L.StringLookup(vocabulary=list(WORDS[:4]), output_mode="one_hot")(inputs["colour"]),
            L.IntegerLookup(vocabulary=[1, 2, 3], output_mode="count")(inputs["kind"]),
            L.Hashing(8, output_mode="one_hot")(inputs["kind"]),
            L.CategoryEncoding(5, output_mode="multi_hot")(inputs["kind"]),
            L.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot")(inputs["age"]),
            L.Normalization(mean=0.0, variance=2.0)(inputs["age"]),
        ]
        twice, of_both = L.Dense(64, "tanh"), L.Dense(64, "tanh")(L.Concatenate()(features))
        return compiled(inputs, twice(twice(of_both)), "adam")

    text = np.array([" ".join(row) for row in WORDS[ids(5, 4)]])[:, None]
    x = {"text": text, "colour": words, "kind": ids(5, 1), "age": numbers(1)}
    return Kind(model=model, x=x, y=numbers(1))
