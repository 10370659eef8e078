from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
from assembled import TOPOLOGIES, assert_finished_by_the_step, assert_same, global_batches, joined, shards
from cases import repeated_but
from sources import made
from tiny_tfds import PHOTOS_TEST, PHOTOS_TRAIN

from launcher.data import catalog, tfds
from launcher.data.catalog import Facts
from launcher.data.images.image_data import ImageData, image_data
from launcher.errors import UsageError

pytestmark = pytest.mark.slow

BATCH, STEPS = 4, 103  # 412 of 203 examples: two epochs and more


def _data(name: str, *, by_need: bool, **options) -> ImageData:
    return made(image_data, name=name, image_size=10, memory_limit_bytes=0 if by_need else 2**30, **options)


# ------------------------------------------------------------------------------------------- in memory and by need


def test_a_prepared_set_tells_its_shape_classes_and_counts(photos):
    data = _data(photos, by_need=False)
    assert (data.image_shape, data.num_classes) == ((10, 10, 3), 300)
    assert (data.num_train_examples, data.num_eval_examples) == (PHOTOS_TRAIN, PHOTOS_TEST)
    data.check()


@pytest.fixture
def catalogued(monkeypatch):
    """What the catalog says of the photos; they are otherwise."""
    facts = Facts(
        image_shape=(9, 9, 3),
        num_classes=2,
        num_train_examples=1_000_000,
        num_eval_examples=50_000,
        mean=(0.25,) * 3,
        std=(0.5,) * 3,
    )
    monkeypatch.setitem(catalog.TFDS, "launcher_test_photos", facts)
    return facts


@pytest.mark.parametrize("by_need", repeated_but([True], [False, True]))
def test_what_a_prepared_set_says_of_itself_counts_and_not_the_catalog(photos, catalogued, by_need):
    data = _data(photos, by_need=by_need)
    assert (data.image_shape, data.num_classes) == ((10, 10, 3), 300)
    assert (data.num_train_examples, data.num_eval_examples) == (PHOTOS_TRAIN, PHOTOS_TEST)
    with pytest.raises(UsageError, match="differ in size"):
        image_data(name=photos)
    (batch,) = global_batches(data.eval_batches, hosts=1, replicas=1, batch=PHOTOS_TEST, steps=1)
    assert sorted(batch["label"]) == list(range(PHOTOS_TEST))
    pixels = (batch["image"] * catalogued.std[0] + catalogued.mean[0]) * 255
    np.testing.assert_allclose(pixels, np.rint(pixels), atol=1e-3)  # what only the catalog knows is still from there


def test_the_catalog_serves_while_a_set_is_not_prepared(empty_data_dir, catalogued):
    data = image_data(name="tfds:launcher_test_photos")
    assert (data.image_shape, data.num_classes) == (catalogued.image_shape, catalogued.num_classes)
    assert (data.num_train_examples, data.num_eval_examples) == (1_000_000, 50_000)


