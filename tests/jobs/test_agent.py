"""The agent of a host, as a real process at the other end of pipes: told what to do, and left alone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from places import ROOT
from running import is_running

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="process groups and signals"), pytest.mark.slow]

FOREVER = "import threading; threading.Event().wait()"


class Head:
    """The other end of an agent's pipes."""

    def __init__(self, process, mark):
        self.process = process
        self.mark = mark
        self.seen = []
        self._partial = b""

    def tell(self, **message):
        self.raw(json.dumps(message).encode() + b"\n")

    def raw(self, content):
        try:
            self.process.stdin.write(content)
        except BrokenPipeError:
            self.fail()

    def fail(self):
        pytest.fail(f"the agent ended with {self.process.wait(60)}: {self.process.stderr.read().decode()}")

    def hello(self, earlier=(), slots=2, **environ):
        self.tell(do="hello", mark=self.mark, earlier=list(earlier), slots=slots, environ=environ)
        return self.next("hello")

    def start(self, *programs, environ=()):
        workers = [
            {"rank": rank, "slot": slot, "argv": [sys.executable, "-c", program], "environ": dict(environ)}
            for slot, (rank, program) in enumerate(programs)
        ]
        self.tell(do="start", workers=workers)

    def next(self, kind, **wanted):
        """The next message of a kind, with certain contents; signs of life go both ways meanwhile."""
        return self.until(lambda message: message["is"] == kind and wanted.items() <= message.items())

    def until(self, condition):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for index, message in enumerate(self.seen):
                if condition(message):
                    return self.seen.pop(index)
            ready, _, _ = select.select([self.process.stdout], [], [], 0.5)
            if ready:
                content = os.read(self.process.stdout.fileno(), 65536)
                if not content:
                    self.fail()
                *lines, self._partial = (self._partial + content).split(b"\n")
                self.seen += [json.loads(line) for line in lines if line]
            with contextlib.suppress(BrokenPipeError):  # it has ended, and what it said last is still to be read
                self.process.stdin.write(b'{"do": "ping"}\n')
        return pytest.fail(f"nothing of the kind in {self.seen}")

    def output(self, rank, end):
        """What a worker prints up to `end`."""
        text = ""
        while end not in text:
            text += self.next("output", rank=rank)["text"]
        return text


@pytest.fixture
def connect(tmp_path):
    """connect(): starts an agent and returns the head that is connected to it."""
    heads = []

    def start():
        mark = f"{uuid.uuid4().hex}-0-{len(heads)}"  # what ends agents by their marks is not to meet other tests'
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "LAUNCHER_AGENT": mark}
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher.jobs.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environ,
            start_new_session=True,
        )
        heads.append(Head(process, mark))
        return heads[-1]

    yield start
    for head in heads:
        for process in psutil.process_iter(["environ"]):
            if str(tmp_path) == (process.info["environ"] or {}).get("TMPDIR"):
                process.kill()
        head.process.wait()
        for pipe in (head.process.stdin, head.process.stdout, head.process.stderr):
            pipe.close()


def test_it_offers_ports_that_are_free_for_each_attempt(connect):
    head = connect()
    assert len(set(head.hello(slots=3)["ports"])) == 3
    head.tell(do="clear")
    assert len(set(head.next("cleared")["ports"])) == 3


def test_workers_print_and_end(connect):
    head = connect()
    head.hello(PASSED="on")
    program = (
        "import os, sys\n"
        "sys.stdout.buffer.write(b'\\xff ' + (os.environ['PASSED'] + os.environ['OWN']).encode() + b' end')\n"
        "sys.exit(3)"
    )
    head.start((5, program), environ={"OWN": "er"})
    assert head.output(5, "end").encode("utf-8", "surrogateescape") == b"\xff oner end"
    assert 0 <= head.next("state", rank=5, exit_code=3)["ages"]["alive"] < 60


def test_reports_and_errors_come_with_their_ages(connect):
    head = connect()
    head.hello()
    program = (
        "import os, threading; from launcher.worker.progress import Progress, record_error\n"
        "Progress(os.environ).report(phase='train', step=7); record_error(os.environ, ValueError('bad'), 70)\n"
        + FOREVER
    )
    head.start((0, program))
    states = []
    while not any(state.get("error") for state in states) or not any(state.get("report") for state in states):
        states.append(head.next("state", rank=0))
    reported = next(state for state in states if state.get("report"))
    assert (reported["report"]["phase"], reported["report"]["step"]) == ("train", 7)
    assert 0 <= reported["ages"]["report"] < 60
    told = next(state for state in states if state.get("error"))
    assert (told["error"]["type"], told["error"]["message"], told["error"]["exit_code"]) == ("ValueError", "bad", 70)
    assert 0 <= told["ages"]["error"] < 60


def test_a_signal_reaches_one_worker_and_a_stop_is_seen(connect):
    head = connect()
    head.hello()
    head.start((0, f"print('up', flush=True); {FOREVER}"), (1, f"print('up', flush=True); {FOREVER}"))
    head.output(0, "up\n")
    head.tell(do="signal", rank=0, number=int(signal.SIGSTOP))
    head.next("state", rank=0, frozen=True)
    head.tell(do="signal", rank=0, number=int(signal.SIGTERM))
    head.tell(do="signal", rank=0, number=int(signal.SIGCONT))
    assert head.until(lambda message: message.get("exit_code") is not None)["exit_code"] == -signal.SIGTERM


