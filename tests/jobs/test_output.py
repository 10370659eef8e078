"""What workers print reaches the console in whole lines and the log to the byte."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import re
from pathlib import Path

import pytest

from launcher.jobs import output, writer
from launcher.jobs.output import JobConsole, Tee


@pytest.fixture
def console():
    one = JobConsole()
    yield one
    one.close()


@pytest.fixture
def tee(tmp_path, console):
    return Tee(console, "[worker 3] ", functools.partial(console.log, tmp_path / "logs" / "worker_3.log"))


def test_lines_that_arrive_in_pieces_are_put_together(tee, console, tmp_path, capfd):
    for piece in (b"ste", b"p 1\nst", b"ep 2\n\nlast"):
        tee.feed(piece)
    assert tee.tail(9) == ["step 1", "step 2", ""]
    tee.close()
    console.close()
    assert capfd.readouterr().out == "[worker 3] step 1\n[worker 3] step 2\n[worker 3] \n[worker 3] last\n"
    assert (tmp_path / "logs" / "worker_3.log").read_bytes() == b"step 1\nstep 2\n\nlast"
    assert tee.tail(2) == ["", "last"]


def test_lines_since_a_moment_are_remembered(tee, capfd):
    tee.feed(b"a\nb\n")
    before = tee.num_lines
    assert tee.since(before) == []
    tee.feed(b"c\nd\n")
    assert tee.since(before) == ["c", "d"]


def test_an_endless_line_is_not_kept_back(tee, console, capfd):
    tee.feed(b"x" * 100_000)
    console.close()
    assert len(capfd.readouterr().out) > 65536


def test_bytes_that_are_no_text_pass(tee, console, tmp_path, capfdbinary):
    tee.feed(b"\xff\xfe\n")
    console.close()
    assert capfdbinary.readouterr().out == b"[worker 3] \xff\xfe\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full")
def test_a_full_disk_stops_the_log_and_not_the_console(tmp_path, capfd):
    (tmp_path / "worker_3.log").symlink_to("/dev/full")
    console = JobConsole()
    tee = Tee(console, "[worker 3] ", functools.partial(console.log, tmp_path / "worker_3.log"))
    tee.feed(b"one\n")
    tee.feed(b"two\n")
    tee.close()
    console.close()
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[worker")] == ["[worker 3] one", "[worker 3] two"]
    (said,) = [line for line in lines if line.startswith("[launcher]")]
    assert said.startswith("[launcher] no more is logged to ") and "No space left" in said


def test_a_log_that_takes_nothing_stops_nothing_and_is_said_to_be_incomplete(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(output, "_PATIENCE_SECONDS", 0.5)
    os.mkfifo(tmp_path / "worker_3.log")  # whoever opens it waits for a reader
    console = JobConsole()
    tee = Tee(console, "[worker 3] ", functools.partial(console.log, tmp_path / "worker_3.log"))
    for _ in range(100):
        tee.feed(b"x" * 65535 + b"\n")
        while console.is_behind:
            console.turn()
    tee.close()
    console.close()
    lines = capfd.readouterr().out.splitlines()
    assert sum(line.startswith("[worker 3] ") for line in lines) == 100
    assert any("worker_3.log for now; what does not fit is left out" in line for line in lines)
    assert lines[-1].startswith("[launcher] the logs are not complete: the disk did not take ")


def test_what_is_left_out_of_a_log_is_counted_there(tmp_path, console, eventually):
    path = tmp_path / "worker_3.log"
    os.mkfifo(path)
    for _ in range(100):
        console.log(path, b"x" * 65536)
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        read = reader.submit(path.read_bytes)

        def catches_up():
            console.turn()
            console.log(path, b"x")
            return not console._writers[None].missing_bytes

        eventually(catches_up)
        console.finish_logs()
        content = read.result()
    counted = re.search(rb"\n\[launcher\] (\d+) bytes are missing here", content)
    assert counted and content.count(b"x") + int(counted[1]) >= 100 * 65536


def test_a_log_that_has_grown_large_becomes_a_second_file_and_no_byte_is_lost(tmp_path, monkeypatch):
    """All that a worker has printed last is in the two; the one before them gives its place."""
    monkeypatch.setattr(writer, "_LARGEST_FILE_BYTES", 1000)
    path, files = os.fsencode(tmp_path / "logs" / "worker_0.log"), {}
    lines = [b"step %06d\n" % step for step in range(300)]
    for line in lines:
        writer._append(files, path, line)
    newest, older = Path(os.fsdecode(path)).read_bytes(), Path(os.fsdecode(path + b".1")).read_bytes()
    assert b"".join(lines).endswith(older + newest)
    assert 1000 < len(older) <= 1000 + len(lines[0]) and 0 < len(newest) <= len(older)
    assert sorted(one.name for one in (tmp_path / "logs").iterdir()) == ["worker_0.log", "worker_0.log.1"]
