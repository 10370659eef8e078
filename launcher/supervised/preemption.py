"""Preemption: when asked to stop, finish the step, save, and end with exit code 42.

Schedulers send SIGTERM some time before they take a machine away (Slurm by `--signal=TERM@300`, Kubernetes at the start
of the grace period, Cloud TPU and GCE at preemption; for a word from GCE before that see `launcher.machine.gce`).
TensorFlow's own handler does nothing on one host.

Many send it to every process of a job at once (systemd, scancel, PBS, a terminal), so a worker gets it twice: from them
and from its supervisor, which passes it on. That is one request.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from launcher.errors import EXIT_PREEMPTED, Preempted
from launcher.supervised.progress import PROGRESS_FILE

# What comes within so many seconds of a signal repeats it; what comes later is from somebody who will not wait.
REPEAT_SECONDS = 3.0


class StopRequest:
    """Remembers the first SIGTERM or SIGINT.

    Under a supervisor nothing that comes after it counts: who will not wait tells the supervisor, which kills. Without
    one, a signal that comes `REPEAT_SECONDS` later ends the process at once.

    Python runs the handler between bytecodes, so a step on the device ends first.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._heard_at = 0.0
        self._noticed = False

    def __call__(self) -> bool:
        """Whether this process has been asked to stop."""
        return self._noticed or self._signal is not None

    def notice(self, reason: str) -> None:
        """Asks to stop for another reason than a signal, from any thread; the first signal still is the first."""
        self._noticed = True
        _say(f"{reason}: finishing the step and saving")

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Takes over both signals inside the block, if this is the main thread, which alone may."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        wakeup = signal.set_wakeup_fd(-1)  # of `before_training`
        try:
            yield
        except Preempted:
            self._noticed = True  # maybe by a peer first, and this worker's own signal is still to come
            raise
        finally:
            for number, handler in before.items():
                # What repeats a request that has been answered must not end the process with another code now.
                signal.signal(number, signal.SIG_IGN if self() else handler)
            signal.set_wakeup_fd(wakeup)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self._signal is None:
            self._signal, self._heard_at = number, now
            again = "" if _is_supervised() else f"; once more, after {REPEAT_SECONDS:g} s, to end at once"
            _say(f"{name}: finishing the step and saving{again}")
        elif not _is_supervised() and now - self._heard_at >= REPEAT_SECONDS:
            os._exit(128 + number)


@contextlib.contextmanager
def before_training() -> Iterator[None]:
    """Inside the block SIGTERM ends the process at once with 42, until a `StopRequest` is installed and after it.

    There is nothing to save, and the main thread may be inside TensorFlow for minutes, where no handler of Python's
    runs. So a thread waits for the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    source, target = os.pipe()
    os.set_blocking(target, False)
    handler = signal.signal(signal.SIGTERM, _leave)
    wakeup = signal.set_wakeup_fd(target, warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(source,), name="SIGTERM before training", daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        if signal.getsignal(signal.SIGTERM) is _leave:
            signal.signal(signal.SIGTERM, handler)
        os.close(target)
        listener.join()
        os.close(source)


def leave_at_once() -> None:
    """From here on SIGTERM ends this process with 42, unless it is ignored: nothing has been started yet."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def hear_again() -> None:
    """Gives SIGTERM back to `before_training`: TensorFlow takes it when it connects several workers, and ignores it."""
    if signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, _leave)


def ignore_repeats() -> None:
    """From here on, what asks this process to stop is ignored: it is about to end with an exit code of its own."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _listen(source: int) -> None:
    while numbers := os.read(source, 64):
        if signal.SIGTERM in numbers:
            _leave()


def _leave(number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
    _say("SIGTERM: not training, so there is nothing to save; the same command goes on from the last checkpoint")
    os._exit(EXIT_PREEMPTED)


def _is_supervised() -> bool:
    return bool(os.environ.get(PROGRESS_FILE))


def _say(text: str) -> None:
    # Not print: the signal may have come in the middle of one.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
