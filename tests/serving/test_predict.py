"""`--mode=predict` on images and arrays: one answer a record."""

from __future__ import annotations

import json
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from served import FLAGS

from launcher.data.images import digits

pytestmark = pytest.mark.slow

IMAGES = digits.load()[1]["image"]
DAMAGED = 7


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of 80 JPEG files, of which one is cut off, and one file that is no image."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    for number, image in enumerate(IMAGES[:80]):
        content = tf.io.encode_jpeg(tf.cast(image * 15, tf.uint8)).numpy()
        place = folder / ("more" if number % 2 else "") / f"{number:02}.jpg"
        place.write_bytes(content[: len(content) // 2] if number == DAMAGED else content)
    (folder / "notes.txt").write_text("no image")
    return folder


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_image_has_a_line_and_a_damaged_one_says_so(launched, digits_run, photos, tmp_path):
    done = launched("--mode=predict", f"--input={photos}", f"--output={tmp_path}/answers", "--replicas=2")
    assert done.returncode == 0, done.stderr
    assert "1 of 80 images could not be read:\n  more/07.jpg: Invalid JPEG" in done.stderr
    found = records(tmp_path / "answers")
    assert [record["file"] for record in found] == sorted(
        str(path.relative_to(photos)) for path in photos.rglob("*.jpg")
    )
    assert [record["file"] for record in found if "error" in record] == ["more/07.jpg"]
    assert not list(tmp_path.glob("*.partial"))
    by_name = {record["file"]: record for record in found}
    done = launched("--mode=predict", f"--input={photos}/1*.jpg")
    for line in done.stdout.splitlines():
        one = json.loads(line)
        other = by_name[one.pop("file").removeprefix(f"{photos}/")]
        assert one["class"] == other["class"] and one["probability"] == pytest.approx(other["probability"], abs=1e-6)


def test_an_output_is_not_there_until_it_is_whole(launched, digits_run, photos, start_launcher, tmp_path):
    flags = [*FLAGS, "--gin_param=train.eval_batch_size = 1", f"--model_dir={digits_run}", "--mode=predict"]
    partial = tmp_path / "answers.partial"
    started = start_launcher(*flags, f"--input={photos}", f"--output={tmp_path}/answers")
    started.wait_until(partial.exists)
    started.send(signal.SIGKILL)
    started.wait()
    assert partial.exists() and not (tmp_path / "answers").exists()
    (partial / "answers").write_text("of the attempt that was killed\n")
    done = launched("--mode=predict", f"--input={photos}", f"--output={tmp_path}/answers")
    assert done.returncode == 0 and "1 of 80 images could not be read" in done.stderr, done.stderr
    assert len(records(tmp_path / "answers")) == 80 and not partial.exists()


def test_rows_of_an_array_are_answered_as_keras_answers_them(launched, digits_run, tmp_path):
    images = IMAGES[:11].astype(np.float64)
    np.save(tmp_path / "x.npy", images)
    np.savez(tmp_path / "x.npz", image=images)
    expected = keras.saving.load_model(digits_run / "model.keras").predict(images, verbose=0)
    for given, wanted in (("x.npy", "y.npy"), ("x.npz", "y.npz")):
        done = launched(
            "--mode=predict", f"--input={tmp_path}/{given}", f"--output={tmp_path}/{wanted}", "--replicas=2"
        )
        assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "y.npy")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npz")["logits"], found)


GIVEN = {
    "shape.npy": (np.zeros([3, 8, 8]), r"has shape (3, 8, 8), and the model takes float32 [n, 8, 8, 1]"),
    "dtype.npy": (np.full([3, 8, 8, 1], "a"), r"is <U1, and the model takes float32 [n, 8, 8, 1]"),
    "complex.npy": (np.zeros([3, 8, 8, 1], complex), "is complex128, and the model takes float32"),
    "empty.npy": (np.zeros([0, 8, 8, 1]), "must have one number of rows, 1 or more; found 0"),
    "keys.npz": (
        np.zeros([3, 8, 8, 1]),
        "the model has no input 'x'; give a .npz file of 'image' (float32 [n, 8, 8, 1])",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_array_that_does_not_fit_the_model(launched, tmp_path, name):
    array, message = GIVEN[name]
    (np.savez if name.endswith("z") else np.save)(tmp_path / name, **{"x" if name.endswith("z") else "arr": array})
    done = launched("--mode=predict", f"--input={tmp_path}/{name}", f"--output={tmp_path}/y.npy")
    assert done.returncode == 64 and message in done.stderr, done.stderr
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("y*"))


@pytest.mark.parametrize(
    ("given", "output", "message"),
    [
        ("nowhere.npy", "y.npy", "nowhere.npy cannot be read"),
        ("nowhere", "y", "nowhere cannot be read"),
        ("*.png", "y", "there is no image among its 0 files"),
        ("folder", "y", "there is no image among its 1 files"),
        ("text", "y", "takes no lines"),
        ("junk.npy", "y.npy", "no .npy file of numbers or strings"),
        ("junk.npy", "y.jsonl", "name the answers"),
        ("folder", "y.npy", "are text"),
        ("folder", "folder", "is a folder; name a file"),
    ],
)
def test_an_input_or_output_that_cannot_be(launched, tmp_path, given, output, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes.txt").write_text("no image")
    (tmp_path / "text").write_text("a line\n")
    (tmp_path / "junk.npy").write_text("no array")
    done = launched("--mode=predict", f"--input={tmp_path}/{given}", f"--output={tmp_path}/{output}")
    assert done.returncode == 64 and message in done.stderr, done.stderr
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
