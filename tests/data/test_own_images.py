"""The user's own images, from class folders and records, against the pictures that were written."""

from __future__ import annotations

import io
import itertools
import os
import re

import numpy as np
import pytest
import tensorflow as tf
from assembled import assert_finished_by_the_step, assert_same, global_batches, joined, shards
from cases import repeated_but
from own_files import (
    CLASSES,
    EACH,
    encoded,
    example,
    examples,
    picture,
    standardised,
    write_folders,
    write_tfrecords,
)
from PIL import Image
from sources import made

from launcher.data import records
from launcher.data.images import image_header
from launcher.data.images.decode import ImageDecoder
from launcher.data.images.folder_images import folder_images
from launcher.data.images.image_data import ImageData, image_data
from launcher.errors import UsageError

pytestmark = pytest.mark.slow

ALL = EACH * len(CLASSES)
KINDS = ("folder", "tfrecord")


@pytest.fixture(autouse=True)
def data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data_dir"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The pictures of one size in every form: kind to name."""
    root = tmp_path_factory.mktemp("own")
    return {
        "folder": f"folder:{write_folders(root / 'folder')}",
        "tfrecord": f"tfrecord:{write_tfrecords(root / 'records', examples(first_label=1))}",
    }


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Pictures of different sizes, JPEG and PNG."""
    return f"folder:{write_folders(tmp_path_factory.mktemp('photographs') / 'all', one_size=False)}"


def opened(written: dict[str, str], kind: str, *, in_memory: bool = True, **options) -> ImageData:
    if kind != "folder":
        options = {"num_classes": len(CLASSES), "first_label": 1, **options}
    return made(image_data, name=written[kind], memory_limit_bytes=2**30 if in_memory else 0, **options)


def everything(data: ImageData) -> dict[str, np.ndarray]:
    """One epoch and one evaluation, put together."""
    parts = [
        global_batches(make, hosts=1, replicas=1, batch=count, steps=1)[0]
        for make, count in ((data.train_batches, data.num_train_examples), (data.eval_batches, data.num_eval_examples))
    ]
    return {key: np.concatenate([part[key] for part in parts]) for key in ("image", "label", "weight")}


# ------------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    ("kind", "in_memory"),
    repeated_but([("folder", True), ("tfrecord", False)], itertools.product(KINDS, [True, False])),
)
def test_every_picture_comes_once_with_its_class(written, kind, in_memory):
    data = opened(written, kind, in_memory=in_memory)
    data.check()
    assert (data.image_shape, data.num_classes) == ((8, 8, 3), len(CLASSES))
    assert data.class_names == (CLASSES if kind == "folder" else ())
    assert data.num_eval_examples > 0 and data.num_train_examples + data.num_eval_examples == ALL
    batch = everything(data)
    numbers = np.rint((batch["image"][:, 0, 0, 2] * 0.225 + 0.406) * 255).astype(int)
    np.testing.assert_array_equal(np.sort(numbers), np.arange(ALL))
    np.testing.assert_array_equal(batch["label"], numbers // EACH)
    np.testing.assert_allclose(batch["image"], [standardised(number) for number in numbers], atol=1e-5)


@pytest.mark.parametrize("kind", repeated_but(["tfrecord"], ["folder", "tfrecord"]))
def test_what_is_read_by_need_is_what_is_held_in_memory(written, kind):
    def some(in_memory):
        data = opened(written, kind, in_memory=in_memory, augmentation="small", mixup=0.2)
        return global_batches(data.train_batches, hosts=1, replicas=1, batch=10, steps=8)

    assert_same(some(True), some(False))


@pytest.mark.parametrize(("hosts", "replicas"), repeated_but([(2, 2)], [(1, 4), (2, 2)]))
def test_windows_of_photographs_are_the_same_on_every_topology_and_after_a_resume(photographs, hosts, replicas):
    data = image_data(name=photographs, image_size=6, augmentation="imagenet")
    whole = global_batches(data.train_batches, hosts=1, replicas=1, batch=8, steps=20)
    later = global_batches(data.train_batches, hosts=hosts, replicas=replicas, batch=8, steps=13, start_step=7)
    assert_same(later, whole[7:])
    assert_finished_by_the_step(data)
    labels, images = joined(whole, "label"), joined(whole, "image")
    assert len(np.unique(images[labels == 0].reshape((labels == 0).sum(), -1), axis=0)) > EACH  # anew in each epoch


@pytest.mark.parametrize("kind", ["folder", "tfrecord"])
def test_files_of_tensorflows_file_systems_are_the_same(written, kind):
    remote = {kind: written[kind].replace(":", ":file://")}  # as gs:// is read, and needs no network
    here, there = (opened(names, kind, in_memory=False) for names in (written, remote))
    there.check()
    one, other = (global_batches(data.eval_batches, hosts=1, replicas=1, batch=4, steps=1) for data in (here, there))
    assert_same(one, other)


def test_mean_and_deviation_may_be_bound_and_images_be_grey(written):
    data = opened(written, "folder", channels=1, mean=(0.0,), std=(1.0,))
    assert data.image_shape == (8, 8, 1)
    grey = np.array(Image.fromarray(picture(0, one_size=True)).convert("L")) / 255
    images = everything(data)["image"]
    assert np.abs(images[..., 0] - grey).max(axis=(1, 2)).min() < 2 / 255
    for bound in ({"mean": (0.5,)}, {"std": (1.0, 1.0, 0.0)}):
        with pytest.raises(UsageError, match=r"must be 3 numbers"):
            opened(written, "folder", **bound)


def test_files_of_a_request_are_decoded_as_those_of_the_evaluation(written):
    data = opened(written, "folder")
    (batch,) = global_batches(data.eval_batches, hosts=1, replicas=1, batch=data.num_eval_examples, steps=1)
    numbers = np.rint((batch["image"][:, 0, 0, 2] * 0.225 + 0.406) * 255).astype(int)
    served = data.decode(tf.constant([encoded(number) for number in numbers]))
    np.testing.assert_allclose(served, batch["image"], atol=1e-6)


# ----------------------------------------------------------------------------------------------------- what is held out


def held_out_names(root) -> set[str]:
    part = folder_images(str(root), eval_share=0.3).evaluation
    return {os.path.relpath(part.name(index), root) for index in range(len(part))}


def test_a_file_stays_held_out_when_others_are_added(tmp_path):
    few = held_out_names(write_folders(tmp_path / "few", numbers=range(0, EACH, 2)))
    many = held_out_names(write_folders(tmp_path / "many"))
    assert few and few < many and 0.1 < len(many) / ALL < 0.5


def test_folders_to_evaluate_on_are_found(tmp_path):
    for name, numbers in (("train", range(12)), ("validation", range(12, 16)), ("test", range(16, 20))):
        write_folders(tmp_path / name, numbers=numbers)
    (tmp_path / "train" / "ash" / "Thumbs.db").write_bytes(b"no image")
    (tmp_path / "train" / ".hidden").mkdir()
    data = image_data(name=f"folder:{tmp_path}")
    assert (data.num_train_examples, data.num_eval_examples) == (36, 12)
    assert data.details.startswith("3 classes (ash, birch, cedar), evaluated on validation; 1 other files left out")
    tested = made(image_data, name=f"folder:{tmp_path}", eval_split="test")
    (batch,) = global_batches(tested.eval_batches, hosts=1, replicas=1, batch=12, steps=1)
    wanted = [standardised(EACH * label + number) for label in range(3) for number in range(16, 20)]
    np.testing.assert_allclose(batch["image"], wanted, atol=1e-5)


def test_records_to_evaluate_on_may_be_named_and_nothing_be_held_out(written, tmp_path):
    pattern = write_tfrecords(tmp_path, examples(first_label=1)[:4], shards=1)
    assert opened(written, "tfrecord", eval_files=pattern).num_eval_examples == 4
    data = opened(written, "tfrecord", eval_share=0)
    assert (data.num_train_examples, data.num_eval_examples) == (ALL, None)
    global_batches(data.train_batches, hosts=1, replicas=1, batch=4, steps=1)


def test_features_of_another_name_are_read(tmp_path):
    pattern = write_tfrecords(tmp_path, [example(encoded(n), n % 3, ("image_raw", "label")) for n in range(ALL)])
    name, features = f"tfrecord:{pattern}", {"image": "image_raw", "label": "label"}
    assert len(everything(made(image_data, name=name, num_classes=3, features=features))["label"]) == ALL
    with pytest.raises(
        UsageError, match=r"record 0 of .*no feature 'image/encoded' but .*; bind record_images.features"
    ):
        made(image_data, name=name, num_classes=3)
    with pytest.raises(UsageError, match=r"features = .* must name 'image', 'label' or both"):
        made(image_data, name=name, num_classes=3, features={"picture": "image_raw"})


# ---------------------------------------------------------------------------------------------------- TFRecords' index


@pytest.fixture
def shard(tmp_path):
    """A file of records of different lengths, an empty one among them."""
    contents = [bytes([n]) * (n * 37 % 1000) for n in range(50)]
    return write_tfrecords(tmp_path, contents, shards=1).replace("*", "0"), contents


def test_records_are_had_in_any_order(shard):
    path, contents = shard
    found = records.TFRecords.open([path, path])
    order = np.random.default_rng(0).permutation(100)
    assert found.fetch(tf.constant(order)).numpy().tolist() == [contents[index % 50] for index in order]
    assert [found.read(index) for index in order] == [contents[index % 50] for index in order]
    assert found.name(53) == f"record 3 of {path}" and found.firsts() == [0, 50]


def test_an_index_is_kept_as_long_as_the_file_stays_as_it_is(shard, monkeypatch):
    path, contents = shard
    records.TFRecords.open([path])
    with monkeypatch.context() as patch:
        patch.setattr(records, "_headers", None)
        assert records.TFRecords.open([path]).read(7) == contents[7]
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(b"another")
    assert records.TFRecords.open([path]).read(0) == b"another"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda content: content[:-300],
            "truncated.* record 49 begins at byte 23,296 and would end at byte 24,125, and the file .* 23,825",
        ),
        (lambda content: content[:-820], "truncated.* begins at byte 23,296 .*ends at byte 23,305"),
        (lambda content: content[:2] + b"x" + content[3:], "damaged.* record 0 begins at byte 0 "),
        (lambda content: content[:17] + b"\1" + content[18:], "damaged.* record 2 begins at byte 325 "),
        (lambda content: b"no,records,but,text\n" * 9, "no TFRecord file: its record 0 "),
        (lambda content: b"\x1f\x8b" + content, "is compressed"),
        (lambda content: b"", "hold no record"),
    ],
)
def test_a_damaged_record_file_is_named_with_the_place(shard, damage, words):
    path, _ = shard
    with open(path, "rb+") as file:
        content = damage(file.read())
        file.seek(0)
        file.write(content)
        file.truncate()
    with pytest.raises(UsageError, match=f"{path} .*{words}"):
        records.TFRecords.open([path])


# -------------------------------------------------------------------------------------------------------- image files


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_headers_tell_the_size_and_ends_that_a_file_is_whole(kind):
    content = encoded(17, one_size=False, kind=kind)
    image_header.check(io.BytesIO(content))
    assert image_header.size(io.BytesIO(content)) == picture(17, one_size=False).shape[:2]
    if kind in ("PNG", "JPEG"):
        image_header.check(io.BytesIO(content + b"appended by a camera"))
        with pytest.raises(UsageError, match=f"truncated {kind}"):
            image_header.check(io.BytesIO(content[: len(content) * 3 // 4]))


def test_the_end_of_a_thumbnail_is_not_that_of_its_photograph():
    photo, thumbnail = encoded(17, kind="JPEG"), encoded(3, kind="JPEG")
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    with_thumbnail = photo[:2] + segment + photo[2:]
    image_header.check(io.BytesIO(with_thumbnail))
    with pytest.raises(UsageError, match="truncated JPEG"):
        image_header.check(io.BytesIO(with_thumbnail[:-40]))


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "empty"), (b"<html>not found</html>", "not JPEG"), (b"RIFF\0\0\0\0WEBPVP8 ", "WebP")]
)
def test_what_is_no_image_says_what_it_is(content, words):
    with pytest.raises(UsageError, match=words):
        image_header.check(io.BytesIO(content))


def test_a_palette_of_colours_is_refused_and_one_of_greys_is_read():
    """TensorFlow gives the numbers of a BMP's palette as if they were greys."""
    decode = ImageDecoder(image_shape=(8, 8, 3), fraction=1.0, scaled=True).centre
    coloured = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8))
    for image, is_read in ((coloured.convert("L"), True), (coloured, True), (coloured.quantize(64), False)):
        file = io.BytesIO()
        image.save(file, "BMP")
        if is_read:
            image_header.check(file)
            np.testing.assert_array_equal(decode(file.getvalue()), image.convert("RGB"))
            continue
        with pytest.raises(UsageError, match="BMP with a palette of colours"):
            image_header.check(file)
        with pytest.raises(tf.errors.InvalidArgumentError, match="BMP with a palette of colours"):
            decode(file.getvalue())


