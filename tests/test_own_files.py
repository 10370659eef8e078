"""Own files at the front door: what is wrong with them is one message and exit code 64, before anything is written.

A run that goes on finds its data as it was: what is away may come back (75), and what is other data stops it (64).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import forked
import numpy as np
import pytest
from cases import repeated_but
from own_files import CLASSES, EACH, encoded, example, examples, write_folders, write_tfrecords

from launcher import main as entry
from launcher.checkpoints import CheckpointStore, manifest
from launcher.jobs.drill import files

pytestmark = pytest.mark.slow

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
OF_RECORDS = ("record_images.num_classes = 3", "record_images.first_label = 1")


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
        "{root}/birch has no image (.bmp, .gif, .jpeg, .jpg, .png",
    ),
    "one class": (_one_class, "{root} needs a folder of images for each class, two or more, and has ash"),
    "other classes to evaluate on": (_another_class_to_evaluate_on, "has the classes ash, oak"),
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
    assert "flat needs a folder of images for each class, two or more, and has none" in refused("folder:flat")


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def test_what_is_wrong_with_records_is_said_before_anything_is_written(refused, tmp_path):
    pattern = write_tfrecords(tmp_path / "own", examples(first_label=1))
    name, first = f"tfrecord:{pattern}", pattern.replace("*", "0")
    assert "s9://bucket/a/* cannot be read: File system scheme" in refused("tfrecord:s9://bucket/a/*", *OF_RECORDS)
    assert f"no file matches '{tmp_path}/*.nothing'" in refused(f"tfrecord:{tmp_path}/*.nothing", *OF_RECORDS)
    assert f"record 0 of {first}: no feature 'png' but image/class/label, image/encoded" in refused(
        name, *OF_RECORDS, "record_images.features = {'image': 'png'}"
    )
    write_tfrecords(tmp_path / "high", [example(encoded(1), 7)])
    assert "its label is 7, and 3 classes are labelled 1 to 3; bind record_images.num_classes, or" in refused(
        f"tfrecord:{tmp_path}/high/0.tfrecord", *OF_RECORDS, "record_images.eval_share = 0"
    )
    _truncated(Path(first))
    assert f"{first} is truncated, damaged or no TFRecord file: its record 19 begins at byte " in refused(
        name, *OF_RECORDS
    )
    assert not (tmp_path / "out").exists()


def test_a_record_whose_label_is_out_of_range_is_named_when_it_is_met(refused, tmp_path):
    records = examples(first_label=1)
    records[33] = example(encoded(33), 9)
    pattern = write_tfrecords(tmp_path / "own", records, shards=1)
    message = refused(f"tfrecord:{pattern}", *OF_RECORDS, "record_images.eval_share = 0", "train.evaluate_every = 0")
    assert f"1 image cannot be used: record 33 of {tmp_path}/own/0.tfrecord (its label is 9, and 3 classes" in message


@pytest.mark.nightly  # which rows a worker reads is of no format: test_pipeline.py and test_topologies.py
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


@pytest.fixture
def attempt(flags, capsys):
    """attempt(name, *bindings): trains, and returns the exit code and what was printed."""

    def run(name: str, *bindings: str) -> tuple[int, str]:
        source = "folder_images" if name.startswith("folder:") else "record_images"
        bindings = (f"{source}.eval_share = 0", "train.evaluate_every = 0", *bindings)
        code = entry.main(["launcher", "--strategy=one_device", "--mode=train", *flags(name, *bindings)])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return code, printed.out + printed.err

    return run


def another_of_its_size(number: int) -> bytes:
    """The file of another picture, as long as that of this number."""
    return next(found for other in range(60, 160) if len(found := encoded(other)) == len(encoded(number)))


def folder(root: Path, changed: bool) -> str:
    shutil.rmtree(root, ignore_errors=True)
    write_folders(root)
    if changed:
        (root / "birch" / "3.png").write_bytes(another_of_its_size(EACH + 3))
    return f"folder:{root}"


def tfrecords(root: Path, changed: bool) -> str:
    records = examples(first_label=1)
    if changed:
        records[33] = example(another_of_its_size(33), 2)
    return f"tfrecord:{write_tfrecords(root, records)}"


SOURCES = {"class folders": (folder, ()), "TFRecords": (tfrecords, OF_RECORDS)}


# That records are the same as before or others, test_identity.py tells.
@pytest.mark.parametrize("source", repeated_but(["class folders"], SOURCES))
def test_a_run_goes_on_with_other_data_only_where_that_is_bound(attempt, tmp_path, source):
    write, bindings = SOURCES[source]
    assert attempt(write(tmp_path / "own", False), *bindings, "train.steps = 4")[0] == 0
    # A copy is the same data.
    assert attempt(write(tmp_path / "copied", False), *bindings, "train.steps = 5")[0] == 0
    name = write(tmp_path / "own", True)
    code, printed = attempt(name, *bindings)
    assert code == 64
    assert "the training data is not what it was at step 5: of the 60 examples some are others" in printed
    assert "Checkpoints.on_changed_data = 'continue'" in printed
    assert CheckpointStore(str(tmp_path / "out/checkpoints")).latest() == 5
    code, printed = attempt(name, *bindings, "Checkpoints.on_changed_data = 'continue'")
    assert code == 0 and "some are others, or their order is another; going on with what is there now" in printed
    assert attempt(name, *bindings)[0] == 0  # the newest checkpoint is of this data


def test_a_run_whose_checkpoint_does_not_say_what_its_data_was_goes_on_and_says_so(attempt, tmp_path):
    assert attempt(folder(tmp_path / "own", False), "train.steps = 4")[0] == 0
    path = tmp_path / "out/checkpoints/step_00000004" / manifest.MANIFEST
    content = json.loads(path.read_text())
    del content["run"]["data"], content["sha256"]
    path.write_text(json.dumps({**content, "sha256": manifest.checksum(content)}))
    code, printed = attempt(folder(tmp_path / "own", True))
    assert code == 0 and "the checkpoint does not record its training data; going on with what is there" in printed


@pytest.mark.parametrize("source", repeated_but(["TFRecords"], SOURCES))
def test_data_that_a_run_has_found_before_may_come_back(attempt, tmp_path, source):
    write, bindings = SOURCES[source]
    name, root, away = write(tmp_path / "own", False), tmp_path / "own", tmp_path / "away"
    assert attempt(name, *bindings, "train.steps = 4")[0] == 0
    root.rename(away)
    for _ in range(2):
        code, printed = attempt(name, *bindings)
        assert code == 75 and "This run has trained before, so it may come back" in printed
        root.mkdir(exist_ok=True)  # as where a disk would be mounted
    code, printed = attempt(name.replace("own", "owm"), *bindings)
    assert code == 64 and "has trained before" not in printed
    root.rmdir()
    away.rename(root)
    assert attempt(name, *bindings)[0] == 0


def test_data_that_goes_away_under_a_run_may_come_back(flags, start_launcher, run_launcher, tmp_path):
    name = folder(tmp_path / "own", False)
    run = ("--mode=train", *flags(name, "folder_images.eval_share = 0", "train.steps = 1000000"))
    started = start_launcher(*run)
    started.wait_until(lambda: (tmp_path / "out/checkpoints/step_00000008").exists())
    (tmp_path / "own").rename(tmp_path / "away")
    finished = started.wait()
    assert finished.returncode == 75, finished.stderr
    assert "images cannot be used: " in finished.stderr and "This run has trained before" in finished.stderr


@pytest.mark.nightly  # data that comes back: above; a job that waits: jobs/test_launch.py, an outage
@pytest.mark.heavy
def test_a_job_waits_for_its_data_and_ends_as_one_that_nobody_touched(flags, start_launcher, run_launcher, tmp_path):
    steps = "train.steps = 160"
    run = ("--mode=train", *flags(folder(tmp_path / "own", False), "train.steps_per_loop = 1", steps))
    assert run_launcher(*run, "--model_dir=undisturbed").returncode == 0
    job = start_launcher("--workers=1", *run, module="launcher.launch")
    job.wait_until(lambda: (tmp_path / "out/checkpoints/step_00000008").exists())
    (tmp_path / "own").rename(tmp_path / "away")
    # The worker alone has a child, its nursery.
    (worker,) = (one for one in forked.children(job.process.pid) if one.children())
    worker.kill()
    job.wait_until(lambda: "This run has trained before" in job.stdout)
    (tmp_path / "away").rename(tmp_path / "own")
    assert job.wait().returncode == 0, job.stdout
    assert files.difference(tmp_path / "undisturbed", tmp_path / "out") == ""


PROGRAM = """
import keras
import launcher
import forked
import numpy as np


