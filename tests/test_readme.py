"""What the README shows works as it stands there."""

from __future__ import annotations

import json
import re

from places import ROOT

README = (ROOT / "README.md").read_text()


def code_block(containing: str) -> str:
    blocks = re.findall(r"```\w*\n(.*?)```", README, re.DOTALL)
    return next(block for block in blocks if containing in block)


def test_bring_your_own_task_trains_on_two_replicas_as_shown(run_launcher, tmp_path):
    module, recipe = code_block("class Wine"), code_block("train.task = @Wine()")
    assert len(module.splitlines()) + len(recipe.splitlines()) < 50
    assert len(module.splitlines()) < 40
    (tmp_path / "wine.py").write_text(module)
    (tmp_path / "wine.gin").write_text(recipe)
    assert "python -m launcher.main --gin_file=wine.gin --replicas=2" in README
    finished = run_launcher("--gin_file=wine.gin", "--replicas=2")
    assert finished.returncode == 0, finished.stderr
    summary = json.loads((tmp_path / "runs/wine/summary.json").read_text())
    assert summary["num_replicas"] == 2
    assert summary["metrics"]["eval"]["accuracy"] > 0.9


def test_every_recipe_and_script_named_exists():
    for path in re.findall(r"scripts/\w+\.sh", README):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"^\| `(\w+\.gin)`", README, re.MULTILINE):
        assert (ROOT / "gin_configs" / name).exists(), name
    recipes = {path.name for path in (ROOT / "gin_configs").glob("*.gin")}
    assert recipes <= set(re.findall(r"\w+\.gin", README))
