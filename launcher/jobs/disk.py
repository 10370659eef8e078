"""Work on a job's folder, done by a child process: what waits for a dead disk can be left behind, and waits for nobody.

A thread would not do: a process with a thread that waits for a disk cannot end.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

_TURN_SECONDS = 0.02
_CHUNK_BYTES = 65536


class DiskTimeout(Exception):
    """The disk has not answered in time."""


def within(seconds: float, work: Callable[[], Any], turn: Callable[[], None]) -> Any:
    """Returns what `work` returns, which JSON can hold.

    Args:
      seconds: the time that it has.
      work: done in a copy of this process; what it changes in memory is lost.
      turn: called again and again meanwhile.

    Raises:
      DiskTimeout: the time is over.
      RuntimeError: `work` raised what it should not; the message is its traceback.
    """
    if not hasattr(os, "fork"):
        return work()
    source, target = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none here holds what `work` could want
        child = os.fork()
    if not child:
        _work(work, target)
    os.close(target)
    try:
        answer = _receive(source, time.monotonic() + seconds, turn)
    except DiskTimeout:
        os.kill(child, signal.SIGKILL)  # and not waited for
        raise
    finally:
        os.close(source)
    os.waitpid(child, 0)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]


def _work(work: Callable[[], Any], target: int) -> NoReturn:
    """The child's life. It keeps nothing open that somebody else waits to see closed."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor, own in enumerate((nothing, nothing, nothing, target)):
            os.dup2(own, descriptor)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        try:
            answer = {"result": work()}
        except Exception:
            answer = {"error": traceback.format_exc()}
        with open(3, "wb") as file:
            file.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _receive(source: int, deadline: float, turn: Callable[[], None]) -> dict[str, Any]:
    content = b""
    while True:
        if select.select([source], [], [], _TURN_SECONDS)[0]:
            chunk = os.read(source, _CHUNK_BYTES)
            if not chunk:
                return dict(json.loads(content))
            content += chunk
        elif time.monotonic() > deadline:
            raise DiskTimeout
        turn()