def build():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


launcher.fit(build, lambda: (np.load("x.npy"), np.zeros(8)), batch_size=4, steps=STEPS)
"""


def test_arrays_of_a_program_may_come_back_and_must_be_what_they_were(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(steps: int) -> tuple[int, str]:
        (tmp_path / "mine.py").write_text(PROGRAM.replace("STEPS", str(steps)))
        code = entry.main(["launcher", "--gin_file=mine.py", "--mode=train", "--model_dir=out"])
        return code, capsys.readouterr().err

    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
    code, printed = run(2)
    assert code == 64 and "FileNotFoundError" in printed  # nobody has found it
    np.save("x.npy", x)
    assert run(2)[0] == 0
    (tmp_path / "x.npy").rename(tmp_path / "y.npy")
    code, printed = run(4)
    assert code == 75 and "FileNotFoundError" in printed and "This run has trained before" in printed
    np.save("x.npy", x + 1)
    code, printed = run(4)
    assert code == 64 and "the training data is not what it was at step 2" in printed
    (tmp_path / "y.npy").rename(tmp_path / "x.npy")
    assert run(4)[0] == 0


@pytest.mark.heavy
def test_workers_stop_together_where_the_data_of_one_is_not_what_it_was(flags, run_workers, tmp_path):
    homes = [tmp_path / name for name in ("first", "second")]
    for home in homes:
        folder(home / "own", False)
    run = ("--mode=train", *flags("folder:~/own", "folder_images.eval_share = 0", "train.evaluate_every = 0"))

    def workers(*more: str):
        finished = run_workers(2, *run, *more, env=[{"HOME": str(home)} for home in homes])
        return [one.returncode for one in finished], "".join(one.stderr for one in finished)

    codes, printed = workers("--gin_param=train.steps = 4")
    assert codes == [0, 0], printed
    folder(homes[1] / "own", True)
    codes, printed = workers()
    assert codes == [64, 64], printed
    assert "some are others, or their order is another. The run would" in printed
    assert "another worker has other data. The run would" in printed