def test_the_catalog_serves_where_tfds_is_not_installed(catalogued, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    assert made(image_data, name="tfds:launcher_test_photos").num_train_examples == 1_000_000
    with pytest.raises(UsageError, match="tensorflow_datasets is missing"):
        made(image_data, name="tfds:launcher_test_photos", train_split="train[:9]")


@pytest.mark.parametrize("by_need", repeated_but([True], [False, True]))
def test_parts_of_splits_may_be_bound(photos, by_need):
    data = _data(photos, by_need=by_need, train_split="train[:150]", eval_split="train[150:]")
    assert (data.num_train_examples, data.num_eval_examples) == (150, PHOTOS_TRAIN - 150)
    train = global_batches(data.train_batches, hosts=1, replicas=1, batch=BATCH, steps=40)
    evaluated = global_batches(data.eval_batches, hosts=1, replicas=1, batch=BATCH, steps=14)
    held_out = joined(evaluated, "label")[joined(evaluated, "weight") == 1]
    assert len(held_out) == PHOTOS_TRAIN - 150
    assert not set(joined(train, "label")) & set(held_out)


@pytest.mark.parametrize(
    ("hosts", "replicas", "by_need"),
    repeated_but(
        [(2, 2, False), (3, 1, True)],
        [(*topology, by_need) for topology in [*TOPOLOGIES, (3, 1)] for by_need in (False, True)],
    ),
)
def test_evaluation_sees_every_photo_once(photos, hosts, replicas, by_need):
    batch = 2 * hosts * replicas
    steps = -(-PHOTOS_TEST // batch)
    data = _data(photos, by_need=by_need)
    for shard in shards(hosts=hosts, replicas=replicas, batch=batch):
        assert len(list(data.eval_batches(shard))) == steps * replicas
    batches = global_batches(data.eval_batches, hosts=hosts, replicas=replicas, batch=batch, steps=steps)
    weight = joined(batches, "weight")
    np.testing.assert_array_equal(np.sort(joined(batches, "label")[weight == 1]), np.arange(PHOTOS_TEST))
    assert weight.sum() == PHOTOS_TEST and (weight == 0).sum() == steps * batch - PHOTOS_TEST


def test_read_and_held_photos_are_the_same(photos):
    def by_label(by_need):
        (batch,) = global_batches(
            _data(photos, by_need=by_need).eval_batches, hosts=1, replicas=1, batch=PHOTOS_TEST, steps=1
        )
        return batch["image"][np.argsort(batch["label"])]

    np.testing.assert_array_equal(by_label(True), by_label(False))


@pytest.mark.parametrize("by_need", repeated_but([True], [False, True]))
def test_batches_have_static_shapes(photos, by_need):
    data = _data(photos, by_need=by_need, augmentation="small")
    (shard,) = shards(hosts=1, replicas=2, batch=BATCH)
    for dataset in (data.train_batches(shard), data.eval_batches(shard)):
        assert {key: (tuple(spec.shape), spec.dtype.name) for key, spec in dataset.element_spec.items()} == {
            "image": ((2, 10, 10, 3), "float32"),
            "label": ((2,), "int32"),
            "weight": ((2,), "float32"),
        }


# --------------------------------------------------------------------------------------------------- larger than memory


@pytest.fixture(scope="module")
def undisturbed(photos_dir):
    """The batches of a run on one replica that reads its photos by need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(photos_dir))
        data = _data("tfds:launcher_test_photos", by_need=True, augmentation="imagenet")
        assert_finished_by_the_step(data)
        return global_batches(data.train_batches, hosts=1, replicas=1, batch=BATCH, steps=STEPS)


def test_a_larger_set_shows_every_photo_once_an_epoch_each_time_augmented_anew(undisturbed):
    labels, images = joined(undisturbed, "label"), joined(undisturbed, "image")
    first, second = labels[:PHOTOS_TRAIN], labels[PHOTOS_TRAIN : 2 * PHOTOS_TRAIN]
    assert set(first) == set(second) == set(range(PHOTOS_TRAIN))
    assert (first != second).mean() > 0.9 and first.tolist() != sorted(first)
    pairs = [images[labels == label][:2] for label in range(PHOTOS_TRAIN)]
    assert np.mean([(one != other).any() for one, other in pairs]) > 0.8


@pytest.mark.parametrize(
    ("hosts", "replicas", "start_step"), repeated_but([(2, 2, 90)], [(2, 2, 90), (1, 4, 5), (4, 1, 51)])
)
def test_a_larger_set_goes_on_at_the_very_example_on_any_topology(photos, undisturbed, hosts, replicas, start_step):
    resumed = global_batches(
        _data(photos, by_need=True, augmentation="imagenet").train_batches,
        hosts=hosts,
        replicas=replicas,
        batch=BATCH,
        steps=12,
        start_step=start_step,
    )
    assert_same(resumed, undisturbed[start_step : start_step + 12])


def test_a_larger_set_in_the_order_of_before_is_not_taken_for_the_same(photos):
    held, by_need = (_data(photos, by_need=larger).identity() for larger in (False, True))
    assert held.startswith("launcher_test_photos/1.0.0 ") and by_need not in ("", held)


# ----------------------------------------------------------------------------------------------------------- refusals


def test_a_set_that_is_not_prepared_says_how_to_prepare_it(empty_data_dir):
    data = image_data(name="tfds:launcher_test_photos", image_size=10)
    assert data.num_train_examples is None and data.num_eval_examples is None
    command = f"python -m launcher.data.prepare launcher_test_photos --data_dir={empty_data_dir}"
    with pytest.raises(UsageError, match=command):
        data.check()
    (shard,) = shards(hosts=1, replicas=1, batch=1)
    with pytest.raises(UsageError, match=command):
        data.train_batches(shard)
    assert not empty_data_dir.exists()


def test_a_set_to_be_downloaded_by_hand_says_so(empty_data_dir):
    with pytest.raises(UsageError, match=r"by hand: manual_dir should contain icons.npy, drawn.*--archives="):
        made(image_data, name="tfds:launcher_test_icons", eval_split="train[:5]").check()


@pytest.mark.parametrize(("pair", "by_hand"), [("de-en", False), ("fr-en", False), ("cs-en", True), ("ru-en", True)])
def test_only_configurations_that_need_it_are_to_be_downloaded_by_hand(empty_data_dir, pair, by_hand):
    name = f"wmt14_translate/{pair}"
    with pytest.raises(UsageError) as caught:
        tfds.check_prepared(tfds.open_builder(name), ())
    assert ("by hand" in str(caught.value), "--archives=" in str(caught.value)) == (by_hand, by_hand)
    assert f"python -m launcher.data.prepare {name} --data_dir={empty_data_dir}" in str(caught.value)


def test_fashion_mnist_not_prepared_names_its_command(empty_data_dir):
    with pytest.raises(UsageError, match=r"python -m launcher.data.prepare fashion_mnist --data_dir="):
        image_data(name="fashion_mnist").check()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tfds:launcher_test_photo", {}, "did you mean 'launcher_test_photos'"),
        ("tfds:launcher_test_photos:9.9.9", {}, "cannot open"),
        ("tfds:../etc", {}, "not the name"),
        ("tfds:launcher_test_sentences", {}, "no image classification set.*text"),
        ("tfds:launcher_test_photos", {}, "bind image_data.image_size"),
        ("tfds:launcher_test_photos", {"image_size": 8, "train_split": "training"}, "no split 'training'.*test, train"),
        ("tfds:launcher_test_photos", {"image_size": 8, "eval_split": "test[100%:]"}, "is empty"),
    ],
)
def test_a_set_that_cannot_be_read_is_refused_by_name(photos, name, options, words):
    with pytest.raises(UsageError, match=words):
        made(image_data, name=name, **options)


def test_a_missing_module_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "importlib_resources", None)
    with pytest.raises(UsageError, match="importlib_resources is missing: pip install"):
        tfds.module()


def test_data_sets_are_in_the_users_folder_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    assert tfds.data_dir() == str(tmp_path / "tensorflow_datasets")
    monkeypatch.setenv("TFDS_DATA_DIR", "~/elsewhere")
    assert tfds.data_dir() == str(tmp_path / "elsewhere")


@pytest.fixture
def described(photos_dir, tmp_path, monkeypatch):
    """described(change): opens a copy of the photos of which TFDS knows nothing but its two files, changed."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))

    def opened(change):
        shutil.rmtree(folder := tmp_path / "of_others" / "1.0.0", ignore_errors=True)
        shutil.copytree(photos_dir / "launcher_test_photos" / "1.0.0", folder)
        for file in folder.glob("launcher_test_photos-*"):
            file.rename(folder / file.name.replace("launcher_test_photos", "of_others"))
        info, features = (json.loads((folder / f"{name}.json").read_text()) for name in ("dataset_info", "features"))
        info["name"] = "of_others"
        features = change(info, features) or features
        for name, content in (("dataset_info", info), ("features", features)):
            (folder / f"{name}.json").write_text(json.dumps(content))
        return tfds.open_builder("of_others")

    return opened


def of_tfds_4_1(info, features):
    """As they were before protocol buffers had features and splits their files' names."""
    kind, text = "tensorflow_datasets.core.features.", {"shape": [None, None, 3], "dtype": "uint8"}
    image = {"type": f"{kind}image_feature.Image", "content": {**text, "encoding_format": "jpeg"}}
    label = {"type": f"{kind}class_label_feature.ClassLabel", "content": {"num_classes": 300}}
    del info["fileFormat"], info["moduleName"]
    for split in info["splits"]:
        del split["filepathTemplate"]
    return {"type": f"{kind}features_dict.FeaturesDict", "content": {"image": image, "label": label}}


@pytest.mark.parametrize("change", [lambda info, features: None, of_tfds_4_1])
def test_descriptions_of_the_newest_and_of_an_old_tfds_are_read(described, change):
    builder = described(change)
    tfds.check_prepared(builder, ("train", "test"))
    counts = [tfds.num_examples(builder, split) for split in ("train", "test")]
    assert counts == [PHOTOS_TRAIN, PHOTOS_TEST] and tfds._image_features(builder) == ((None, None, 3), 300)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda info, features: info.update(later=1), "later"),
        (lambda info, features: info["splits"][0].update(later=1), "later"),
        (lambda info, features: info.update(fileFormat="lance"), "lance"),
        (lambda info, features: features["featuresDict"]["features"]["image"]["image"].update(later=1), "later"),
        (lambda info, features: features["featuresDict"]["features"]["label"].update(pythonClassName="a.B"), "a.B"),
        (lambda info, features: {"type": "tensorflow_datasets.core.features.text_feature.Text"}, "content"),
    ],
)
def test_what_a_description_has_that_tfds_does_not_know_is_named(described, change, word):
    with pytest.raises(UsageError, match=rf"TFDS cannot open 'of_others': \w+: .*{word}.*has of_others/1\.0\.0"):
        described(change)


