"""What data says of its batches before it is opened is what they are."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import text_run
from assembled import assert_finished_by_the_step
from sources import made

from launcher.data import batch_spec
from launcher.data.images.image_data import image_data
from launcher.data.pipeline import ArrayExamples, RandomAccessData, Shard
from launcher.data.text.corpus import TextCorpus
from launcher.data.text.pairs import TextPairs
from launcher.errors import UsageError

SHARD = Shard(global_batch_size=12, num_replicas=3, first_replica=0, local_replicas=3, seed=0)


def digits(folder):
    return image_data(name="digits", augmentation="small")


def larger_digits(folder):
    return image_data(name="digits", image_size=12)


def mixed_digits(folder):
    return image_data(name="digits", mixup=0.2, cutmix=1.0)


def synthetic(folder):
    return made(image_data, name="synthetic", image_size=9, num_classes=7, cutmix=1.0)


def packed_pairs(folder):
    return pairs(folder, row_length=40)


def single_pairs(folder):
    return pairs(folder, packed=False)


def pairs(folder, **more):
    text_run.write_pairs(folder)
    return made(TextPairs, name=f"tsv:{folder}/train.tsv", vocab_size=290, max_length=20, **more)


def corpus(folder):
    text_run.write_corpus(folder)
    return made(TextCorpus, name=f"lines:{folder}/train.txt", vocab_size=290, length=32)


@pytest.mark.parametrize(
    "make",
    [digits, larger_digits, mixed_digits, synthetic, packed_pairs, single_pairs, corpus],
    ids=lambda make: make.__name__,
)
def test_the_specification_is_that_of_the_batches(make, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    data = make(tmp_path)
    assert isinstance(data, batch_spec.SpecifiesBatches)
    told = batch_spec.of_one_replica(data, SHARD)
    data.check()
    assert told == data.train_batches(SHARD).element_spec
    if make in (digits, larger_digits):
        assert_finished_by_the_step(data)
    else:  # mixed, made up as numbers, or no images
        assert getattr(data, "finish_stored", None) is None


def test_data_that_is_not_there_is_specified_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing"))
    data = image_data(name="tfds:imagenet2012", image_size=224)
    with pytest.raises(UsageError):
        data.check()
    assert batch_spec.of_one_replica(data, SHARD)["image"] == tf.TensorSpec([4, 224, 224, 3], tf.float32)


def test_data_that_cannot_tell_is_opened():
    data = RandomAccessData(train=ArrayExamples({"x": np.zeros([5, 2], np.float64)}))
    told = batch_spec.of_one_replica(data, SHARD)
    assert told == {"x": tf.TensorSpec([4, 2], tf.float64), "weight": tf.TensorSpec([4], tf.float32)}
