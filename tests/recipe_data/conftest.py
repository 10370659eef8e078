"""A data directory of the test's own, and what every test here reads batches with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where vocabularies and rows go."""
    folder = tmp_path / "data_dir"
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    return folder
