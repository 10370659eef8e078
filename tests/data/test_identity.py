"""What data says it is: the same when it is opened again, another when the examples or their order are others."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from own_files import EACH, encoded, example, examples, write_folders, write_tfrecords
from sources import made

from launcher.data import keras_data, pipeline
from launcher.data.images import folder_images
from launcher.data.images.image_data import image_data
from launcher.data.pipeline import ArrayExamples, RandomAccessData
from launcher.data.text.corpus import TextCorpus
from launcher.data.text.pairs import TextPairs

LINES = [f"line {number} of some words" for number in range(300)]
ROWS = np.arange(60, dtype=np.float32).reshape(20, 3)


def changed_rows(changed):
    rows = ROWS.copy()
    rows[7, 1] += changed
    return rows


def records(changed):
    """One picture is another when changed, in as many bytes."""
    of_one_length = [other for other in range(60, 160) if len(encoded(other)) == len(encoded(33))]
    found = examples()
    found[33] = example(encoded(of_one_length[0] if changed else 33), 1)
    return found


def of_files(write):
    return lambda root, changed: made(image_data, name=write(root, changed), num_classes=3, eval_share=0)


def folders(root, changed):
    write_folders(root)
    if changed:
        (root / "ash" / "1.png").rename(root / "ash" / f"{EACH}.png")
    return f"folder:{root}"


def text(root, changed):
    root.mkdir()
    lines = ["another", *LINES[1:]] if changed else LINES
    (root / "a.txt").write_text("\n".join(lines))
    (root / "a.tsv").write_text("\n".join(f"{line}\t{line[::-1]}" for line in lines))
    return root


SOURCES = {
    "arrays": lambda root, changed: RandomAccessData(train=ArrayExamples({"x": changed_rows(changed)})),
    "their order": lambda root, changed: RandomAccessData(train=ArrayExamples({"x": ROWS}), shuffle=not changed),
    "words": lambda root, changed: RandomAccessData(train=ArrayExamples({"x": ["a", "bc" if changed else "b"]})),
    "fit's arrays": lambda root, changed: keras_data.make_data((changed_rows(changed), ROWS[:, 0]), None)[0],
    "fit's dataset": lambda root, changed: keras_data.make_data(
        tf.data.Dataset.from_tensor_slices(ROWS[: 20 - 5 * changed]).batch(5), None
    )[0],
    "digits": lambda root, changed: image_data(name="digits", image_size=4 if changed else None),
    "synthetic": lambda root, changed: made(image_data, name="synthetic", image_size=8 + changed, num_classes=2),
    "class folders": of_files(folders),
    "TFRecords": of_files(lambda root, changed: f"tfrecord:{write_tfrecords(root, records(changed))}"),
    "TFRecords in other files": of_files(
        lambda root, changed: f"tfrecord:{write_tfrecords(root, records(False), 3 + changed)}"
    ),
    "running text": lambda root, changed: TextCorpus(
        name=f"lines:{text(root, changed)}/*.txt", vocab_size=300, length=16
    ),
    "pairs": lambda root, changed: TextPairs(name=f"tsv:{text(root, changed)}/*.tsv", vocab_size=300, max_length=32),
}


@pytest.mark.parametrize("source", SOURCES)
def test_data_is_known_again_also_from_another_folder_and_other_data_is_not(monkeypatch, tmp_path, source):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data_dir"))

    def described(folder, changed):
        data = SOURCES[source](tmp_path / folder, changed)
        data.check()
        return pipeline.described(data)

    once, copied, other = described("once", False), described("copied", False), described("other", True)
    assert once == copied != other
    assert once["examples"] and once["identity"]


def test_a_prepared_set_is_known_by_its_version_size_and_split(photos):
    first, again, part = (
        pipeline.described(made(image_data, name=photos, image_size=10, train_split=split))
        for split in ("train", "train", "train[:150]")
    )
    assert first == again != part
    assert "launcher_test_photos/1.0.0 " in first["identity"]


def test_what_is_remembered_of_many_files_is_what_they_say(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data_dir"))
    name = folders(tmp_path / "own", False)
    read = made(image_data, name=name, eval_share=0).identity()
    monkeypatch.setattr(folder_images, "_REMEMBERED", 1)
    for _ in range(2):
        assert made(image_data, name=name, eval_share=0).identity() == read
    (tmp_path / "own/ash/1.png").write_bytes(encoded(2))
    assert made(image_data, name=name, eval_share=0).identity() != read


def test_of_large_arrays_rows_all_over_are_looked_at(monkeypatch):
    monkeypatch.setattr(pipeline, "_DIGESTED_BYTES", ROWS.nbytes // 4)
    before = ArrayExamples({"x": ROWS}).identity()
    assert before == ArrayExamples({"x": ROWS.copy()}).identity()
    assert before != ArrayExamples({"x": ROWS[::-1]}).identity()
    assert before != ArrayExamples({"x": np.where(np.arange(20)[:, None] < 10, ROWS, -ROWS)}).identity()


def test_data_that_does_not_say_what_it_is_is_known_by_the_number_of_its_examples():
    class Data:
        num_train_examples = 7

    assert pipeline.described(Data()) == {"examples": 7, "identity": ""}
