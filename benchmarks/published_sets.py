"""Made-up data in the place of what the examples of keras.io read: see `published_examples.py`.

`ENTRIES` has what an example needs beyond the rest, by its file's name.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TRAIN, TEST = 80, 32
BATCHES, FITS = 2, 2


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one example needs.

    Attributes:
      settings: values of constants, wherever the program assigns them.
      drop: names; a statement outside of functions that has one of them is left out.
      csv: columns of a table that pandas reads, by part of its name: each with its values, a number of kinds, a range
        of numbers or a function of the number of rows; "*" is for any other, and "rows" the number of rows.
      files: makes files in the working directory.
      fits: how many calls of fit are enough.
      callbacks: whether those of the program are called.
      by_row: whether what it draws differs by example, so that replicas draw other numbers than one does.
      left_out: why it is not tried.
      why: what is to be said of its result.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drop: Sequence[str] = ()
    csv: Mapping[str, Mapping[Any, Any]] = dataclasses.field(default_factory=dict)
    files: Callable[[], None] | None = None
    fits: int = FITS
    callbacks: bool = True
    by_row: bool = False
    left_out: str = ""
    why: str = ""


ARRAYS = {  # keras.datasets: shape of an example, number of labels
    "mnist": ((28, 28), 10),
    "fashion_mnist": ((28, 28), 10),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
}
_SETS = {  # tensorflow_datasets: largest image side, number of labels
    "stl10": (96, 10),
    "oxford_flowers102": (64, 102),
    "cats_vs_dogs": (64, 2),
    "tf_flowers": (64, 5),
    "caltech_birds2011": (64, 200),
    "stanford_dogs": (64, 120),
    "horses_or_humans": (64, 2),
    "mnist": (28, 10),
    "svhn_cropped": (32, 10),
    "cifar10": (32, 10),
}


def seeded() -> np.random.Generator:
    return np.random.default_rng(0)


def _labels(count: int, kinds: int) -> np.ndarray:
    return np.arange(count) % kinds


def _pictures(count: int, shape: Sequence[int], kinds: int) -> np.ndarray:
    """Bytes that say which kind a picture is of."""
    noise = seeded().uniform(0, 160, (count, *shape))
    return (noise + _labels(count, kinds).reshape(-1, *[1] * len(shape)) * (90 / kinds)).astype(np.uint8)


def load_arrays(name: str) -> Callable[..., Any]:
    shape, kinds = ARRAYS[name]

    def load_data(*args: Any, **arguments: Any) -> Any:
        found = []
        for count in (TRAIN, TEST):
            y = _labels(count, kinds).astype(np.uint8)
            found.append((_pictures(count, shape, kinds), y[:, None] if "cifar" in name else y))
        return tuple(found)

    return load_data


def load_words(num_words: int | None = None, **arguments: Any) -> Any:
    random, found = seeded(), []
    for count in (TRAIN, TEST):
        x = np.empty(count, object)
        x[:] = [random.integers(1, num_words or 2000, random.integers(20, 60)).tolist() for _ in range(count)]
        found.append((x, _labels(count, 2)))
    return tuple(found)


def load_houses(**arguments: Any) -> Any:
    x = seeded().normal(size=(TRAIN + TEST, 13))
    y = x[:, 0] + 20.0
    return (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])


class _Info:
    """As much of a DatasetInfo as examples ask for."""

    def __init__(self, kinds: int):
        label = type("Label", (), {"num_classes": kinds, "names": [str(one) for one in range(kinds)]})()
        label.int2str = str
        image = type("Image", (), {"shape": (64, 64, 3)})()
        self.features = {"label": label, "image": image}
        split = {"num_examples": TRAIN}
        self.splits = {name: type("Split", (), split)() for name in ("train", "test", "validation", "unlabelled")}


def tfds_load(name: str, split: Any = None, *, as_supervised: bool = False, with_info: bool = False, batch_size=None,
               **arguments: Any) -> Any:  # fmt: skip
    import tensorflow as tf

    side, kinds = _SETS.get(name.partition("/")[0].partition(":")[0], (64, 10))

    def one(of: Any) -> tf.data.Dataset:
        count = TEST if "test" in str(of) or "valid" in str(of) else TRAIN
        x, y = _pictures(count, (side, side, 1 if name == "mnist" else 3), kinds), _labels(count, kinds)
        whole = {"image": x, "label": y, "bbox": np.tile(np.float32([0.1, 0.1, 0.9, 0.9]), (count, 1))}
        whole["segmentation_mask"] = x[..., :1] % 3 + 1
        if "reviews" in name:
            x = np.asarray(sentences(count))
        found = tf.data.Dataset.from_tensor_slices((x, y) if as_supervised else whole)
        return found.batch(count if batch_size == -1 else batch_size) if batch_size else found

    if split is None:
        found: Any = {of: one(of) for of in ("train", "test", "validation", "unlabelled")}
    else:
        found = [one(of) for of in split] if isinstance(split, list | tuple) else one(split)
    return (found, _Info(kinds)) if with_info else found


def pictures_from_directory(directory: Any, labels="inferred", label_mode="int", class_names=None, color_mode="rgb",
                             batch_size=32, image_size=(256, 256), subset=None, **arguments: Any) -> Any:  # fmt: skip
    import tensorflow as tf

    def one(count: int) -> tf.data.Dataset:
        x = _pictures(count, (*image_size, {"rgb": 3, "grayscale": 1, "rgba": 4}[color_mode]), 2).astype(np.float32)
        y = _labels(count, 2)
        y = (
            y[:, None].astype(np.float32)
            if label_mode == "binary"
            else np.eye(2)[y]
            if label_mode == "categorical"
            else y
        )
        data = tf.data.Dataset.from_tensor_slices(x if label_mode is None or labels is None else (x, y))
        data = data.batch(min(batch_size, 8)) if batch_size else data
        data.class_names, data.file_paths = ["a", "b"], [f"{n}.jpg" for n in range(count)]
        return data

    return (one(24), one(8)) if subset == "both" else one(8 if subset == "validation" else 24)


def texts_from_directory(directory: Any, label_mode="int", batch_size=32, subset=None, **arguments: Any) -> Any:
    import tensorflow as tf

    def one(count: int) -> tf.data.Dataset:
        text = sentences(count)
        data = tf.data.Dataset.from_tensor_slices(text if label_mode is None else (text, _labels(count, 2)))
        data = data.batch(min(batch_size, 8)) if batch_size else data
        data.class_names = ["neg", "pos"]
        return data

    return (one(32), one(16)) if subset == "both" else one(16 if subset == "validation" else 32)


def sentences(count: int, words: int = 12) -> list[str]:
    """Made of fifty words."""
    random = seeded()
    return [" ".join(f"word{number}" for number in random.integers(0, 50, words)) for _ in range(count)]


def _frame(columns: Mapping[Any, Any], names: Sequence[Any], rows: int) -> Any:
    import pandas as pd

    random, made = seeded(), {}
    for name in names:
        values = columns[name] if name in columns else columns["*"]
        if callable(values):
            made[name] = values(rows)
        elif isinstance(values, tuple):
            made[name] = random.uniform(*values, rows)
        elif isinstance(values, int):
            made[name] = random.integers(0, values, rows)
        else:
            made[name] = [values[number % len(values)] for number in range(rows)]
    return pd.DataFrame(made)


def read_csv(entry: Entry, real: Any) -> Callable[..., Any]:
    def read_csv(path: Any, *args: Any, **arguments: Any) -> Any:
        for part, columns in entry.csv.items():
            if part in str(path):
                rows = columns.get("rows", TEST if "test" in str(path) else 96)
                names = arguments.get("names") or [name for name in columns if name not in ("*", "rows")]
                found = _frame(columns, names, rows)
                if arguments.get("index_col") is not None:
                    found = found.set_index(arguments["index_col"])
                return found
        return real(path, *args, **arguments)

    return read_csv


def _hot(first: int, last: int) -> dict[int, Callable[[int], np.ndarray]]:
    """Columns of which one is 1 in each row."""
    count = last - first + 1
    return {
        first + at: (lambda rows, at=at: (np.arange(rows) % count == at).astype(int)) for at in range(count)
    }  # fmt: skip


def write(path: str, text: str) -> None:
    """Makes a file, and its folders."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def picture_files(pattern: str, count: int, size: tuple[int, int], mode: str = "RGB", kinds: int = 0) -> None:
    """Makes pictures in files; of masks, with numbers from 1 to `kinds`."""
    from PIL import Image

    for number, one in enumerate(_pictures(count, (size[1], size[0], *([3] if mode == "RGB" else [])), 2)):
        path = Path(pattern.format(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(one % kinds + 1 if kinds else one, mode).save(path)


def wave_files(pattern: str, count: int, seconds: float, rate: int = 16000) -> None:
    """Makes recordings of a tone."""
    import wave

    for number in range(count):
        path = Path(pattern.format(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        tone = np.sin(np.arange(int(seconds * rate)) * 0.05 * (1 + number % 7)) * 9000
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(tone.astype("<i2").tobytes())


def numbers_of_text(*args: Any, **arguments: Any) -> np.ndarray:
    """As of FordA: a label, 1 or -1, and 64 numbers."""
    label = 2.0 * (np.arange(TRAIN) % 2) - 1
    return np.concatenate([label[:, None], seeded().normal(size=(TRAIN, 64)) + label[:, None]], axis=1)


def _pairs() -> str:
    return "\n".join(f"{one}\t{one[::-1]}\tby us" for one in sentences(120, 4)) + "\n"


def _news() -> None:
    for folder in ("comp.graphics", "sci.space", "rec.autos"):
        for number, text in enumerate(sentences(30, 40)):
            write(f"20_newsgroup/{folder}/{38987 + number}", "\n" * 10 + text)
    write("glove.6B.100d.txt", "\n".join(f"word{number} " + "0.1 " * 99 + f"0.{number}" for number in range(50)))


def _reviews() -> None:
    for folder in ("train/pos", "train/neg", "test/pos", "test/neg"):
        for number, text in enumerate(sentences(24, 20)):
            write(f"aclImdb/{folder}/{number}.txt", text)


_CATEGORIES = [" a", " b", " c"]
_ADULT = {
    "adult": dict.fromkeys(("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"), 90)
    | {"income_bracket": [" <=50K", " >50K"], "*": _CATEGORIES}
}
_CENSUS = dict.fromkeys(
    ("age", "wage_per_hour", "capital_gains", "capital_losses", "dividends_from_stocks", "instance_weight",
     "num_persons_worked_for_employer", "weeks_worked_in_year"), 90
) | {"income_level": [" - 50000.", " 50000+."], "*": _CATEGORIES}  # fmt: skip
_HEART = dict.fromkeys(("sex", "cp", "fbs", "restecg", "exang", "ca", "slope"), 3)
_HEART |= dict.fromkeys(("age", "trestbps", "chol", "thalach"), 90) | {"oldpeak": (0.0, 4.0), "target": [0, 1]}
_HEART |= {"thal": ["fixed", "normal", "reversible"]}
_MOVIES = {
    "users.dat": {"user_id": np.arange, "sex": ["F", "M"], "age_group": 4, "occupation": 5, "zip_code": 9, "rows": 12},
    "ratings.dat": {"user_id": 12, "movie_id": 20, "rating": 5, "unix_timestamp": np.arange, "rows": 200},
    "movies.dat": {"movie_id": np.arange, "title": ["t"], "genres": ["Drama|War", "Comedy"], "rows": 20},
}
_EEG = {
    "label": ["blink1", "math1", "relax", "music", "video-ver1"], "signal_quality": 100, "id": 9, "*": 9,
    "raw_values": lambda rows: [json.dumps(one.tolist()) for one in seeded().integers(-99, 99, (rows, 512))],
    **dict.fromkeys(("indra_time", "Unnamed: 0", "browser_latency", "reading_time", "attention_esense",
                     "meditation_esense", "updatedAt", "createdAt", "eeg_power"), 9), "rows": 200,
}  # fmt: skip
_CORA = {
    "cora.cites": {"target": 60, "source": lambda rows: np.arange(rows) % 60, "rows": 200},
    "cora.content": {"paper_id": np.arange, "subject": ["a", "b", "c"], "*": 2, "rows": 60},
}
_JENA = dict.fromkeys(
    ("p (mbar)", "T (degC)", "Tpot (K)", "Tdew (degC)", "rh (%)", "VPmax (mbar)", "VPact (mbar)", "VPdef (mbar)",
     "sh (g/kg)", "H2OC (mmol/mol)", "rho (g/m**3)", "wv (m/s)", "max. wv (m/s)", "wd (deg)"), (0.0, 9.0)
) | {"Date Time": np.arange, "rows": 600}  # fmt: skip
_BANK = dict.fromkeys(("age", "duration", "campaign", "pdays", "previous"), 9)
_BANK |= dict.fromkeys(("emp.var.rate", "cons.price.idx", "cons.conf.idx", "euribor3m", "nr.employed"), (0.0, 9.0))
_BANK |= dict.fromkeys(("job", "marital", "education", "default", "housing", "loan", "contact", "month",
                        "day_of_week", "poutcome"), "ab") | {"y": ["no", "yes"]}  # fmt: skip
_STOCK = {"art_daily": {"timestamp": np.arange, "value": (0.0, 9.0), "rows": 200}}

_COMPARES = "its loss compares the examples of a batch"

ENTRIES: dict[str, Entry] = {
    "lstm_character_level_text_generation": Entry(
        fits=1, files=lambda: write("nietzsche.txt", " ".join(sentences(60)))
    ),
    "lstm_seq2seq": Entry({"latent_dim": 32}, files=lambda: write("fra.txt", _pairs())),
    "neural_machine_translation_with_transformer": Entry(
        {"vocab_size": 200, "embed_dim": 32, "latent_dim": 64},
        files=lambda: write("spa-eng/spa.txt", _pairs().replace("\tby us", "")),
    ),
    "pretrained_word_embeddings": Entry(files=_news),
    "text_generation_with_miniature_gpt": Entry({"vocab_size": 200, "embed_dim": 32}, files=_reviews),
    "captcha_ocr": Entry(files=lambda: picture_files("captcha_images_v2/{:05d}.png", 48, (200, 50))),
    "classification_with_grn_and_vsn": Entry(csv={"adult": _CENSUS}),
    "tabtransformer": Entry(csv=_ADULT),
    "deep_neural_decision_forests": Entry({"num_trees": 3, "depth": 3}, csv=_ADULT),
    "wide_deep_cross_networks": Entry(
        csv={"covtype": dict.fromkeys(range(10), 90) | _hot(10, 13) | _hot(14, 53) | {54: [*range(1, 8)], "rows": 160}}
    ),
    "structured_data_classification_from_scratch": Entry(csv={"heart": _HEART}),
    "structured_data_classification_with_feature_space": Entry(csv={"heart": _HEART}),
    "feature_space_advanced": Entry(csv={"bank-additional": _BANK}),
    "memory_efficient_embeddings": Entry(csv=_MOVIES),
    "movielens_recommendations_transformers": Entry(csv=_MOVIES),
    "collaborative_filtering_movielens": Entry(
        csv={"ratings.csv": {"userId": 12, "movieId": 20, "rating": (0.5, 5.0)}},
        why="rows of an embedding; its product is over all rows of a batch",
    ),
    "imbalanced_classification": Entry(
        {"fname": "creditcard.csv"},
        files=lambda: write(
            "creditcard.csv", "h\n" + "\n".join(f"{at},2{at % 7},3{at % 5},4.{at},{at % 2}" for at in range(100))
        ),
    ),
    "eeg_signal_classification": Entry(csv={"eeg-data": _EEG}),
    "timeseries_anomaly_detection": Entry({"TIME_STEPS": 48}, csv=_STOCK),
    "timeseries_traffic_forecasting": Entry(
        csv={
            "_W_228": dict.fromkeys(range(228), (0.0, 9e3)) | {"rows": 228},
            "_V_228": dict.fromkeys(range(228), (20.0, 80.0)) | {"rows": 200},
        }
    ),
    "timeseries_weather_forecasting": Entry({"past": 60, "future": 6}, csv={"jena": _JENA}),
    "wgan_gp": Entry(by_row=True, why="draws numbers for each example, other ones on each replica"),
    "nnclr": Entry(
        {"unlabelled_images": 1600, "labelled_train_images": 1600}, why="what is made up here has no batch to train on"
    ),
    "semisupervised_simclr": Entry({"unlabeled_dataset_size": 60, "labeled_dataset_size": 60}, why=_COMPARES),
    "supervised-contrastive-learning": Entry(why=f"rounding; {_COMPARES}"),
    "perceiver_image_classification": Entry(why="first weights, which its build draws, are others (also at rate 0)"),
    "functional_api": Entry(why="an epoch's loss of a single output, which Keras takes over its batches"),
    "debugging_tips": Entry(why="reads values in its train_step, for which it is run eagerly"),
    "making_new_layers_and_models_via_subclassing": Entry(why="one of its models has no weights"),
    "distributed_training_with_tensorflow": Entry(
        why="fit stands in a strategy's scope: it trains there as `python PROGRAM`, and launcher.main says so"
    ),
    "metric_learning": Entry(drop=("sample_idxs", "examples")),
    "image_classification_from_scratch": Entry(
        {"image_size": (48, 48)},
        files=lambda: [picture_files(f"PetImages/{one}/{{}}.jpg", 2, (20, 20)) for one in ("Cat", "Dog")],
    ),
    "oxford_pets_image_segmentation": Entry(
        {"img_size": (64, 64)},
        drop=("display", "ImageOps"),
        files=lambda: (
            picture_files("images/{:03d}.jpg", 40, (80, 70)),
            picture_files("annotations/trimaps/{:03d}.png", 40, (80, 70), "L", 3),
        ),
    ),
    "zero_dce": Entry(
        {"IMAGE_SIZE": 32, "MAX_TRAIN_IMAGES": 24},
        files=lambda: [
            picture_files(f"lol_dataset/{one}/low/{{:03d}}.png", 40, (40, 40)) for one in ("our485", "eval15")
        ],
    ),
    "mirnet": Entry(
        {"IMAGE_SIZE": 32, "MAX_TRAIN_IMAGES": 12},
        files=lambda: [
            picture_files(f"lol_dataset/{one}/{{:03d}}.png", 20, (32, 32))
            for one in ("our485/low", "our485/high", "eval15/low", "eval15/high")
        ],
    ),
    "super_resolution_sub_pixel": Entry(
        {"crop_size": 60},
        drop=("display",),
        files=lambda: picture_files("BSR/BSDS500/data/images/test/{:02d}.jpg", 12, (60, 60)),
        callbacks=False,
    ),
    "conv_lstm": Entry(files=lambda: np.save("moving_mnist.npy", _pictures(20, (24, 16, 16), 2))),
    "nerf": Entry(
        {"NUM_SAMPLES": 8, "POS_ENCODE_DIMS": 4},
        callbacks=False,
        files=lambda: np.savez(
            "tiny_nerf_data.npz",
            images=_pictures(20, (12, 12, 3), 2) / np.float32(255),
            focal=9.0,
            poses=np.tile(np.eye(4, dtype=np.float32), (20, 1, 1)),
        ),
    ),
    "transformer_asr": Entry(
        {"max_target_len": 40},
        callbacks=False,
        files=lambda: (
            wave_files("datasets/LJSpeech-1.1/wavs/{:03d}.wav", 100, 0.4),
            write(
                "datasets/LJSpeech-1.1/metadata.csv",
                "\n".join(f"{at:03d}|{one}|{one}" for at, one in enumerate(sentences(100, 3))),
            ),
            os.makedirs("saved_models", exist_ok=True),
        ),
    ),
    "speaker_recognition_using_cnn": Entry(
        files=lambda: (
            [wave_files(f"16000_pcm_speeches/audio/{one}/{{}}.wav", 20, 1.0) for one in "abc"],
            wave_files("16000_pcm_speeches/noise/other/{}.wav", 3, 2.0),
        ),
    ),
    "ddim": Entry({"image_size": 16}, callbacks=False, why="its train_step draws as many numbers as a whole batch has"),
    "gan_ada": Entry({"image_size": 32}, callbacks=False),
    "dcgan_overriding_train_step": Entry(callbacks=False),
    "fully_convolutional_network": Entry({"INPUT_SHAPE": (64, 64), "HEIGHT": 64, "WIDTH": 64}),
    "gat_node_classification": Entry({"LEARNING_RATE": 1e-4}, csv=_CORA),
    "gnn_citations": Entry(csv=_CORA),
}
