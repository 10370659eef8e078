"""What a worker tells its supervisor, and that it costs nobody anything when there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from launcher.worker import progress
from launcher.worker.progress import (
    ERROR_FILE,
    PROGRESS_FILE,
    Progress,
    make_files,
    read_error,
    read_report,
    record_error,
)


@pytest.fixture
def environ(tmp_path):
    return {PROGRESS_FILE: str(tmp_path / "progress"), ERROR_FILE: str(tmp_path / "error")}


def test_a_report_is_read_as_it_was_given(environ, tmp_path):
    assert read_report(tmp_path / "progress") is None
    told = Progress(environ)
    told.report(phase="startup")
    assert read_report(tmp_path / "progress").step is None
    told.report(phase="train", step=7)
    told.report(phase="checkpoint")
    report = read_report(tmp_path / "progress")
    assert (report.phase, report.step, report.count) == ("checkpoint", 7, 3)
    assert os.listdir(tmp_path) == ["progress"]


def test_without_a_supervisor_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Progress({}).report(phase="train", step=1)
    record_error({}, ValueError("x"), 70)
    progress.install_stack_dump({})
    assert os.listdir(tmp_path) == []


def test_reports_need_no_room_once_their_files_are_made(small_disk):
    environ = {PROGRESS_FILE: str(small_disk / "progress"), ERROR_FILE: str(small_disk / "error")}
    make_files(small_disk / "progress", small_disk / "error")
    assert read_report(small_disk / "progress") is None and read_error(small_disk / "error") is None
    told = Progress(environ)
    told.report(phase="train", step=1)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(9 << 20))
    told.report(phase="train", step=2)
    record_error(environ, ValueError("x" * 10_000), 70)
    assert read_report(small_disk / "progress").step == 2
    assert read_error(small_disk / "error").message == f"{'x' * 1000}\n[...]\n{'x' * 1000}"
    make_files(small_disk / "progress", small_disk / "error")  # for the next attempt, which finds it as full
    assert read_report(small_disk / "progress") is None and read_error(small_disk / "error") is None


def test_a_disk_without_room_for_them_does_not_fail_the_training_that_reports(small_disk):
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(9 << 20))
    environ = {PROGRESS_FILE: str(small_disk / "progress"), ERROR_FILE: str(small_disk / "error")}
    Progress(environ).report(phase="train", step=1)
    record_error(environ, ValueError("x"), 70)
    with pytest.raises(OSError, match="No space left"):
        make_files(small_disk / "progress", small_disk / "error")


def test_half_a_report_is_none(environ, tmp_path):
    told = Progress(environ)
    told.report(phase="train", step=1)
    older = (tmp_path / "progress").read_bytes()
    told.report(phase="train", step=2)
    newer = (tmp_path / "progress").read_bytes()
    assert len(older) == len(newer)
    for cut in range(0, len(newer), 7):
        (tmp_path / "progress").write_bytes(newer[:cut] + older[cut:])
        report = read_report(tmp_path / "progress")
        assert report is None or report.step in (1, 2)
        assert cut < 16 or report is None or newer[cut:] == older[cut:]


def test_the_first_error_is_kept_with_its_traceback(environ, tmp_path):
    try:
        raise KeyError("weight")
    except KeyError as error:
        record_error(environ, error, 70)
    record_error(environ, ValueError("while ending"), 75)
    found = read_error(tmp_path / "error")
    assert (found.type, found.message, found.exit_code) == ("KeyError", "'weight'", 70)
    assert 'raise KeyError("weight")' in found.traceback


@pytest.mark.parametrize("code", [0, 42])
def test_a_run_that_is_done_or_saved_has_no_error(environ, tmp_path, code):
    record_error(environ, SystemExit(), code)
    assert read_error(tmp_path / "error") is None


@pytest.mark.skipif(os.name != "posix", reason="SIGUSR1")
def test_stacks_come_out_of_a_process_that_never_returns_to_python_and_other_warnings_do_not_end_it(environ):
    program = (
        "import os, threading; from launcher.worker.progress import install_stack_dump\n"
        "def in_a_thread(): threading.Event().wait()\n"
        "install_stack_dump(os.environ)\n"
        "threading.Thread(target=in_a_thread, daemon=True).start()\n"
        "lock = threading.Lock(); lock.acquire()\n"
        "print('ready', flush=True); lock.acquire()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(number)
        seen = ""
        while 'File "<string>", line 6 in <module>' not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        assert "in in_a_thread" in seen
    finally:
        process.kill()
        process.communicate()


def test_it_is_imported_without_tensorflow():
    program = "import sys, launcher.worker.progress; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
