"""The commands that a run names at its end are those that work on its task."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.data.images.image_data import image_data
from launcher.data.images.synthetic import SyntheticSource
from launcher.models.mlp import mlp
from launcher.modes import Request
from launcher.modes.commands import after_training
from launcher.tasks.image_classification import ImageClassification


@pytest.mark.parametrize(
    ("data", "given"),
    [
        ({"name": "digits"}, "--input=photos/*.jpg"),
        ({"source": SyntheticSource(num_classes=10), "image_size": 8}, "--input=inputs.npz"),
    ],
)
def test_images_that_no_file_holds_are_predicted_from_arrays(data, given):
    task = ImageClassification(data=image_data(**data), model=mlp)
    assert given in after_training(Request(gin_file=("a.gin",)), task)["predict"]


def test_a_command_names_the_interpreter_that_a_shell_would_not_find(monkeypatch, tmp_path):
    """Without `source .venv/bin/activate`, as after the quick start, `python` is another one or none."""
    task = ImageClassification(data=image_data(name="digits"), model=mlp)
    given = Request(gin_file=("a.gin",))
    place = Path(sys.executable)
    monkeypatch.setenv("PATH", str(place.parent))
    assert after_training(given, task)["export"].startswith("python -m launcher.main ")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(place.parent.parent)
    assert after_training(given, task)["export"].startswith(f"bin/{place.name} -m launcher.main ")
    monkeypatch.chdir(tmp_path)
    assert after_training(given, task)["export"].startswith(f"{place} -m launcher.main ")