WITH_CHILDREN = f"""
import subprocess, sys
sleep = [sys.executable, "-c", {FOREVER!r}]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print(*(child.pid for child in children), "pids", flush=True)
{FOREVER}
"""


def children_of(head, rank):
    numbers = [int(word) for word in head.output(rank, "pids\n").split()[:2]]
    return [*numbers, psutil.Process(numbers[0]).ppid()]


def test_clear_ends_workers_with_all_they_started_and_the_next_attempt_begins(connect):
    head = connect()
    head.hello()
    head.start((0, WITH_CHILDREN))
    numbers = children_of(head, 0)
    head.tell(do="clear")
    head.next("cleared")
    assert not any(map(is_running, numbers))
    head.start((0, "import os; print(os.environ['LAUNCHER_PROGRESS_FILE'])"))
    assert "worker_0." in head.output(0, "\n")


def leave(head):
    head.process.stdin.close()


def lose(head):
    head.process.kill()


def say_nonsense(head):
    head.raw(b"nonsense\n")


@pytest.mark.parametrize("end", [leave, lose, say_nonsense])
def test_nothing_is_left_when_the_head_is_gone_or_the_agent_or_their_understanding(connect, eventually, tmp_path, end):
    head = connect()
    head.hello()
    head.start((0, WITH_CHILDREN), (1, WITH_CHILDREN))
    numbers = children_of(head, 0) + children_of(head, 1)
    assert all(map(is_running, numbers)) and list(tmp_path.glob("launcher-*"))
    end(head)
    assert head.process.wait(60) != 0
    eventually(lambda: not any(map(is_running, numbers)) and not list(tmp_path.glob("launcher-*")))
    if end is say_nonsense:
        assert b"a line of 8 bytes is not understood" in head.process.stderr.read()


@pytest.mark.heavy
def test_an_agent_that_hears_nothing_for_a_while_ends_its_workers(connect, tmp_path):
    head = connect()
    head.hello()
    head.start((0, WITH_CHILDREN))
    numbers = children_of(head, 0)
    assert head.process.wait(60) == 75
    assert not any(map(is_running, numbers)) and not list(tmp_path.glob("launcher-*"))
    assert b"nothing was heard for 10 s" in head.process.stderr.read()


def test_close_ends_the_agent_and_leaves_nothing(connect, tmp_path):
    head = connect()
    head.hello()
    head.start((0, WITH_CHILDREN))
    numbers = children_of(head, 0)
    head.tell(do="close")
    assert head.process.wait(60) == 0
    assert not any(map(is_running, numbers)) and not list(tmp_path.glob("launcher-*"))


def test_signals_to_the_agent_do_not_end_it_and_workers_can_still_be_ended_by_them(connect):
    head = connect()
    head.hello()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        head.process.send_signal(number)
    head.start((0, f"print('up', flush=True); {FOREVER}"))
    head.output(0, "up\n")
    head.tell(do="signal", rank=0, number=int(signal.SIGTERM))
    assert head.next("state", rank=0, exit_code=-signal.SIGTERM)


def test_a_warning_to_every_task_has_the_agents_workers_save(connect):
    head = connect()
    head.hello()
    head.start((0, f"print('up', flush=True); {FOREVER}"))
    head.output(0, "up\n")
    head.process.send_signal(signal.SIGUSR1)
    assert head.next("state", rank=0, exit_code=-signal.SIGTERM)


def test_an_agent_that_could_not_end_its_workers_has_them_ended_by_the_next(connect, eventually, tmp_path):
    stopped = connect()
    stopped.hello()
    stopped.start((0, WITH_CHILDREN))
    numbers = [*children_of(stopped, 0), stopped.process.pid]
    stopped.process.send_signal(signal.SIGSTOP)
    stopped.process.stdin.close()
    fresh = connect()
    fresh.hello(earlier=[stopped.mark])
    eventually(lambda: not any(map(is_running, numbers)))  # a killed process has no environment before it is gone
    assert not list(tmp_path.glob(f"launcher-{stopped.mark}"))


def test_gpus_that_cannot_be_divided_are_refused(connect):
    head = connect()
    head.tell(do="hello", mark=head.mark, earlier=[], slots=2, environ={"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert "3 GPU(s)" in head.next("refused")["message"]
    assert head.process.wait(60) == 64


def test_each_worker_gets_its_share_of_the_gpus(connect):
    head = connect()
    head.hello(CUDA_VISIBLE_DEVICES="4,5,6,7")
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    head.start((2, show), (3, show))
    assert (head.output(2, "\n"), head.output(3, "\n")) == ("4,5\n", "6,7\n")


def test_a_program_that_cannot_be_started_is_told(connect):
    head = connect()
    head.hello()
    head.tell(do="start", workers=[{"rank": 0, "slot": 0, "argv": ["/no/such/python"], "environ": {}}])
    assert "No such file" in head.next("not_started")["why"]


def test_much_output_passes_while_the_head_is_busy(connect):
    head = connect()
    head.hello()
    head.start((0, "print('x' * 5_000_000 + 'end', flush=True)"))
    assert len(head.output(0, "end\n")) == 5_000_004
