"""Every recipe that comes along makes a plan where its data is not, and says what a person must know."""

from __future__ import annotations

import pytest
from places import ROOT

RECIPES = sorted(path.name for path in (ROOT / "gin_configs").glob("*.gin"))
# What takes the place of hardware that is not here, and of sizes that would take minutes to build on a CPU.
CHANGES = ("--strategy=one_device",)
SMALL = {
    "transformer": ("transformer.layers = 1",),
    "lm_": ("language_model.layers = 1",),
}


@pytest.mark.parametrize("recipe", RECIPES)
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
def test_every_recipe_opens_with_its_purpose_hardware_and_expectation(recipe):
    header = (ROOT / "gin_configs" / recipe).read_text().split("\n\n")[0]
    assert "# Hardware:" in header and "Expected:" in header
