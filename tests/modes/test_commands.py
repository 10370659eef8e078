"""The commands that a run names at its end are those that work on its task."""

from __future__ import annotations

import pytest

from launcher.data.images.image_data import image_data
from launcher.data.images.synthetic import SyntheticSource
from launcher.modes import Request
from launcher.modes.commands import after_training
from launcher.tasks.image_classification import ImageClassification
from models.mlp import mlp


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
