"""What a model_dir may be called."""

from __future__ import annotations

import pytest

from launcher.errors import UsageError
from launcher.model_dir import check_model_dir


@pytest.mark.parametrize("name", ["lr=[0.1]", "what?", "all*", "back\\slash"])
def test_a_path_whose_checkpoints_tensorflow_would_not_find_again_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="for a pattern and would not find it again"):
        check_model_dir(str(tmp_path / name))
    assert check_model_dir(str(tmp_path / "lr=(0.1)")) and not list(tmp_path.iterdir())