def test_a_link_that_leads_round_or_nowhere_and_a_name_that_is_no_text_are_named(tmp_path):
    root = write_folders(tmp_path / "all")
    there = root / "ash" / "link.png"
    there.symlink_to(tmp_path / "nowhere.png")
    named = re.escape(f"1 image cannot be used: {there} ({there} cannot be read: No such file or directory); repair")
    with pytest.raises(UsageError, match=named):
        made(image_data, name=f"folder:{root}").check()
    there.unlink()
    (root / "ash" / "more").symlink_to(write_folders(tmp_path / "allmore") / "ash")  # which leads away
    count = made(image_data, name=f"folder:{root}", eval_share=0).num_train_examples
    assert count == ALL + EACH
    (root / "ash" / "link").symlink_to(root)
    with pytest.raises(UsageError, match=f"{root}/ash/link is a link to a folder that it lies in, {root}; remove it"):
        made(image_data, name=f"folder:{root}")
    (root / "ash" / "link").unlink()
    (root / "ash" / os.fsdecode(b"caf\xe9.png")).write_bytes(encoded(5))
    with pytest.raises(UsageError, match=r"'ash/caf\\udce9\.png': its name is no UTF-8; rename it"):
        made(image_data, name=f"folder:{root}")


# ---------------------------------------------------------------------------------------------------- damage, refusals


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_file_that_only_the_decoder_finds_damaged_is_named(tmp_path, in_memory):
    root = write_folders(tmp_path / "all")
    content = encoded(5, kind="JPEG")
    (root / "ash" / "5.png").write_bytes(content[: content.index(b"\xff\xc4")] + b"\xff\xd9")  # without its tables
    data = made(image_data, name=f"folder:{root}", eval_share=0, memory_limit_bytes=2**30 * in_memory)
    data.check()
    words = f"1 image cannot be used: {root}/ash/5.png (cannot be decoded); repair or remove"
    if in_memory:
        with pytest.raises(UsageError, match=re.escape(words)):
            data.train_batches(*shards(hosts=1, replicas=1, batch=4))
        return
    with pytest.raises(tf.errors.InvalidArgumentError):
        global_batches(data.train_batches, hosts=1, replicas=1, batch=4, steps=ALL // 4)
    assert words in data.damage(seed=5, start=0, stop=ALL)


def test_what_does_not_fit_a_set_is_refused(written):
    for options, words in (
        ({"name": written["folder"], "eval_share": 1.5}, r"eval_share = 1\.5: must be"),
        ({"name": written["folder"], "eval_split": "val"}, "needs folder_images.train_split"),
        ({"name": written["folder"], "train_split": "ahs"}, "did you mean 'ash'"),
        ({"name": written["folder"], "channels": 4}, "must be 1 or 3"),
        ({"name": written["folder"].replace("folder:", "folders:")}, "did you mean 'folder:'"),
        ({"name": written["folder"].removeprefix("folder:")}, f"did you mean '{written['folder']}'"),
    ):
        with pytest.raises(UsageError, match=words):
            made(image_data, **options)
