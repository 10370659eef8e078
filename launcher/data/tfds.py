"""TensorFlow Datasets: opening a prepared data set, saying what to do where it is not, reading it into memory.

Nothing here touches the network. TFDS is imported on first use, TensorFlow not before examples are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.json_format import ParseError

from launcher.data.catalog import TFDS, Facts
from launcher.errors import MissingInputError, UsageError, listed, nearest
from launcher.machine import installation

if TYPE_CHECKING:
    import tensorflow as tf

    from launcher.data.images.decode import ImageDecoder


def data_dir() -> str:
    """The folder of prepared data sets: $TFDS_DATA_DIR (which --data_dir sets), else ~/tensorflow_datasets."""
    return os.path.expanduser(os.environ.get("TFDS_DATA_DIR") or os.path.join("~", "tensorflow_datasets"))


def module() -> types.ModuleType:
    """The module `tensorflow_datasets`; raises UsageError where it, or a module that it needs, is not installed."""
    try:
        # TFDS 4.9.10 imports importlib_resources without requiring it (tensorflow/datasets issue 11212).
        import importlib_resources  # noqa: F401
        import tensorflow_datasets
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing: pip install tensorflow-datasets importlib_resources") from None
    return tensorflow_datasets


def open_builder(name: str) -> Any:
    """The `tfds.core.DatasetBuilder` of a data set such as "imagenet_resized/32x32", prepared in `data_dir()` or not.

    Raises:
      UsageError: TFDS knows no such data set, configuration or version.
    """
    tfds = module()
    if not re.fullmatch(r"\w+(/[\w.+-]+)*(:[\w.*]+)?", name):
        raise UsageError(f"{name!r} is not the name of a TFDS data set; write it as in 'cifar10' or 'mnist:3.0.1'")
    try:
        return tfds.builder(name, data_dir=data_dir(), try_gcs=False)
    except tfds.core.DatasetNotFoundError:
        close = nearest(re.split("[/:]", name)[0], tfds.list_builders(with_community_datasets=False))
        offer = f"did you mean {close!r}?" if close else "https://www.tensorflow.org/datasets/catalog lists them"
        raise UsageError(f"TFDS knows no data set {name!r}; {_found(name) or offer}") from None
    except (AssertionError, KeyError, ValueError, ParseError) as error:
        # An unknown configuration or version, files that are cut, or of a version of TFDS that this one does not read.
        why = f"{type(error).__name__}: {_first_lines(error)}"
        raise UsageError(f"TFDS cannot open {name!r}: {why}; {_found(name)}".rstrip("; ")) from None


def _found(name: str) -> str:
    """The first description of prepared sets of this name that is cut, else which of them there are; "" for none."""
    folder = Path(data_dir(), re.split("[/:]", name)[0])
    for file in sorted(folder.rglob("*.json")):
        try:
            json.loads(file.read_bytes())
        except ValueError:
            return f"{file} is cut: prepare it anew"
    there = [str(file.parent.relative_to(folder.parent)) for file in folder.rglob("dataset_info.json")]
    return f"{folder.parent} has {listed(there)}" if there else ""


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


def is_prepared(builder: Any) -> bool:
    """Whether the data set lies in its directory, complete: TFDS moves it there as the last thing it does."""
    return bool(builder.info.splits)


def check_prepared(builder: Any, splits: tuple[str, ...], *, binding: str = "tfds_images") -> None:
    """Raises UsageError, with the command to run, unless the data set is prepared and has the splits."""
    if not is_prepared(builder):
        prepare = f"{installation.python()} -m launcher.data.prepare"
        by_hand, command = "", f"{prepare} {full_name(builder)} --data_dir={data_dir()}"
        if words := by_hand_instructions(builder):
            by_hand = f" Its files have to be downloaded by hand: {words}"
            command += " --archives=FOLDER_WITH_THE_FILES"
        raise MissingInputError(
            f"data set {full_name(builder)!r} is not prepared: no data in {builder.data_dir}.{by_hand} Run: {command}"
        )
    for split in splits:
        num_examples(builder, split, binding=binding)
        if gone := [file for file in builder.info.splits[split].filepaths if not file.exists()]:
            raise MissingInputError(f"{gone[0]} is missing: the data set has to be prepared anew")


def is_array_record(builder: Any) -> bool:
    """Whether the set's files are read by number and by Python alone."""
    return builder.info.file_format.value == "array_record"


def _damage(builder: Any, split: str) -> str | None:
    """Says which file of a split is damaged, after reading it has failed; None if none is."""
    import tensorflow as tf  # late

    for file in map(str, builder.info.splits[split].filepaths):
        try:
            if is_array_record(builder):
                from array_record.python import array_record_module  # as TFDS has, which read with it

                is_whole = bool(array_record_module.ArrayRecordReader(file).read_all())  # a cut one may have none
            else:
                is_whole = tf.data.TFRecordDataset(file).reduce(True, lambda whole, record: True)
        except (tf.errors.DataLossError, RuntimeError):
            is_whole = False
        if not is_whole:
            return f"{file} is damaged or cut: prepare the data set anew"
    return None


@contextlib.contextmanager
def damage_named(builder: Any, split: str) -> Iterator[None]:
    """Inside the block a split is read; UsageError with the file where one is cut."""
    try:
        yield
    except Exception as error:
        if damage := _damage(builder, split):
            raise UsageError(damage) from error
        raise


