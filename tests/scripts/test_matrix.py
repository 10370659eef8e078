"""scripts/matrix.py: what it would run, and what it is asked for that there is not."""

from __future__ import annotations

import re
import subprocess
import sys

from places import ROOT


def matrix(*flags):
    command = [sys.executable, str(ROOT / "scripts/matrix.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_tries_the_oldest_versions_that_setup_allows(tmp_path):
    done = matrix("--only=oldest", "--dry_run", f"--folder={tmp_path}/folder")
    assert done.returncode == 0, done.stderr
    setup = (ROOT / "setup.py").read_text()
    (install,) = [line for line in done.stdout.splitlines() if "keras==" in line]
    for name in ("tensorflow", "keras"):
        (tried,) = re.findall(rf" {name}(?:-cpu)?==(\d+\.\d+)", install)
        assert {*re.findall(rf'"{name}>=(\d+\.\d+)', setup)} == {tried}
    assert "+ " in done.stdout and "tests/modes/test_fit.py" in done.stdout
    assert not (tmp_path / "folder").exists()


def test_an_environment_that_there_is_not_is_named():
    done = matrix("--only=oldset")
    assert done.returncode == 2
    assert "there is no environment 'oldset'; there are oldest" in done.stderr
