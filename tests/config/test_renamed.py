"""Names of the last release are read, said to be old, and mean what they meant."""

from __future__ import annotations

import inspect

import gin
import pytest

from launcher.config import gin_bindings, gin_files, gin_used, renamed
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


def test_an_old_name_binds_what_its_new_name_binds(load):
    old = load("train.clip_global_norm = 0.5", "train.keep_checkpoints = 7", "train.start_from = 'a.keras'")
    (note,) = gin_bindings.notes()
    assert "train.clip_global_norm is Clipping.global_norm" in note and "train.start_from is StartFrom.path" in note
    new = load("Clipping.global_norm = 0.5", "Checkpoints.keep = 7", "StartFrom.path = 'a.keras'")
    assert gin_bindings.notes() == []
    for recipe in (old, new):
        assert recipe.clipping.bounds == {"global_norm": 0.5}
        assert (recipe.checkpoints.keep, recipe.start.path) == (7, "a.keras")


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


def test_of_an_old_and_a_new_name_the_last_one_counts(load):
    assert load("train.clip_value = 1.0", "Clipping.value = 2.0").clipping.value == 2.0
    assert load("Clipping.value = 2.0", "train.clip_value = 1.0").clipping.value == 1.0


def test_a_call_of_fit_may_use_either_and_bindings_go_before(load):
    task = load().task
    settings = {"task": task, "optimizer": lambda: None, "steps": 1, "global_batch_size": 8}
    gin_bindings.reset()
    assert FitCall(settings={**settings, "wire_dtype": "float16"}).recipe().reduce_dtype == "float16"
    for named in ({"clip_value": 2.0}, {"clipping": {"value": 2.0}}):
        gin_bindings.reset()
        assert FitCall(settings={**settings, **named}).recipe().clipping.value == 2.0
        load("Clipping.value = 3.0")
        assert FitCall(settings={"steps": 1, **named}).recipe().clipping.value == 3.0


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("image_data.name = 'tfds:mnist'", "image_data.train_split = 'train[:9]'", "tfds_images.train_split"),
        ("image_data.name = 'folder:own'", "image_data.train_split = 'all'", "folder_images.train_split"),
        ("image_data.name = 'array_record:a*'", "image_data.num_classes = 3", "record_images.num_classes"),
        ("image_data.source = @synthetic_images()", "image_data.num_classes = 3", "synthetic_images.num_classes"),
        ("corpus = 'lines:a*'\ntext_corpus.name = %corpus", "text_corpus.eval_share = 0", "lines_corpus.eval_share"),
        ("text_pairs.name = 'files'", "text_pairs.source_file = 'a'", "file_pairs.source_file"),
    ],
)
def test_arguments_of_a_source_have_its_name_now(name, old, new):
    found = [gin_files.read_param(line) for line in (*name.splitlines(), old)]
    (moved,) = [binding for binding in renamed.renamed(found) if binding.old_name]
    assert (moved.name, moved.old_name) == (new, old.partition(" ")[0])


def test_what_belongs_to_another_source_is_refused(load):
    for wrong, said in (
        ("image_data.train_split = 'train'", "image_data has no parameter 'train_split'"),
        ("tfds_images.train_split = 'train'", "tfds_images is never called"),
        ("folder_images.first_label = 1", "folder_images has no parameter 'first_label'"),
    ):
        with pytest.raises(UsageError, match=said):
            load(wrong)
            gin_used.check_all_used(traced=False)
    with (
        pytest.raises(UsageError, match=r"required and not bound: record_images\.num_classes"),
        gin_bindings.usage_errors(),
    ):
        load("image_data.name = 'tfrecord:a*'")


def test_what_a_group_refuses_is_said_by_its_new_name(load):
    for wrong, said in (
        ("Checkpoints.keep = 0", "Checkpoints.keep = 0: must be 1 or more"),
        ("Checkpoints.save_model = 'newest'", "Checkpoints.save_model = 'newest': must be one of 'best'"),
        ("Checkpoints.every_minutes = -1", "Checkpoints.every_minutes = -1: must be 0 \\(never\\) or more"),
        ("train.start_which = 'newest'", "StartFrom.which = 'newest'"),
    ):
        with pytest.raises(Exception) as caught:
            load(wrong)
        assert isinstance(caught.value, UsageError) or said.split(" = ")[0] in str(caught.value)
        assert caught.match(said)


def test_a_recipe_that_imports_demonstration_data_by_its_old_name_gets_it_and_is_told(tmp_path, caplog):
    (tmp_path / "old.gin").write_text("import examples.data.spoken_numbers\nfrom examples.data import mine\n")
    moved, own = renamed.renamed(gin_files.read_file(str(tmp_path / "old.gin"), opened=[]))
    assert moved.text == moved.statement.format() == "import gin_configs.data.spoken_numbers"
    assert own.module == "examples.data.mine"
    (said,) = caplog.messages
    assert "old.gin line 1: import examples.data.spoken_numbers is going to end; write import gin_configs" in said
