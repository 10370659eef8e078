"""When a job counts as stalled, and who is blamed."""

from __future__ import annotations

import faulthandler
import re
import threading

import pytest

from launcher.jobs.stalls import (
    AwakeClock,
    StallDetector,
    find_stuck,
    parse_stacks,
    place_outside_tensorflow,
)
from launcher.worker.progress import Report


def report(count, *, phase="train", step=0, at=0.0):
    return Report(step=step, phase=phase, count=count, time=0.0, monotonic=at)


def watch(timeout=None, start=600.0):
    return StallDetector(timeout_seconds=timeout, start_timeout_seconds=start)


def stalls_between(watched, newest, begin, low, high):
    """Whether it is quiet `low` seconds after the report of `begin`, and complains `high` seconds after it."""
    assert watched.observe(begin, newest) is None
    assert watched.observe(begin + low, newest) is None
    assert watched.observe(begin + high, newest) is not None


def test_the_limit_follows_the_pace_of_the_steps():
    watched = watch()
    for count in range(1, 9):
        watched.observe(10.0 * count, {0: report(count, at=10.0 * count)})
    stalls_between(watched, {0: report(9, at=90.0)}, 90.0, 199.0, 201.0)  # 20 times the median of 10 s


def test_fast_steps_still_have_a_minute():
    watched = watch()
    for count in range(1, 90, 10):  # nine in ten reports come and go between two looks
        watched.observe(0.01 * count, {0: report(count, at=0.01 * count)})
    stalls_between(watched, {0: report(91, at=1.0)}, 1.0, 59.0, 61.0)


@pytest.mark.parametrize("phase", ["startup", "compile", "evaluate", "checkpoint"])
def test_phases_of_unknown_length_have_ten_minutes(phase):
    watched = watch()
    for count in range(1, 9):
        watched.observe(0.1 * count, {0: report(count, at=0.1 * count)})
    stalls_between(watched, {0: report(9, phase=phase)}, 1.0, 599.0, 601.0)


def test_a_given_limit_holds_but_for_start_up_and_compilation():
    stalls_between(watch(5.0), {0: report(1)}, 0.0, 4.0, 6.0)
    stalls_between(watch(5.0), {0: report(1, phase="evaluate")}, 0.0, 4.0, 6.0)
    stalls_between(watch(5.0), {0: report(1, phase="compile")}, 0.0, 599.0, 601.0)
    stalls_between(watch(5.0, start=20.0), {0: report(1, phase="connect")}, 0.0, 19.0, 21.0)


def test_peers_may_wait_for_a_worker_that_compiles():
    newest = {0: report(1), 1: report(1, phase="compile")}
    stalls_between(watch(5.0), newest, 0.0, 599.0, 601.0)


def test_a_report_of_any_worker_is_progress():
    watched = watch(5.0)
    watched.observe(0.0, {0: report(1), 1: report(1)})
    assert watched.observe(4.0, {0: report(1), 1: report(2)}) is None
    assert watched.observe(8.0, {0: report(1), 1: report(2)}) is None
    assert watched.observe(9.1, {0: report(1), 1: report(2)}).silent == ()


def test_workers_that_never_report_are_named_after_the_start_timeout():
    watched = watch(start=7.0)
    newest = {0: report(1), 1: None, 2: None}
    assert watched.observe(6.9, newest) is None
    assert watched.observe(7.1, newest).silent == (1, 2)


def test_time_in_which_the_supervisor_slept_counts_as_a_second_at_most():
    clock = AwakeClock(100.0)
    assert clock.advance(100.5) == 0.5
    assert clock.advance(4000.0) == 1.5
    assert clock.advance(4000.25) == 1.75


def test_a_worker_that_stays_stopped_is_noticed_and_one_that_goes_on_is_not():
    frozen = watch()
    assert not any(frozen.has_frozen(now, [1]) for now in (0.0, 4.9))
    assert not frozen.has_frozen(5.0, [])
    assert not any(frozen.has_frozen(now, [0, 1]) for now in (6.0, 10.9))
    assert frozen.has_frozen(11.1, [1])


# ------------------------------------------------------------------------------------------------------------- stacks

WAITING = """\
Thread 0x00007f0a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0b (most recent call first):
  File "/venv/lib/python3.11/site-packages/tensorflow/python/eager/execute.py", line 53 in quick_execute
  File "/home/me/train.py", line 3 in <module>
"""
WAITING_FOR_ITS_OWN_THREADS = """\
Current thread 0x00007f0b (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/venv/lib/python3.11/site-packages/tensorflow/python/distribute/mirrored_run.py", line 286 in _call_for_each
  File "/home/me/train.py", line 3 in <module>
"""
READING_INSIDE_THE_GRAPH = """\
Thread 0x00007f0a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/venv/lib/python3.11/site-packages/tensorflow/python/autograph/impl/api.py", line 332 in converted_call
  File "/home/me/loader.py", line 12 in read
  File "/venv/lib/python3.11/site-packages/tensorflow/python/ops/script_ops.py", line 266 in __call__

Current thread 0x00007f0b (most recent call first):
  File "/venv/lib/python3.11/site-packages/tensorflow/python/eager/execute.py", line 53 in quick_execute
"""
READING = """\
2026-01-01 something else is printed
Current thread 0x00007f0b (most recent call first):
  File "/home/me/tensorflow/train.py", line 7 in read
  File "/home/me/tensorflow/train.py", line 3 in <module>
"""


def stacks(text):
    return parse_stacks(text.splitlines())


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (WAITING, "None"),
        (WAITING_FOR_ITS_OWN_THREADS, "None"),
        (READING_INSIDE_THE_GRAPH, "/home/me/loader.py:12 in read"),
        (READING, "/home/me/tensorflow/train.py:7 in read"),
        ("", "None"),
    ],
)
def test_a_stack_tells_waiting_in_tensorflow_from_being_kept_in_python(text, place):
    assert str(place_outside_tensorflow(stacks(text))) == place


def test_stacks_are_read_as_this_python_prints_them(tmp_path):
    entered, leave = threading.Event(), threading.Event()

    def stand_still():
        entered.set()
        leave.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    entered.wait()
    with open(tmp_path / "dump", "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    leave.set()
    thread.join()
    found = parse_stacks((tmp_path / "dump").read_text().splitlines())
    assert any(re.fullmatch(rf"{__file__}:\d+ in stand_still", frame) for thread in found for frame in thread)
    assert found[-1][0].endswith(" in test_stacks_are_read_as_this_python_prints_them")


@pytest.mark.parametrize(
    ("reports", "texts", "rank", "why"),
    [
        ({0: report(9, step=4), 1: report(8, step=3)}, {0: READING, 1: WAITING}, 1, "while others are at step 4"),
        ({0: report(9, at=1.0), 1: report(9, at=2.0)}, {0: WAITING, 1: READING}, 1, "train.py:7 in read"),
        ({0: report(9, at=2.0), 1: report(9, at=1.0)}, {0: WAITING, 1: WAITING}, 1, "at step 0"),
        ({0: report(9, at=2.0), 1: report(9, at=1.0)}, {}, 1, "in phase train"),
    ],
    ids=["behind", "in Python", "silent longest", "nobody answers"],
)
def test_the_stuck_worker_is_the_one_behind_or_busy_in_python_or_silent_longest(reports, texts, rank, why):
    found, reasons = find_stuck(reports, {number: stacks(text) for number, text in texts.items()})
    assert found == rank and why in reasons
