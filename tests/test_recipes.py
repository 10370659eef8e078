"""Every recipe that comes along makes a plan where its data is not, and says what a person must know."""

from __future__ import annotations

import dataclasses
import re

import pytest
from cases import repeated_but
from places import ROOT

from launcher.config.gin_files import Binding, read_file

pytestmark = pytest.mark.slow

RECIPES = sorted(path.name for path in (ROOT / "gin_configs").glob("*.gin"))
PLANNED = [name for name in RECIPES if not name.startswith("experiment_")]
# What takes the place of hardware that is not here, and of sizes that would take minutes to build on a CPU.
CHANGES = ("--strategy=one_device", "--engine=tensorflow")
SMALL = {
    "resnet": ("resnet.depth = 8",),
    "transformer": ("transformer.layers = 1", "text_pairs.vocab_size = 512"),
    "lm_8b_": ("train.shard = 'optimizer'",),
    "lm_": ("language_model.layers = 1", "language_model.hidden = 64", "text_corpus.vocab_size = 512"),
}


@pytest.mark.parametrize("recipe", repeated_but(PLANNED, RECIPES))
def test_every_recipe_makes_a_plan_without_its_data(recipe, capsys, tmp_path, monkeypatch):
    from launcher import main as entry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing"))
    small = [
        f"--gin_param={binding}" for prefix, those in SMALL.items() if recipe.startswith(prefix) for binding in those
    ]
    code = entry.main(["launcher", f"--gin_file={recipe}", "--dry_run", *CHANGES, *small])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "parameters" in out and "task" in out
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_opens_with_its_purpose_hardware_expectation_and_what_is_often_overridden(recipe):
    from launcher.run.recipe import Recipe

    path = ROOT / "gin_configs" / recipe
    header = path.read_text().split("\n\n")[0]
    assert "# Hardware:" in header and "Expected:" in header
    offered = re.split(r", | and ", re.search(r"^# Often overridden: (.*)\.$", header, re.MULTILINE)[1])
    bound = {statement.name for statement in read_file(str(path), opened=[]) if isinstance(statement, Binding)}
    of_every_run = {f"train.{field.name}" for field in dataclasses.fields(Recipe)}
    assert offered and set(offered) <= bound | of_every_run
