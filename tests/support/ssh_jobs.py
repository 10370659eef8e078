"""Jobs of fake workers on several hosts: the hosts' addresses, and what tests of such jobs wait for and look at."""

from __future__ import annotations

import pytest
import sshd
from cases import repeated_but
from launched import fault

A, B, C, D = "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"


def hanging(workers, **options):
    return [fault("read_next_batch", rank=rank, **options) for rank in range(workers)]


by_each = pytest.mark.parametrize("launch_on", ["ssh", "exec"], indirect=True)
# --backend=exec has another command to reach the agent of a host. What that does then is tried by ssh alone by default.
by_ssh = pytest.mark.parametrize("launch_on", repeated_but(["ssh"], ["ssh", "exec"]), indirect=True)


def assert_nothing_left(job, tmp_path):
    assert what_is_left(job, tmp_path) == []


def what_is_left(job, tmp_path):
    return [*job.running(), *sshd.agents(tmp_path), *tmp_path.glob("launcher-*")]


def wait_for_training(job, workers, attempt=1):
    wait_for_log(job, workers, "reading a batch", attempt)


def wait_for_log(job, workers, text, attempt=1):
    job.until(lambda: all(text in job.log(attempt, rank) for rank in range(workers)))
