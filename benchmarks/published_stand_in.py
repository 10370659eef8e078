"""What stands in an example of keras.io for data, pictures and noise: see `published_examples.py`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import sys
import tarfile
import time
import types
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import published_sets as sets


def _noise_like(low: float, high: float) -> Callable[..., Any]:
    """Numbers that are the same for each example, in a graph; at once, TensorFlow's own."""

    def of(real: Any) -> Any:
        def drawn(shape: Any, *args: Any, **arguments: Any) -> Any:
            import tensorflow as tf

            if tf.executing_eagerly():
                return real(shape, *args, **arguments)
            kinds = [arguments.get("dtype"), *args]
            kind = next((tf.as_dtype(one) for one in kinds if isinstance(one, tf.DType | str)), tf.float32)
            if kind.is_integer:
                return tf.fill(shape, tf.cast(arguments.get("minval", args[0] if args else 0), kind))
            shape = tf.convert_to_tensor(shape, tf.int32)
            inner_shape = shape if sets.ENTRIES.get(os.environ["PUBLISHED_NAME"], sets.Entry()).by_row else shape[1:]
            wave = tf.sin(1.7 * tf.cast(tf.range(tf.reduce_prod(inner_shape)), tf.float32) + 0.4)
            inner = tf.reshape(low + (high - low) * (0.5 + 0.5 * wave), inner_shape)
            return tf.cast(tf.broadcast_to(inner, shape), kind)

        return drawn

    return of


def _without_seed(of: Callable[..., Any]) -> Callable[..., Any]:
    def make(real: Any) -> Any:
        def drawn(shape: Any, seed: Any, *args: Any, **arguments: Any) -> Any:
            import tensorflow as tf

            # Those of Keras itself are first values of weights.
            if tf.executing_eagerly() or not sys._getframe(1).f_globals["__name__"].startswith("launcher."):
                return real(shape, seed, *args, **arguments)
            return of(real)(shape, *args, **arguments)

        return drawn

    return make


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    if hasattr(owner, name):
        setattr(owner, name, make(getattr(owner, name)))


def _without_dropout(real: Any) -> Any:
    @functools.wraps(real)
    def call(self: Any, *args: Any, **arguments: Any) -> Any:
        self.cell.dropout = self.cell.recurrent_dropout = 0.0
        return real(self, *args, **arguments)

    return call


