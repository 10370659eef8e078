"""--deterministic: two runs of one command on one topology end with the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from places import SMALL_DIGITS

from launcher.checkpoints import CheckpointStore


@pytest.mark.heavy
def test_two_deterministic_runs_on_two_replicas_are_bitwise_equal(run_launcher, tmp_path):
    states = []
    for name in ("first", "second"):
        finished = run_launcher(
            f"--gin_file={SMALL_DIGITS}", "--mode=train", f"--model_dir={tmp_path}/{name}", "--replicas=2",
            "--deterministic", "--gin_param=train.steps = 10", "--gin_param=train.precision = 'mixed_float16'",
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr
        states.append(CheckpointStore(f"{tmp_path}/{name}/checkpoints").read(10))
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        np.testing.assert_array_equal(states[1][name], value, err_msg=name)
