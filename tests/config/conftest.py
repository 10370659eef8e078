"""A folder of one's own to write recipes and modules in."""

from __future__ import annotations

import sys

import pytest
from gin_objects import write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def module(folder, monkeypatch):
    """Makes modules of a user's importable for one test."""
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield lambda name, text: write(f"{name}.py", text)
    for name in set(sys.modules) - before:
        del sys.modules[name]
