"""The guard: a process that ends a job's workers when the supervisor cannot, such as after a SIGKILL.

The supervisor holds the other end of this process's standard input, and when that closes for whatever reason, the
workers are killed, with all that they started. A line on it lists the workers' process groups.

A `child_process.helper`, so that it starts in milliseconds.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection

from launcher.machine.child_process import ignore_signals, kill_group

JOB = "LAUNCHER_JOB"

_ROUNDS = 50
_DEATH_SECONDS = 0.01  # a process that is killed is gone a moment later


def kill_marked(job: str, variable: str = JOB, *, but: Collection[int] = ()) -> None:
    """SIGKILLs all processes whose environment says, by `variable`, that they are of `job`, in whatever group they are.

    Linux only; elsewhere the groups are all there is to go by.
    """
    for _ in range(_ROUNDS):  # again, because one that is not yet dead may have started another
        processes = [process for process in marked(f"{variable}={job}".encode().__eq__) if process not in but]
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not processes:
            return
        time.sleep(_DEATH_SECONDS)


def marked(is_mark: Callable[[bytes], bool]) -> list[int]:
    """Other processes of this host, by an environment variable, "NAME=value", that says whose they are; Linux only."""
    processes = []
    with contextlib.suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if any(map(is_mark, file.read().split(b"\0"))):
                    processes.append(int(name))
    return [process for process in processes if process != os.getpid()]


def main(job: str, folder: str) -> None:
    """Waits for the supervisor's end; then leaves no process of `job`, and no `folder`."""
    ignore_signals()
    groups: list[int] = []
    for line in sys.stdin:
        groups = [int(word) for word in line.split()]
    for group in groups:
        kill_group(group)
    kill_marked(job)
    shutil.rmtree(folder, ignore_errors=True)
