"""Examples in the docstrings of what users import give the output that stands there."""

from __future__ import annotations

import doctest

import pytest

from launcher.data import pipeline
from launcher.optimizers import schedules


@pytest.mark.parametrize("module", [pipeline, schedules], ids=lambda module: module.__name__)
def test_an_example_gives_what_it_says(module):
    failed, tried = doctest.testmod(module)
    assert tried and not failed
