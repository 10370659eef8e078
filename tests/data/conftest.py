"""Folders with real TFDS data sets, prepared or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_tfds import define_builders


@pytest.fixture(scope="session")
def tfds_builders() -> None:
    """Makes TFDS know launcher_test_photos, launcher_test_icons and launcher_test_sentences."""
    define_builders()


@pytest.fixture(scope="session")
def photos_dir(tfds_builders: None, made_once: Callable[..., Path]) -> Path:
    """A folder in which TFDS has prepared launcher_test_photos, in several files a split."""
    import tensorflow_datasets as tfds

    def prepare(folder: Path) -> None:
        tfds.disable_progress_bar()
        tfds.builder("launcher_test_photos", data_dir=folder).download_and_prepare(
            download_config=tfds.download.DownloadConfig(num_shards=7, try_download_gcs=False)
        )

    return made_once("photos", prepare)


@pytest.fixture
def photos(photos_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name by which recipes find the prepared photos."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(photos_dir))
    return "tfds:launcher_test_photos"


@pytest.fixture
def empty_data_dir(tfds_builders: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nothing is prepared."""
    folder = tmp_path / "data"
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    return folder
