"""Own files at the front door: what is wrong with them is one message and exit code 64, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from own_files import CLASSES, encoded, example, examples, write_array_records, write_folders, write_tfrecords

from launcher import main as entry

RECIPE = """
include 'base/images.gin'
train.steps = 12
train.global_batch_size = 8
train.log_every = 1
train.checkpoint_every = 4
image_classification.model = @mlp
mlp.units = 8
mlp.layers = 1
cosine.peak = 0.05
image_data.memory_limit_bytes = 0
"""
# The label of records counts from 1.
OF_RECORDS = ("image_data.num_classes = 3", "image_data.first_label = 1")


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """flags(name, *bindings): of a run in out/ on the data set of this name, in the test's folder."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data_dir"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.gin").write_text(RECIPE)

    def made(name: str, *bindings: str) -> list[str]:
        params = [f"--gin_param={binding}" for binding in (f"image_data.name = '{name}'", *bindings)]
        return ["--gin_file=own.gin", "--model_dir=out", *params]

    return made


@pytest.fixture
def refused(flags, capsys):
    """refused(name, *bindings): the message with which a run ends at once."""

    def run(name: str, *bindings: str) -> str:
        assert entry.main(["launcher", "--strategy=one_device", *flags(name, *bindings)]) == 64
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    return run


def _without_a_class(root: Path) -> None:
    for file in (root / "birch").iterdir():
        file.unlink()


def _one_class(root: Path) -> None:
    for name in CLASSES[1:]:
        (root / name).rename(root.parent / name)


def _another_class_to_evaluate_on(root: Path) -> None:
    write_folders(root / "train", numbers=range(4))
    write_folders(root / "val", numbers=range(4))
    (root / "val" / "ash").rename(root / "val" / "oak")


def _damaged(root: Path) -> None:
    (root / "ash" / "1.jpg").write_bytes(encoded(1, kind="JPEG")[:-20])
    (root / "ash" / "2.png").write_bytes(b"")
    (root / "cedar" / "3.png").write_text("Not found")


def _one_photograph_of_another_size(root: Path) -> None:
    (root / "ash" / "0.png").write_bytes(encoded(0, one_size=False))


FOLDERS = {
    "an empty class folder": (
        _without_a_class,
        "class folder {root}/birch has no image (.bmp, .gif, .jpeg, .jpg, .png",
    ),
    "one class": (_one_class, "{root} needs a folder of images for each class, two or more, and has ash"),
    "other classes to evaluate on": (_another_class_to_evaluate_on, "only one of them has ash, oak"),
    "damaged files": (
        _damaged,
        "{root}/cedar/3.png (not JPEG, PNG, GIF or BMP)",
    ),
    "different sizes": (_one_photograph_of_another_size, "differ in size; bind image_data.image_size"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_what_is_wrong_with_a_folder_is_said_before_anything_is_written(refused, tmp_path, case):
    damage, words = FOLDERS[case]
    root = write_folders(tmp_path / "own")
    damage(root)
    message = refused(f"folder:{root}")
    assert words.format(root=root) in message
    if damage is _damaged:
        assert "3 images cannot be used: " in message
        assert "/ash/1.jpg (truncated JPEG)" in message and "/ash/2.png (empty)" in message
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there_or_has_no_folders_is_named(refused, tmp_path):
    assert f"there is no folder {tmp_path}/no (from {tmp_path})" in refused("folder:no")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "ash.png").write_bytes(encoded(1))
    assert "flat needs a folder of images for each class, two or more, and has no folder" in refused("folder:flat")


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def test_what_is_wrong_with_records_is_said_before_anything_is_written(refused, tmp_path):
    pattern = write_tfrecords(tmp_path / "own", examples(first_label=1))
    name, first = f"tfrecord:{pattern}", pattern.replace("*", "0")
    assert "s9://bucket/a/* cannot be read: File system scheme" in refused("tfrecord:s9://bucket/a/*", *OF_RECORDS)
    assert f"no file matches '{tmp_path}/*.nothing'" in refused(f"tfrecord:{tmp_path}/*.nothing", *OF_RECORDS)
    assert f"record 0 of {first}: it has no feature 'png', but image/class/label, image/encoded" in refused(
        name, *OF_RECORDS, "image_data.features = {'image': 'png'}"
    )
    write_tfrecords(tmp_path / "high", [example(encoded(1), 7)])
    assert "its label is 7, and 3 classes are labelled 1 to 3; bind image_data.num_classes, or" in refused(
        f"tfrecord:{tmp_path}/high/0.tfrecord", *OF_RECORDS, "image_data.eval_share = 0"
    )
    _truncated(Path(first))
    assert f"{first} is truncated: its record 19 begins at byte " in refused(name, *OF_RECORDS)
    arrays = write_array_records(tmp_path / "arrays", examples(first_label=1))
    _truncated(Path(arrays.replace("*", "1")))
    assert "1.array_record is no ArrayRecord file, truncated" in refused(f"array_record:{arrays}", *OF_RECORDS)
    assert not (tmp_path / "out").exists()


def test_a_record_whose_label_is_out_of_range_is_named_when_it_is_met(refused, tmp_path):
    records = examples(first_label=1)
    records[33] = example(encoded(33), 9)
    pattern = write_tfrecords(tmp_path / "own", records, shards=1)
    message = refused(f"tfrecord:{pattern}", *OF_RECORDS, "image_data.eval_share = 0", "train.evaluate_every = 0")
    assert f"1 image cannot be used: record 33 of {tmp_path}/own/0.tfrecord (its label is 9, and 3 classes" in message


@pytest.mark.heavy
def test_two_workers_train_on_records_as_one_does(flags, run_launcher, run_workers, tmp_path):
    pattern = write_tfrecords(tmp_path / "own", examples(first_label=1))
    run = (*flags(f"tfrecord:{pattern}", *OF_RECORDS, "image_data.augmentation = 'small'"), "--mode=train")

    def losses(model_dir: str) -> list[float]:
        return [json.loads(line)["loss"] for line in (tmp_path / model_dir / "metrics.jsonl").read_text().splitlines()]

    assert run_launcher(*run).returncode == 0
    workers = run_workers(2, *run, "--model_dir=two")
    assert [worker.returncode for worker in workers] == [0, 0], workers[0].stderr + workers[1].stderr
    assert len(losses("two")) == 12 and losses("two") == pytest.approx(losses("out"), rel=1e-5)