def test_files_that_are_lost_or_cut_are_named_and_array_record_is_read_into_memory(photos_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    folder = tmp_path / "launcher_test_photos" / "1.0.0"

    def afresh():
        shutil.rmtree(tmp_path / "launcher_test_photos", ignore_errors=True)
        shutil.copytree(photos_dir / "launcher_test_photos", tmp_path / "launcher_test_photos")

    def refused(name="tfds:launcher_test_photos:1.0.0", by_need=False):
        with pytest.raises(UsageError) as found:
            data = _data(name, by_need=by_need)
            data.check()
            next(iter(data.train_batches(*shards(hosts=1, replicas=1, batch=BATCH))))
        return str(found.value)

    def by_label():
        make = _data("tfds:launcher_test_photos", by_need=False).eval_batches
        (batch,) = global_batches(make, hosts=1, replicas=1, batch=PHOTOS_TEST, steps=1)
        return batch["image"][np.argsort(batch["label"])]

    afresh()
    whole = by_label()
    assert "has launcher_test_photos/1.0.0" in refused("tfds:launcher_test_photos/small")
    (shard,) = folder.glob("*train*00002-of-*")
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    assert f"{shard} is damaged or cut: " in refused()
    assert f"{shard} is truncated, damaged" in refused(by_need=True)
    shard.unlink()
    assert f"{shard} is missing" in refused()
    for name in ("dataset_info.json", "features.json"):
        afresh()
        (folder / name).write_text((folder / name).read_text()[:99])
        assert f"{folder / name} is cut: prepare it anew" in refused()
    shutil.rmtree(tmp_path / "launcher_test_photos")
    import tensorflow_datasets

    made_so = tensorflow_datasets.builder("launcher_test_photos", data_dir=tmp_path, file_format="array_record")
    made_so.download_and_prepare(download_config=tensorflow_datasets.download.DownloadConfig(num_shards=7))
    np.testing.assert_array_equal(by_label(), whole)
    assert "read into memory alone: raise image_data.memory_limit_bytes" in refused(by_need=True)
    (shard,) = folder.glob("*train*00002-of-*")
    content = shard.read_bytes()
    for length in (len(content) - 10, len(content) // 2):
        shard.write_bytes(content[:length])
        assert f"{shard} is damaged or cut: " in refused()
