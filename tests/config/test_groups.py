"""Groups of bindings, and what belongs to one source alone."""

from __future__ import annotations

import pytest

from launcher.config import gin_bindings, gin_used
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


def test_what_is_shared_out_is_one_of_three(load):
    with pytest.raises(UsageError, match=r"train\.shard = 'weights': must be one of 'none', 'optimizer', 'all'"):
        load("train.shard = 'weights'")


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