def examples(builder: Any, split: str, names: Sequence[str]) -> tf.data.Dataset:
    """Tuples of these features of each example, in the order of the files; images are as they are stored."""
    import tensorflow as tf  # late

    def of(example: Any) -> Any:
        return tuple(example[name] for name in names)

    tfds = module()
    decoders = {"image": tfds.decode.SkipDecoding()} if "image" in names else None
    if not is_array_record(builder):
        same_order = tfds.ReadConfig(try_autocache=False, skip_prefetch=True)
        return builder.as_dataset(split=split, decoders=decoders, read_config=same_order).map(of)
    source, specs = builder.as_data_source(split=split, decoders=decoders), builder.info.features.get_tensor_spec()
    spec = of({**specs, "image": tf.TensorSpec([], tf.string)})
    return tf.data.Dataset.from_generator(lambda: map(of, source), output_signature=spec)


def by_hand_instructions(builder: Any) -> str:
    """Instructions for what a person has to download for this configuration; "" if TFDS downloads all of it.

    TFDS's instructions are for a whole data set. WMT 2014's are about Czech, Hindi and Russian, not about German. So
    the builder is asked for its splits, with a download manager that downloads nothing.
    """
    words = " ".join((builder.MANUAL_DOWNLOAD_INSTRUCTIONS or "").split())
    if not words:
        return ""
    try:
        # Leans on TFDS: a builder lists what it needs by hand in `_split_generators`. Noticed by
        # tests/data/text/test_tfds_text.py. Then: show the set's own instructions.
        builder._split_generators(_NoDownloads())  # what every TFDS data set defines
    except Exception:  # it asked for files of the user's, or needs to read what it downloads: nothing says it does not
        return words
    return ""


class _NoDownloads:
    """Takes the place of `tfds.download.DownloadManager` and hands out a path at which nothing is."""

    @property
    def manual_dir(self) -> Any:
        raise FileNotFoundError("a folder with files of the user's")

    def download(self, urls: Any) -> Any:
        import tree  # TFDS needs it too

        return tree.map_structure(lambda url: "not-downloaded", urls)

    download_and_extract = extract = download


def full_name(builder: Any) -> str:
    """Name and configuration, as `open_builder` takes them."""
    config = builder.builder_config
    return f"{builder.name}/{config.name}" if config is not None else builder.name


def num_examples(builder: Any, split: str, *, binding: str = "tfds_images") -> int:
    """Examples of a split such as "test" or "train[:90%]" of a prepared data set; users bind it at `binding`.

    Raises:
      UsageError: no such split, or none of its examples.
    """
    try:
        count = builder.info.splits[split].num_examples
    except (KeyError, ValueError, AssertionError) as error:
        raise UsageError(
            f"{builder.name!r} has no split {split!r}: it has {', '.join(sorted(builder.info.splits))}, and parts such "
            f"as 'train[90%:]'; bind {binding}.train_split and {binding}.eval_split. ({_first_lines(error)})"
        ) from None
    if not count:
        raise UsageError(f"split {split!r} of {builder.name!r} is empty; choose a larger part")
    return count


def facts(name: str, *, train_split: str | None, eval_split: str | None) -> Facts:
    """The facts of a TFDS image set: from its builder; from the catalog only while the set is not prepared.

    Raises:
      UsageError: no such data set, or it does not hold labelled 8-bit images.
    """
    known = TFDS.get(name)
    usual = known if train_split is None and eval_split is None else None
    directory = data_dir()
    may_be_prepared = "://" in directory or os.path.isdir(os.path.join(directory, name.partition("/")[0]))
    if usual is not None and not may_be_prepared:  # planned without TFDS, which takes a second
        return usual
    builder = open_builder(name)
    prepared = is_prepared(builder)
    if usual is not None and not prepared:
        return usual
    splits = builder.info.splits
    if eval_split is None:
        eval_split = known.eval_split if known else next((s for s in ("test", "validation") if s in splits), "test")
    train_split = train_split or "train"
    image_shape, num_classes = _image_features(builder)
    channels = image_shape[2]
    return Facts(
        image_shape=image_shape,
        num_classes=num_classes,
        num_train_examples=num_examples(builder, train_split) if prepared else None,
        num_eval_examples=num_examples(builder, eval_split) if prepared else None,
        # Where nobody computed them, near enough to zero mean and unit variance.
        mean=known.mean if known else (0.5,) * channels,
        std=known.std if known else (0.25,) * channels,
        flip=known.flip if known else True,
        train_split=train_split,
        eval_split=eval_split,
    )


def _image_features(builder: Any) -> tuple[tuple[int | None, int | None, int], int]:
    tfds = module()
    features = dict(builder.info.features.items()) if hasattr(builder.info.features, "items") else {}
    image, label = features.get("image"), features.get("label")
    if not isinstance(image, tfds.features.Image) or not isinstance(label, tfds.features.ClassLabel):
        raise UsageError(
            f"{builder.name!r} is no image classification set: it needs the features 'image' and 'label', and has "
            f"{', '.join(sorted(features)) or 'other ones'}; write a task of your own for it"
        )
    if np.dtype(image.np_dtype) != np.uint8 or image.shape[2] is None:
        raise UsageError(f"{builder.name!r} has {np.dtype(image.np_dtype)} images; uint8 of known channels can be read")
    return tuple(image.shape), label.num_classes


def load(builder: Any, split: str, decoder: ImageDecoder) -> dict[str, np.ndarray]:
    """Reads a split into memory in the order of its files, see `launcher.data.images.decode.in_memory`."""
    from launcher.data.images.decode import in_memory  # late: with TensorFlow

    count = num_examples(builder, split)
    with damage_named(builder, split):
        arrays = in_memory(examples(builder, split, ("image", "label")), count, decoder)
    held = len(arrays["label"])
    if held != count:
        raise UsageError(f"{builder.data_dir}: {split!r} holds {held} of its {count} examples: prepare it anew")
    if arrays["label"].min() < 0:
        raise UsageError(f"split {split!r} of {builder.name!r} has no labels; bind tfds_images.eval_split to another")
    return arrays
