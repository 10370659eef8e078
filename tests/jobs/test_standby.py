"""--standby: spare processes become the workers of the next attempt, and none of them outlives the job."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from cases import repeated_but
from launched import fault
from places import PYTHONPATH, SMALL_DIGITS
from running import is_running

from launcher import launch as entry
from launcher import main
from launcher.jobs.drill import files

pytestmark = [pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"), pytest.mark.slow]

READY = "--standby: 2 spare process(es) stand by"
PREPARED = """
import sys
from launcher import main
from tensorflow.python.eager import context
main.prepare(["launcher.main", "--gin_file=mlp_fashion.gin"])
print({"launcher.data.images.digits", "launcher.models.mlp"} <= set(sys.modules), context.context()._initialized)
"""
ENDLESS = [fault("read_next_batch", rank=rank, attempt=0) for rank in (0, 1)]


def standing(started):
    """Children of a supervisor that are spares, or were."""
    found = []
    for child in psutil.Process(started.process.pid).children():
        with contextlib.suppress(psutil.Error):  # others come and go
            found += [child.pid] * ("launcher.jobs.standby" in child.cmdline())
    return found


def spares(job):
    """The spares that wait: no worker of any attempt is one of them."""
    return sorted(set(standing(job.started)) - set(job.numbers("pids")))


@pytest.fixture
def standing_by(launch):
    """standing_by(*flags): a job whose workers train without an end, and the spares that stand by."""

    def start(*flags, **options):
        job = launch("--standby", *flags, **{"faults": ENDLESS, **options})
        job.until(lambda: READY in job.started.stdout)
        return job, spares(job)

    return start


def test_spares_become_the_workers_of_the_next_attempt_and_others_take_their_place(standing_by):
    job, first = standing_by("--max_restarts=3", show=["LAUNCHER_RESTARTED"])
    os.kill(job.numbers("pids")[0], signal.SIGKILL)
    job.until(lambda: len(job.numbers("pids")) == 4)
    assert sorted(job.numbers("pids")[2:]) == first
    job.until(lambda: all(job.log(2, rank).startswith("LAUNCHER_RESTARTED=1\n") for rank in (0, 1)))
    job.until(lambda: job.started.stdout.count(READY) == 2)
    second = spares(job)
    os.kill(first[1], signal.SIGKILL)
    job.until(lambda: len(job.numbers("pids")) == 6)
    assert sorted(job.numbers("pids")[4:]) == second


def test_a_spare_that_has_died_is_not_used(standing_by):
    job, (dead, left) = standing_by()
    os.kill(dead, signal.SIGKILL)
    os.kill(job.numbers("pids")[0], signal.SIGKILL)
    job.until(lambda: len(job.numbers("pids")) == 4)
    started = set(job.numbers("pids")[2:])
    assert dead not in started and left in started
    assert "[launcher] --standby: spare processes became worker(s) 0\n" in job.started.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_spares_end_with_the_supervisor(standing_by, eventually, number):
    job, waiting = standing_by()
    job.started.process.send_signal(number)
    job.started.process.wait()
    eventually(lambda: not job.running() and not any(map(is_running, waiting)))


def test_spares_end_with_a_job_that_is_preempted(standing_by):
    job, waiting = standing_by("--grace_period=20", faults=[], steps=100_000, on_sigterm="save")
    os.kill(job.numbers("pids")[0], signal.SIGTERM)
    assert job.wait().returncode == 42
    assert not any(map(is_running, waiting))


@pytest.mark.nightly  # a process for each recipe
def test_a_spare_has_what_recipes_name_and_no_device():
    done = subprocess.run([sys.executable, "-c", PREPARED], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


@pytest.mark.parametrize("backend", ["member", "ssh", "slurm", "ray", "kubernetes", "tpu_vm"])
def test_spares_are_for_workers_of_this_host(capsys, backend):
    assert entry.main(["launch", f"--backend={backend}", "--standby", "--gin_file=x.gin"]) == 64
    said = f"error: --standby=True needs --backend=local; this is --backend={backend}\n"
    assert capsys.readouterr().err == said


@pytest.mark.heavy
@pytest.mark.parametrize("workers", repeated_but([1], [1, 2]))
def test_a_training_goes_on_in_spares_and_ends_bitwise_as_one_that_nobody_touched(start_launcher, tmp_path, workers):
    go, recipe = tmp_path / "go", tmp_path / "held.gin"
    bindings = {
        "image_classification.data": "@slowed.HeldBatches()", "slowed.HeldBatches.data": "@image_data()",
        "slowed.HeldBatches.first": 8, "slowed.HeldBatches.file": f"'{go}'", "train.steps": 20,
        "train.steps_per_loop": 1, "train.checkpoint_every": 3, "train.evaluate_every": 0,
    }  # fmt: skip
    lines = [f"{name} = {value}" for name, value in bindings.items()]
    recipe.write_text("\n".join(["import slowed_digits", f"include '{SMALL_DIGITS}'", *lines]))
    given = (f"--gin_file={recipe}", "--mode=train")

    flags = (f"--workers={workers}", "--standby", *given, f"--model_dir={tmp_path / 'killed'}")
    killed = start_launcher(*flags, module="launcher.launch", env={"PYTHONPATH": PYTHONPATH}, fresh=True)
    ready = READY.replace("2 spare", f"{workers} spare")
    held = tmp_path / "go.held"
    killed.wait_until(lambda: ready in killed.stdout and held.exists(), 240)
    waiting = standing(killed)
    os.kill(int(held.read_text()), signal.SIGKILL)
    go.touch()
    assert killed.wait(240).returncode == 0, killed.stdout
    became = ", ".join(map(str, range(workers)))
    assert f"--standby: spare processes became worker(s) {became}\n" in killed.stdout
    assert re.search(r"worker \d was killed by SIGKILL", killed.stdout)
    assert not any(map(is_running, waiting))
    undisturbed = (f"--replicas={workers}", *given, f"--model_dir={tmp_path / 'undisturbed'}")
    assert main.main(["launcher", *undisturbed]) == 0
    assert files.all_steps(tmp_path / "killed")[-1] == 20
    assert files.difference(tmp_path / "undisturbed", tmp_path / "killed") == ""
