"""What several files of tests of the step as a program train on."""

from __future__ import annotations

import pytest
import text_run


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(folder / "data"))
        text_run.write_corpus(folder)
        yield folder
