"""The chief leaves last: nobody is left behind without the coordination service, and nobody is waited for in vain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from places import PYTHONPATH

from launcher.errors import PeerError, Preempted
from launcher.machine import exit_barrier
from launcher.machine.cluster import Cluster

RECIPE = """\
# A worker that lags behind.
import lagging
train.task = @Lagging()
train.optimizer = @adam
adam.learning_rate = 0.01
train.steps = 4
train.steps_per_loop = 2
train.log_every = 2
train.global_batch_size = 8
"""
LISTENS = """\
import signal, socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
signal.pause()
"""


@pytest.fixture
def start_two(start_launcher, free_ports, tmp_path):
    """start_two(*flags): the chief and a worker that lags until the file "go" is there."""
    (tmp_path / "lagging.gin").write_text(RECIPE)

    def start(*flags):
        hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
        workers = []
        for index in range(2):
            config = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
            env = {"TF_CONFIG": json.dumps(config), "LAGGING_FOLDER": str(tmp_path)}
            env["PYTHONPATH"] = PYTHONPATH
            workers.append(start_launcher("--gin_file=lagging.gin", f"--model_dir={tmp_path}/run", *flags, env=env))
        return workers

    return start


def assert_end_together(workers, code, folder):
    """With their own exit codes, the chief after the other, of which it says that it waits for it."""
    chief, other = workers
    chief.wait_until(lambda: "worker 1 still runs; waiting" in chief.stderr)
    (folder / "go").touch()
    assert [worker.wait().returncode for worker in (other, chief)] == [code, code]
    for worker in workers:
        assert "Failed to send RPC" not in worker.stderr
    assert "leaves without it" not in chief.stderr


@pytest.mark.nightly  # so it does when it is preempted, below
@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_chief_leaves_after_a_worker_that_lags_behind(start_two, tmp_path, mode):
    workers = start_two("--mode=train")
    if mode == "eval":
        (tmp_path / "go").touch()
        assert [worker.wait().returncode for worker in workers] == [0, 0]
        (tmp_path / "go").unlink()
        workers = start_two("--mode=eval")
    assert_end_together(workers, 0, tmp_path)


@pytest.mark.nightly  # test_elastic_resume.py asks four workers to stop
@pytest.mark.heavy
def test_when_preempted_too(start_two, tmp_path):
    workers = start_two("--mode=train", "--gin_param=train.steps = 1000000")
    workers[1].wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    workers[1].process.send_signal(signal.SIGTERM)
    assert_end_together(workers, 42, tmp_path)


@pytest.fixture
def listener():
    """A process that listens as a worker does, and its address."""
    with subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True) as process:
        yield process, f"127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


def leave(index, *addresses, error=None):
    with exit_barrier.chief_last(Cluster(source="test", workers=("127.0.0.1:1", *addresses), index=index)):
        if error is not None:
            raise error


def test_a_worker_that_was_killed_is_not_waited_for(listener, capsys):
    process, address = listener
    process.kill()
    process.wait()
    leave(0, address)
    assert capsys.readouterr().err == ""


def test_a_worker_that_stays_is_waited_for_up_to_a_bound(listener, capsys, monkeypatch):
    monkeypatch.setattr(exit_barrier, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(exit_barrier, "_PREEMPTED_WAIT_SECONDS", 0.2)
    with pytest.raises(Preempted):
        leave(0, listener[1], error=Preempted("saved"))
    assert "worker 1 still runs after" in capsys.readouterr().err


def test_nobody_waits_for_the_chief_nor_after_a_failure_of_one_worker(listener, capsys):
    leave(1, listener[1])
    with pytest.raises(PeerError):
        leave(0, listener[1], error=PeerError("gone"))
    leave(0)
    assert capsys.readouterr().err == ""


ENVIRON = {**os.environ, "PYTHONPATH": PYTHONPATH}
ENDS = """\
import atexit, os, sys, time
from launcher.machine import exit_barrier

class Joins:
    def __del__(self):
        time.sleep(600)

def main():
    atexit.register(lambda: print("the last word"))
    exit_barrier.keep(Joins())
    print("done")
    return 42

exit_barrier.run_program(main)
"""


def test_a_program_ends_without_waiting_for_what_it_kept():
    """As an iterator over a tf.data pipeline, whose destructor joins a thread that sleeps."""
    ended = subprocess.run([sys.executable, "-c", ENDS], env=ENVIRON, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (42, "done\nthe last word\n", "")


def test_an_exception_of_a_program_is_reported_as_ever():
    raises = ENDS.replace("return 42", "raise SystemError('ours')").replace("sleep(600)", "sleep(0)")
    ended = subprocess.run([sys.executable, "-c", raises], env=ENVIRON, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert ended.stderr.endswith("SystemError: ours\n")


def test_a_notebook_keeps_nothing():
    assert exit_barrier.keep(iter([1])) is not None
    assert exit_barrier._kept is None
