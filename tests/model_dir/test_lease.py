"""One writer a folder: who is refused, who takes over from whom, and what a holder that has lost its lease does."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from launcher.errors import PeerError, UsageError
from launcher.model_dir import lease, lease_file
from launcher.reporting import strict_json
from launcher.reporting.metrics_file import MetricsFile

pytestmark = pytest.mark.slow

HOLD = """
import errno, os, fcntl, sys
from launcher.model_dir import lease
from launcher.errors import LauncherError
if "no locks" in sys.argv:
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    fcntl.flock = flock
    lease._SETTLE_SECONDS = 0.5
sys.stdin.readline()
try:
    with lease.held(sys.argv[1], environ=os.environ, say=lambda text: print(text, flush=True)):
        if "with a forked child" in sys.argv and os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        print("holds", flush=True)
        sys.stdin.readline()
except LauncherError as error:
    print(f"refused with {error.exit_code}: {error}", flush=True)
"""


@pytest.fixture
def start():
    """start(folder, *options): a process that takes the lease of a folder when it is told to, and keeps it."""
    started: list[subprocess.Popen[str]] = []

    def begin(folder: Path, *options: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", HOLD, str(folder), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def go(process: subprocess.Popen[str]) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    go(process)
    return process.stdout.readline()


def take(folder: Path, **options: object) -> contextlib.AbstractContextManager[lease.Lease]:
    return lease.held(str(folder), **{"environ": {}, "say": lambda text: None, **options})


@pytest.fixture
def as_if_on_another_host(tmp_path):
    """Rewrites a lease as if its holder ran on a host whose locks nobody sees here."""

    def rewrite(path: Path, **changes: object) -> dict:
        record = dataclasses.asdict(lease_file.read_path(path))
        record.update(host="elsewhere", boot="another", processes="", **changes)
        with open(path, "r+b") as file:
            lease_file.put(file.fileno(), lease_file.Holder(**record))
        return json.loads(path.read_text())

    return rewrite


def test_a_second_process_is_refused_and_told_who_writes(start, tmp_path):
    first = start(tmp_path / "run")
    assert answer(first) == "holds\n"
    refused = answer(start(tmp_path / "run"))
    assert refused.startswith(f"refused with 64: --model_dir={tmp_path / 'run'}: another run writes to it: process ")
    assert f"process {first.pid} on " in refused and " since " in refused and "last heartbeat" in refused


def test_a_lease_is_released_with_the_folders_that_were_made_for_it(tmp_path):
    with take(tmp_path / "a/b"):
        assert (tmp_path / "a/b/lease.json").exists()
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="x"), take(tmp_path / "a/b"):
        (tmp_path / "a/b/metrics.jsonl").touch()
        raise ValueError("x")
    assert os.listdir(tmp_path / "a/b") == ["metrics.jsonl"]


@pytest.mark.parametrize("options", [(), ("no locks",), ("with a forked child",)])
def test_the_lease_of_a_killed_process_is_taken_over_at_once_and_that_is_said(start, tmp_path, options):
    first = start(tmp_path / "run", *options)
    assert answer(first) == "holds\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start(tmp_path / "run", *options)
    assert answer(second).startswith(f"took over {tmp_path / 'run/lease.json'} from process {first.pid} on ")
    assert second.stdout.readline() == "holds\n"


def test_a_process_that_is_stopped_keeps_its_lease(start, tmp_path):
    first = start(tmp_path / "run")
    assert answer(first) == "holds\n"
    first.send_signal(signal.SIGSTOP)
    assert answer(start(tmp_path / "run")).startswith("refused with 64")


@pytest.mark.parametrize("before", ["nothing", "a dead holder"])
@pytest.mark.parametrize("options", [(), pytest.param(("no locks",), marks=pytest.mark.nightly)])
def test_of_processes_that_start_at_the_same_instant_one_holds(start, tmp_path, before, options):
    folder = tmp_path / "run"
    if before == "a dead holder":
        dead = start(folder, *options)
        answer(dead)
        dead.kill()
        dead.wait()
    rivals = [start(folder, *options) for _ in range(6)]
    for rival in rivals:
        go(rival)
    answers = []
    for rival in rivals:
        line = rival.stdout.readline()
        answers.append(rival.stdout.readline() if line.startswith("took over") else line)
    assert sorted(line.split(" ")[0].strip() for line in answers) == ["holds", *["refused"] * 5]
    holder = rivals[answers.index("holds\n")]
    assert all(f"process {holder.pid} on " in line for line in answers if line != "holds\n")


def test_a_copy_of_a_folder_that_is_being_written_to_is_free(tmp_path):
    with take(tmp_path / "run"):
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy/lease.json").write_bytes((tmp_path / "run/lease.json").read_bytes())
        with take(tmp_path / "copy"):
            pass


def test_a_holder_elsewhere_whose_heart_beats_is_not_disturbed(tmp_path, monkeypatch, as_if_on_another_host):
    path = tmp_path / "lease.json"
    with take(tmp_path):
        content = path.read_bytes()
    path.write_bytes(content)
    as_if_on_another_host(path)
    said = []

    def say(text: str) -> None:
        said.append(text)
        os.utime(path)

    with pytest.raises(UsageError, match=r"another run writes to it: process .* on elsewhere"), take(tmp_path, say=say):
        pass
    assert "cannot be seen from here: waiting up to 60 s for a heartbeat" in said[0]
    # A clock that is ahead of ours, or behind, is no heartbeat.
    monkeypatch.setattr(lease, "_BEAT_SECONDS", 0.5)
    os.utime(path, (0, 0))
    with take(tmp_path, say=said.append):
        assert said[-1].startswith(f"took over {path} from process ")


def test_a_later_attempt_of_the_same_job_does_not_wait(tmp_path, as_if_on_another_host):
    path = tmp_path / "lease.json"
    worker = {lease.JOB: "the job"}
    with take(tmp_path, environ=worker):
        content = path.read_bytes()
    path.write_bytes(content)
    as_if_on_another_host(path)
    with take(tmp_path, environ=worker), pytest.raises(UsageError), take(tmp_path):
        pass


def test_the_workers_of_a_supervised_job_share_its_lease_and_others_do_not(start, tmp_path, monkeypatch):
    with take(tmp_path, supervised_job="the job"):
        assert answer(start(tmp_path)).startswith("refused with 64")
        monkeypatch.setenv(lease.JOB, "the job")
        first, second = start(tmp_path), start(tmp_path)
        assert (answer(first), answer(second)) == ("holds\n", "holds\n")
        go(first)
        first.wait()
        assert (tmp_path / "lease.json").exists()  # a worker that ends lets go of nothing
    go(second)
    second.wait()
    assert os.listdir(tmp_path) == []


def test_a_holder_that_was_passed_by_learns_of_it_and_leaves_the_others_lease(tmp_path, as_if_on_another_host):
    path = tmp_path / "lease.json"
    with take(tmp_path) as held:
        held.check()
        held.verify()
        record = as_if_on_another_host(path, since=0.0)
        with pytest.raises(
            lease.LeaseLostError, match=r"was taken over by process .* on elsewhere since 1970"
        ) as raised:
            held.verify()
        assert raised.value.exit_code == 70
        with pytest.raises(lease.LeaseLostError):
            held.check()
    assert json.loads(path.read_text()) == record


def remove(path: Path) -> None:
    path.unlink()


def flip_a_bit_of_the_host(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b'"host": "') + len(b'"host": "')] ^= 1
    path.write_bytes(content)


def overwrite(path: Path) -> None:
    path.write_bytes(b"\0" * 100)


@pytest.mark.parametrize("damage", [remove, flip_a_bit_of_the_host, overwrite])
def test_a_lease_that_was_damaged_under_its_holder_is_written_again(start, tmp_path, monkeypatch, damage):
    path = tmp_path / "lease.json"
    with take(tmp_path, supervised_job="the job") as held:
        mine = lease_file.read_path(path)
        monkeypatch.setenv(lease.JOB, "the job")
        with take(tmp_path, environ=os.environ) as shared:
            damage(path)
            shared.verify()  # the chief, about to write a checkpoint: nobody else is there
            held.verify()
            assert not held.ask() and not shared.ask()
        assert lease_file.read_path(path) == mine
        monkeypatch.delenv(lease.JOB)
        assert f"another run writes to it: supervisor {os.getpid()} on " in answer(start(tmp_path))
    assert os.listdir(tmp_path) == []


def test_whoever_takes_a_folder_whose_lease_was_removed_is_named_truly(start, tmp_path):
    with take(tmp_path) as held:
        (tmp_path / "lease.json").unlink()
        other = start(tmp_path)
        while answer(other).startswith("refused"):  # the holder was faster
            (tmp_path / "lease.json").unlink()
            other = start(tmp_path)
        assert held.ask()
        with pytest.raises(lease.LeaseLostError, match=f"was taken over by process {other.pid} on ") as raised:
            held.check()
        assert raised.value.exit_code == 70
    assert lease_file.read_path(tmp_path / "lease.json").process == other.pid


def leave_alone(path: Path) -> None:
    """Its folder is gone."""
    path.parent.rename(path.parent.with_name("elsewhere"))


@pytest.mark.parametrize(("lose", "age"), [(leave_alone, 0.0), (remove, 100.0), (overwrite, 100.0)])
def test_where_another_run_may_have_been_the_same_command_has_to_find_out(tmp_path, lose, age):
    path = tmp_path / "run" / "lease.json"
    with take(tmp_path / "run") as held:
        (path.parent / "metrics.jsonl").touch()
        lose(path)
        held._seen -= age  # as after a long suspension
        assert held.ask()
        with pytest.raises(lease.LeaseGoneError, match="Run the same command again") as raised:
            held.check()
        assert raised.value.exit_code == 75


def test_a_file_system_that_hangs_holds_up_nobody(tmp_path):
    """Whoever opens a FIFO to read waits for a writer, as on a file system that does not answer."""
    with take(tmp_path) as held:
        os.mkfifo(tmp_path / "fifo")
        os.replace(tmp_path / "fifo", tmp_path / "lease.json")
        assert not held.ask()
        held._seen -= 1000.0  # as after a long suspension
        held.check()
    with open(os.open(tmp_path / "lease.json", os.O_RDWR), "wb"):
        pass  # lets the thread go


def test_a_folder_that_takes_no_lease_is_a_message(tmp_path, small_disk):
    (small_disk / "run").mkdir()
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(9 << 20))
    full = r"lease.json cannot be written there: No space left on device. Make room"
    with pytest.raises(PeerError, match=full), take(small_disk / "run"):
        pass
    assert os.listdir(small_disk / "run") == []
    with pytest.raises(UsageError, match="choose another --model_dir"), take(Path("/proc/nothing")):
        pass


@pytest.mark.parametrize(
    ("function", "says"),
    [("rename", "cannot rename a folder or append .* a disk or on NFS"), ("fsync", "choose another --model_dir")],
)
def test_a_file_system_without_what_a_run_needs_is_told_before_anything_is_written(
    function, says, tmp_path, monkeypatch
):
    def refuse(*_, **__):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, function, refuse)
    with (
        pytest.raises(UsageError, match=says),
        lease.held(str(tmp_path / "a" / "run"), environ={}, say=print),
    ):
        pass
    assert [*tmp_path.iterdir()] == []


def test_a_group_can_write_to_what_one_of_it_has_made(tmp_path):
    before = os.umask(0o002)
    try:
        MetricsFile(str(tmp_path)).append("train", {"step": 1})
        strict_json.append(tmp_path / "attempts.jsonl", {})
        with lease.held(str(tmp_path), environ={}, say=print):
            assert [path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o666 != 0o664] == []
    finally:
        os.umask(before)


def test_the_record_says_what_people_ask(tmp_path):
    with take(tmp_path):
        record = json.loads((tmp_path / "lease.json").read_text())
    assert record["process"] == os.getpid()
    assert set(record) == {field.name for field in dataclasses.fields(lease.Holder)} | {"crc32"}
    assert record["locked"] is True


def test_it_is_imported_without_tensorflow():
    program = "import sys, launcher.model_dir.lease; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT).returncode == 0
