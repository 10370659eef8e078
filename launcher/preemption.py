"""Being asked to stop: finish the step, save, and end with exit code 42.

Schedulers send SIGTERM some time before they take a machine away (Slurm by `--signal=TERM@300`, Kubernetes at the start
of the grace period, Cloud TPU and GCE at preemption; for a word from GCE before that see `launcher.gce`). TensorFlow's
own handler does nothing on one host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Remembers the first SIGTERM or SIGINT; the second ends the process at once.

    Python runs the handler between bytecodes, so a step on the device ends first.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
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
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(128 + number)
        self._signal = number
        name = signal.Signals(number).name
        _say(f"{name}: finishing the step and saving; once more to end at once")


def _say(text: str) -> None:
    # Not print: the signal may have come in the middle of one.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
