"""One trained run that the tests of this folder share."""

from __future__ import annotations

import pytest
from served import FLAGS, run_here


@pytest.fixture(scope="session")
def digits_run(made_once):
    """The folder of a run on two replicas, with averages and several checkpoints; not to be written to."""

    def train(folder):
        done = run_here(*FLAGS, "--replicas=2", f"--model_dir={folder}/run")
        assert done.returncode == 0, done.stderr
        (folder / "printed").write_text(done.stdout)

    return made_once("served_digits", train) / "run"


@pytest.fixture
def launched(digits_run):
    """launched(*flags): a mode of the shared run, in this process."""
    return lambda *flags: run_here(*FLAGS, f"--model_dir={digits_run}", *flags)
