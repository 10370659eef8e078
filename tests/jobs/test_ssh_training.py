"""Training over ssh is the training of this host: the same weights, bit for bit, from the same command elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import sshd
from places import SMALL_DIGITS

from launcher.checkpoints import CheckpointStore

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(bool(sshd.MISSING), reason=sshd.MISSING)]

A, B = "127.0.0.1", "127.0.0.2"
STEPS = 6
FLAGS = (
    f"--gin_file={SMALL_DIGITS}",
    f"--gin_param=train.steps = {STEPS}",
    "--mode=train",
    "--deterministic",
)


@pytest.mark.nightly
def test_two_hosts_train_to_the_weights_of_two_local_workers(run_launcher, hosts, tmp_path):
    local = run_launcher("--workers=2", *FLAGS, f"--model_dir={tmp_path}/local", module="launcher.launch")
    assert local.returncode == 0, local.stdout
    servers = hosts(A, B)
    flags = ("--backend=ssh", f"--hosts={A},{B}", f"--ssh_command={servers.command()}", "--env=CUDA_VISIBLE_DEVICES")
    remote = run_launcher(*flags, *FLAGS, f"--model_dir={tmp_path}/remote", module="launcher.launch")
    assert remote.returncode == 0, remote.stdout
    expected = CheckpointStore(f"{tmp_path}/local/checkpoints").read(STEPS)
    found = CheckpointStore(f"{tmp_path}/remote/checkpoints").read(STEPS)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
