"""Names of the last release are read, said to be old, and mean what they meant."""

from __future__ import annotations

import inspect

import gin
import pytest

from launcher.config import gin_bindings, gin_used, renamed
from launcher.errors import UsageError
from launcher.run import loading
from launcher.run.programs import FitCall
from launcher.run.recipe import Recipe

RECIPE = """
train.task = @image_classification()
image_classification.data = @image_data()
image_classification.model = @mlp
image_data.name = 'digits'
train.optimizer = @adam
adam.learning_rate = 0.01
train.steps = 3
train.global_batch_size = 8
"""


@pytest.fixture
def load(tmp_path):
    def recipe(*params: str) -> Recipe:
        (tmp_path / "recipe.gin").write_text(RECIPE)
        loading.load_bindings([str(tmp_path / "recipe.gin")], params)
        return Recipe()

    yield recipe
    gin_bindings.reset()


def test_an_old_name_binds_what_its_new_name_binds_and_of_both_the_last_one_counts(load, monkeypatch):
    monkeypatch.setattr(
        renamed, "RENAMED", {"train.clip_value": "Clipping.value", "train.wire_dtype": "train.reduce_dtype"}
    )
    recipe = load("train.clip_value = 0.5", "train.wire_dtype = 'float16'")
    assert (recipe.clipping.value, recipe.reduce_dtype) == (0.5, "float16")
    (note,) = gin_bindings.notes()
    assert "train.clip_value is Clipping.value" in note and "train.wire_dtype is train.reduce_dtype" in note
    assert load("train.clip_value = 1.0", "Clipping.value = 2.0").clipping.value == 2.0
    assert load("Clipping.value = 2.0", "train.clip_value = 1.0").clipping.value == 1.0
    gin_bindings.reset()
    settings = {"task": recipe.task, "optimizer": lambda: None, "steps": 1, "global_batch_size": 8}
    assert FitCall(settings={**settings, "wire_dtype": "float16"}).recipe().reduce_dtype == "float16"


@pytest.mark.parametrize(("old", "new"), [(True, "optimizer"), (False, "none")])
def test_an_old_value_means_what_it_meant(load, old, new):
    assert load(f"train.shard_optimizer = {old}").shard == new
    (note,) = gin_bindings.notes()
    assert "train.shard_optimizer is train.shard" in note
    task = load().task
    gin_bindings.reset()
    settings = {"task": task, "optimizer": lambda: None, "steps": 1, "global_batch_size": 8, "shard_optimizer": old}
    assert FitCall(settings=settings).recipe().shard == new
    with pytest.raises(UsageError, match=r"train\.shard = 'weights': must be one of 'none', 'optimizer', 'all'"):
        load("train.shard = 'weights'")


@pytest.mark.parametrize(("old", "new"), renamed.RENAMED.items())
def test_every_old_name_leads_to_something_that_can_be_bound(load, old, new):
    load()
    selector, _, arg = new.partition(".")
    settable = inspect.signature(gin.get_configurable(selector)).parameters
    assert arg in settable
    assert old.partition(".")[0] != selector or old.partition(".")[2] not in settable


def test_a_group_may_be_a_mapping_and_bindings_go_before(load):
    task = load().task
    settings = {"task": task, "optimizer": lambda: None, "steps": 1, "global_batch_size": 8}
    gin_bindings.reset()
    clipping = {"value": 2.0}
    assert FitCall(settings={**settings, "clipping": clipping}).recipe().clipping.value == 2.0
    load("Clipping.value = 3.0")
    assert FitCall(settings={"steps": 1, "clipping": clipping}).recipe().clipping.value == 3.0


def test_what_belongs_to_another_source_is_refused(load):
    for wrong, said in (
        ("image_data.train_split = 'train'", "no parameter 'train_split'"),
        ("tfds_images.train_split = 'train'", "tfds_images is never called"),
        ("folder_images.first_label = 1", "no parameter 'first_label'"),
    ):
        with pytest.raises(UsageError, match=said):
            load(wrong)
            gin_used.check_all_used(traced=False)
    with (
        pytest.raises(UsageError, match=r"required and not bound: record_images\.num_classes"),
        gin_bindings.usage_errors(),
    ):
        load("image_data.name = 'tfrecord:a*'")


def test_what_a_group_refuses_is_said_by_its_name(load):
    for wrong, said in (
        ("Checkpoints.keep = 0", "Checkpoints.keep = 0: must be 1 or more"),
        ("Checkpoints.save_model = 'newest'", "Checkpoints.save_model = 'newest': must be one of 'best'"),
        ("Checkpoints.every_minutes = -1", "Checkpoints.every_minutes = -1: must be 0 or more"),
        ("StartFrom.which = 'newest'", "StartFrom.which = 'newest'"),
    ):
        with pytest.raises(Exception) as caught:
            load(wrong)
        assert isinstance(caught.value, UsageError) or said.split(" = ")[0] in str(caught.value)
        assert caught.match(said)
