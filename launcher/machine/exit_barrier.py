"""The end of a process: the chief leaves after all other workers, and nobody waits for TensorFlow's destructors.

TensorFlow's coordination service lives in worker 0's process. A worker that still runs when that process is gone prints
"Failed to send RPC to coordination service", and may end with another exit code than its own. So the chief ends when
the others have: each of them holds its gRPC port open until its process is gone, and a connection to it ends with it.
No part of TensorFlow is asked. That takes no private API, and a worker that was killed is not waited for.

The destructor of an iterator over a tf.data pipeline joins a thread that sleeps for up to a minute in TensorFlow 2.21
(`Model::OptimizeLoop`, which may miss that it is cancelled). A program's last iterator is therefore kept until the
process ends, which it does without destructors.
"""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from launcher.errors import Preempted, TrainingError
from launcher.machine import ports
from launcher.machine.cluster import Cluster

_WAIT_SECONDS = 30.0
# Whoever asked for the end may kill what is left soon, and the chief is to end with its own exit code before that.
_PREEMPTED_WAIT_SECONDS = 10.0
_CHIEF_SECONDS = 15.0
_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 2.0

_EXIT_UNWRITTEN = 120  # Python's own, for output that could not be flushed
_kept: list[Any] | None = None
_codes: list[int] | None = None


def run_program(main: Callable[[], int]) -> NoReturn:
    """Runs what this process is for and ends the process with its exit code, once all functions of `atexit` have run.

    Call it, or `register`, before TensorFlow is imported: of those functions, its own is the last.
    """
    global _kept
    _kept = []
    codes = register()
    codes.append(main())
    sys.exit(codes[0])


def register() -> list[int]:
    """Has this process end without destructors, once; returns the list that its exit code is to be put into."""
    global _codes
    if _codes is None:
        _codes = []
        atexit.register(_end_with, _codes)
    return _codes


def end_first() -> None:
    """Has the process end before the functions of `atexit` that are registered by now; one may await peers."""
    if _codes is not None:
        atexit.unregister(_end_with)
        atexit.register(_end_with, _codes)


def _end_with(codes: list[int]) -> None:
    if not codes:  # an exception, which Python reports
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        codes[0] = codes[0] or _EXIT_UNWRITTEN
    os._exit(codes[0])


def keep(last: Any) -> Any:
    """Returns what it is given, and keeps it until the process ends; what was kept before is let go.

    Without `run_program`, as in a notebook, nothing is kept.
    """
    if _kept is not None:
        _kept[:] = [last]
    return last


@contextlib.contextmanager
def chief_last(cluster: Cluster) -> Iterator[None]:
    """Has the chief wait for the end of all other workers where all of them leave the block for the same reason.

    It waits 30 s at most, or 10 s when preempted. All leave for the same reason when they are done, preempted, or
    cannot train any further. After any other exception the others may wait in a collective until this process is gone,
    so it is not delayed.
    """
    try:
        yield
    except (Preempted, TrainingError) as error:
        _wait_for_others(cluster, _PREEMPTED_WAIT_SECONDS if isinstance(error, Preempted) else _WAIT_SECONDS)
        raise
    _wait_for_others(cluster, _WAIT_SECONDS)


def await_chief(cluster: Cluster) -> None:
    """Returns on a worker other than the chief when the chief's process is gone, after 15 s at the latest."""
    if not cluster.is_chief:
        _has_ended(cluster.workers[0], time.monotonic() + _CHIEF_SECONDS)


def _wait_for_others(cluster: Cluster, seconds: float) -> None:
    if not cluster.is_chief:
        return
    began, told = time.monotonic(), False
    for index, address in enumerate(cluster.workers[1:], start=1):
        if not told and not _has_ended(address, began + _SILENT_SECONDS):
            told = True
            _say(index, f"; waiting up to {seconds:.0f} s for the others, worker 0 leaves last")
        if told and not _has_ended(address, began + seconds):
            _say(index, f" after {seconds:.0f} s; worker 0 leaves without it")
            return


def _has_ended(address: str, deadline: float) -> bool:
    """Whether nobody listens at `address` any more, or stops to before `deadline` on the monotonic clock."""
    left = max(0.01, deadline - time.monotonic())
    try:
        connection = ports.call(address, min(left, _CONNECT_SECONDS))
    except OSError:  # refused: it is gone; anything else: this host cannot tell
        return True
    with connection:
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            try:
                if not connection.recv(4096):  # a server of gRPC says a few words of its own first
                    return True
            except TimeoutError:
                return False
            except OSError:
                return True
    return False


def _say(index: int, what: str) -> None:
    sys.stderr.write(f"worker {index} still runs{what}\n")
    sys.stderr.flush()
