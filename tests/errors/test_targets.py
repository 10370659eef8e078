"""What stands in a folder that pip installed packages to, for PYTHONPATH, is a library's and not the user's."""

from __future__ import annotations

import sys

from launcher.errors import user_code


def test_packages_that_pip_put_in_a_folder_of_its_own_are_libraries(tmp_path, monkeypatch):
    target, mine = tmp_path / "site", tmp_path / "mine"
    for folder in (target / "keras-3.15.1.dist-info", target / "keras", mine):
        folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(target), str(mine)])
    user_code._targets.cache_clear()
    found = [user_code.Place(str(path), 1, "").is_library for path in (target / "keras/layer.py", mine / "train.py")]
    user_code._targets.cache_clear()
    assert found == [True, False]