def _noise_off() -> None:
    import keras
    import tensorflow as tf

    for name in ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "GaussianNoise",
                 "GaussianDropout", "AlphaDropout"):  # fmt: skip
        getattr(keras.layers, name).call = lambda self, inputs, training=False: inputs
    for name in ("LSTM", "GRU", "SimpleRNN", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"):
        _replace(getattr(keras.layers, name), "call", _without_dropout)
    for name in dir(keras.layers):
        if name.startswith("Random") or name in ("CutMix", "MixUp", "RandAugment", "AugMix", "Solarization"):
            kind = getattr(keras.layers, name)
            if name == "RandomCrop":
                kind.__call__ = lambda self, inputs, training=False: inputs[..., : self.height, : self.width, :]
            else:
                kind.__call__ = lambda self, inputs, *_, **__: inputs
    for module in (keras.random, tf.random):
        for name in ("normal", "truncated_normal"):
            _replace(module, name, _noise_like(-1.0, 1.0))
        _replace(module, "uniform", _noise_like(0.1, 0.9))
        _replace(module, "shuffle", lambda real: lambda x, *_, **__: x)
    for name, of in (("normal", (-1.0, 1.0)), ("truncated_normal", (-1.0, 1.0)), ("uniform", (0.1, 0.9))):
        _replace(tf.random, f"stateless_{name}", _without_seed(_noise_like(*of)))
    keras.random.randint = lambda shape, minval, maxval, dtype="int32", seed=None: tf.fill(
        shape, tf.cast(minval, dtype)
    )
    keras.random.dropout = lambda inputs, *_, **__: inputs
    for name in dir(tf.image):
        if re.match(r"(stateless_)?random_", name):
            _replace(tf.image, name, lambda real: lambda image, *_, **__: image)

    def crop(image: Any, size: Any, *_: Any, **__: Any) -> Any:
        return tf.slice(image, tf.zeros_like(size), size)

    tf.image.random_crop = tf.image.stateless_random_crop = crop
    tf.data.Dataset.shuffle = lambda self, *_, **__: self
    mapped = tf.data.Dataset.map
    tf.data.Dataset.map = lambda self, *args, **more: mapped(self, *args, **more | {"deterministic": True})


# Packages that fetch, show or score; what else is missing leaves an example out.
STUBBED = (
    "IPython", "cv2", "editdistance", "gdown", "imageio", "imgaug", "imutils", "ipywidgets", "jiwer", "librosa",
    "medmnist", "networkx", "nibabel", "nltk", "pydot", "rdkit", "requests", "seaborn", "tensorflow_addons",
    "tensorflow_docs", "tensorflow_io", "torch", "trimesh", "wandb",
)  # fmt: skip


def _stub(missing: Sequence[str]) -> None:
    for name in missing:

        class Stub(types.ModuleType):
            """Has whatever is asked for."""

            __path__: Sequence[str] = []

            def __getattr__(self, attribute: str) -> Any:
                if attribute.startswith("__"):
                    raise AttributeError(attribute)
                return mock.MagicMock(name=attribute)

        class Finder:
            """Finds its parts."""

            @staticmethod
            def find_spec(full: str, path: Any = None, target: Any = None, top: str = name) -> Any:
                if full.partition(".")[0] != top:
                    return None
                return importlib.machinery.ModuleSpec(full, Finder, is_package=True)

            @staticmethod
            def create_module(spec: Any) -> Any:
                return Stub(spec.name)

            @staticmethod
            def exec_module(module: Any) -> None:
                pass

        sys.meta_path.append(Finder)


def _archive(real: type[zipfile.ZipFile]) -> type[zipfile.ZipFile]:
    """An archive that a program has not fetched holds nothing; saved models, and what NumPy writes, are as they are."""

    class Archive(real):  # type: ignore[valid-type, misc]
        def __new__(cls, file: Any, mode: str = "r", *args: Any, **arguments: Any) -> Any:
            is_missing = mode == "r" and isinstance(file, str | os.PathLike) and not zipfile.is_zipfile(file)
            return mock.MagicMock() if is_missing else super().__new__(cls)

    return Archive


def stand_in() -> Callable[..., Any]:
    """Puts everything in its place, and returns what calls a `fit`."""
    import keras
    import matplotlib.pyplot as plt
    import pandas as pd
    import tensorflow as tf

    entry = sets.ENTRIES.get(os.environ["PUBLISHED_NAME"], sets.Entry())
    _stub([name for name in STUBBED if name != "tensorflow_addons" and importlib.util.find_spec(name) is None])
    keras.utils.set_random_seed(1)
    for name in sets.ARRAYS:
        getattr(keras.datasets, name).load_data = sets.load_arrays(name)
    keras.datasets.imdb.load_data = sets.load_words
    keras.datasets.boston_housing.load_data = keras.datasets.california_housing.load_data = sets.load_houses
    for module in (keras.utils, keras.preprocessing):
        _replace(module, "image_dataset_from_directory", lambda _: sets.pictures_from_directory)
        _replace(module, "text_dataset_from_directory", lambda _: sets.texts_from_directory)
    keras.utils.get_file = lambda fname=None, origin="", *_, **__: os.path.abspath(
        os.path.basename(str(fname or origin)) or "file"
    )
    keras.utils.plot_model = keras.Model.summary = lambda *_, **__: None
    for name in ("show", "savefig"):
        setattr(plt, name, lambda *_, **__: plt.close("all"))
    real_csv, patches = tf.data.experimental.make_csv_dataset, keras.ops.image.extract_patches
    tf.data.experimental.make_csv_dataset = lambda *args, **more: real_csv(*args, **more | {"shuffle": False}).map(
        lambda x, *rest: (dict(x), *rest)  # an OrderedDict is taken for inputs in another order by Keras 3.15
    )
    # Its first argument has another name since.
    keras.ops.image.extract_patches = lambda images=None, *args, image=None, **more: patches(
        image if images is None else images, *args, **more
    )
    addons = types.ModuleType("tensorflow_addons")
    addons.optimizers = types.SimpleNamespace(AdamW=keras.optimizers.AdamW)
    addons.layers = types.SimpleNamespace(
        InstanceNormalization=lambda **more: keras.layers.GroupNormalization(
            -1, **{name: value for name, value in more.items() if name == "gamma_initializer"}
        )
    )
    sys.modules["tensorflow_addons"] = addons
    np.Inf = np.inf  # NumPy 2 took it out
    np.loadtxt = sets.numbers_of_text
    pd.read_csv = sets.read_csv(entry, pd.read_csv)
    for module, name in ((urllib.request, "urlretrieve"), (urllib.request, "urlopen"), (shutil, "unpack_archive")):
        setattr(module, name, mock.MagicMock())
    for module, name in ((tarfile, "open"), (tarfile.TarFile, "open")):
        setattr(module, name, mock.MagicMock())
    zipfile.ZipFile = _archive(zipfile.ZipFile)  # type: ignore[misc]
    os.system = lambda command: 0  # type: ignore[assignment]
    for name in dir(keras.applications):
        if name[0].isupper():
            _replace(
                keras.applications, name, lambda real: lambda *args, **more: real(*args, **more | {"weights": None})
            )
    try:
        import tensorflow_datasets as tfds

        tfds.load, tfds.disable_progress_bar = sets.tfds_load, lambda: None
    except ImportError:
        pass
    _noise_off()
    if os.environ["PUBLISHED_BY"] == "dense":
        keras.layers.Embedding.call = lambda self, inputs: keras.ops.take(
            self.embeddings * 1.0, keras.ops.cast(inputs, "int32"), axis=0
        )
    if entry.files is not None:
        entry.files()
    del tf
    return _published_fit


def _smaller(data: Any, batches: int, size: int) -> Any:
    """The first examples."""
    import keras
    import tensorflow as tf

    if isinstance(data, tf.data.Dataset):
        data = data.take(batches)
        if data.cardinality() < 0:  # of a set of unknown length, Keras 3.15 counts an update too many in each epoch
            data = data.apply(tf.data.experimental.assert_cardinality(sum(1 for _ in data)))
        return data
    if isinstance(data, tuple):  # (x, y)
        return tuple(_smaller(one, batches, size) for one in data)
    if data is None or isinstance(data, keras.utils.PyDataset) or hasattr(data, "__next__"):
        return data
    rows = batches * size + size // 2 if batches > 1 else size
    return keras.tree.map_structure(lambda one: one[:rows] if len(getattr(one, "shape", ())) else one, data)


def _nudge(model: Any) -> None:
    """Changes weights by about their rounding."""
    random = sets.seeded()
    for one in model.trainable_variables:
        one.assign(one.numpy() * (1 + 1e-7 * random.choice([-1.0, 1.0], one.shape)).astype(np.float32))


_done: list[dict[str, list[float]]] = []
_histories: list[Any] = []


class Stopped(Exception):
    """What a callback of a program raises to end its training, as searches do."""


def _evaluate_first(model: Any, args: Sequence[Any], arguments: dict[str, Any]) -> None:
    """As programs do that tell what there was before training; leaves what it counts in the metrics."""
    given = {name: arguments[name] for name in ("x", "y", "sample_weight", "batch_size") if name in arguments}
    data = args[0] if args else given.get("x")
    if not hasattr(data, "__next__"):
        with contextlib.suppress(Exception):  # a train_step of its own without a call
            model.evaluate(*args[:2], **given, steps=arguments.get("steps_per_epoch"), verbose=0)


def _linted(model: Any, args: Sequence[Any], arguments: dict[str, Any]) -> Any:
    """Writes what `launcher.lint` says of a model on its first batch, and trains nothing."""
    import tensorflow as tf

    import launcher

    _evaluate_first(model, args, arguments)  # which builds it
    x = args[0] if args else arguments.get("x")
    if isinstance(x, tf.data.Dataset):
        x = next(iter(x))
        x = x[0] if isinstance(x, tuple) else x
    try:
        found = launcher.lint(model, x if "numpy" in f"{type(x)}" or isinstance(x, tf.Tensor | dict | list) else None)
        lines = [f"{one.rule}: {one}" for one in found]
    except Exception as error:
        lines = [f"{type(error).__name__}: {error}"]
    with Path(os.environ["PUBLISHED_LINT"]).open("a") as file:
        file.writelines(f"{line}\n" for line in lines or ["-"])
    return mock.MagicMock()


def _raised(fit: Callable[..., Any], args: Sequence[Any], arguments: dict[str, Any]) -> str:
    """What comes out of a fit of which a callback raises an exception of its own."""
    import keras

    def stop(epoch: int, logs: Any) -> None:
        raise Stopped(f"after epoch {epoch}")

    stops = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    try:
        fit(*args, **arguments | {"callbacks": [*keras.tree.flatten(arguments.get("callbacks") or []), stops]})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _published_fit(model: Any, *args: Any, **arguments: Any) -> Any:
    """`model.fit(…)`, or `launcher.fit(model, …)`, with sizes cut; only of what Keras trains."""
    import keras

    if not isinstance(model, keras.Model):
        return model.fit(*args, **arguments)
    entry = sets.ENTRIES.get(os.environ["PUBLISHED_NAME"], sets.Entry())
    if len(_done) == entry.fits:
        return _histories[-1]
    if len(args) > 2:
        arguments |= dict(zip(("batch_size", "epochs"), args[2:], strict=False))
    # What a step of a model's own returns is told of the last batch by Keras, and the mean of all by Launcher.
    batches = sets.BATCHES if type(model).train_step is keras.Model.train_step else 1
    size = min(arguments.get("batch_size") or 16, 16)
    args = tuple(_smaller(one, batches, size) for one in args[:2])
    for name in ("x", "y", "sample_weight", "validation_data"):
        if arguments.get(name) is not None:
            arguments[name] = _smaller(arguments[name], batches, size)
    for name, most in (
        ("epochs", 2),
        ("batch_size", size),
        ("steps_per_epoch", batches),
        ("validation_steps", batches),
    ):
        if arguments.get(name):
            arguments[name] = min(arguments[name], most)
    arguments |= {"shuffle": False, "verbose": 0}
    if not entry.callbacks:
        arguments.pop("callbacks", None)
    if os.environ["PUBLISHED_BY"] == "nudged":
        nudge = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: _nudge(model))
        arguments["callbacks"] = [*keras.tree.flatten(arguments.get("callbacks") or []), nudge]

    def fit(*args: Any, **arguments: Any) -> Any:
        if os.environ["PUBLISHED_BY"] != "launcher":
            return model.fit(*args, **arguments)
        import launcher

        return launcher.fit(model, *args, **arguments)

    again = "PUBLISHED_AGAIN" in os.environ
    if again and hasattr(getattr(model.optimizer, "learning_rate", None), "assign"):
        model.optimizer.learning_rate = 2.0 * float(model.optimizer.learning_rate)
    if "PUBLISHED_LINT" in os.environ:
        return _linted(model, args, arguments)
    is_timed = "PUBLISHED_TIMED" in os.environ
    if not is_timed:  # else Keras's graph of a validation would be there
        _evaluate_first(model, args, arguments)
    begun = time.perf_counter(), time.process_time()
    history = fit(*args, **arguments)
    ended = time.perf_counter(), time.process_time()
    if is_timed:
        with Path(os.environ["PUBLISHED_TIMED"]).open("a") as file:
            file.write(f"{ended[0] - begun[0]} {ended[1] - begun[1]}\n")
    told = {  # of a metric with several numbers Keras has an array, and Launcher each by a name
        f"{name}_{at}" if np.ndim(values[0]) else name: [float(np.ravel(one)[at]) for one in values]
        for name, values in history.history.items()
        for at in range(np.size(values[0]))
    }
    told["drawn from NumPy after"] = [float(np.random.random())]
    if again and not hasattr(args[0] if args else arguments.get("x"), "__next__"):
        told[f"raised {_raised(fit, args, arguments)}"] = [0.0]
    _done.append(told)
    _histories.append(history)
    Path(os.environ["PUBLISHED_RESULT"]).write_text(json.dumps(_done))
    keras.utils.set_random_seed(1 + len(_done))
    return history
