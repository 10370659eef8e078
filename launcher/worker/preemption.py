"""Preemption: when asked to stop, finish the step, save, and end with exit code 42.

Whoever trains looks at the request between two loops on the device. What has no such moment soon, such as a compiler,
is answered for by a thread.

Schedulers send SIGTERM some time before they take a machine away (Slurm by `--signal=TERM@300`, Kubernetes at the start
of the grace period, Cloud TPU and GCE at preemption; for a word from GCE before that see `launcher.machine.gce`).
TensorFlow's own handler does nothing on one host.

Others warn by another signal (`--signal=USR1@90`), or none comes: a budget of time is kept (--stop_after), and Slurm's.

Many send it to every process of a job at once (systemd, scancel, PBS, a terminal), so a worker gets it twice: from them
and from its supervisor, which passes it on. That is one request.
"""

import contextlib
import ctypes
import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import launcher
from launcher.errors import EXIT_PREEMPTED, LauncherError, Preempted, UsageError, notebook
from launcher.worker import progress

# What comes within so many seconds of a signal repeats it; what comes later is from somebody who will not wait.
REPEAT_SECONDS = 3.0
_TURN_SECONDS = 0.25
NOTICES = "USR1,USR2,XCPU,HUP"
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MOST_MARGIN_SECONDS = 120.0
# By which a scheduler may warn, and this process itself when its time is up.
notices = {signal.SIGALRM, *(getattr(signal, f"SIG{name}") for name in NOTICES.split(","))}
_ends_with_run = False  # whether what ends a run may end this process: it is no notebook's, and no program's own


@dataclasses.dataclass
class StopRequest:
    """Remembers the first SIGTERM or SIGINT, from the moment it comes.

    Under a supervisor nothing that comes after it counts: who will not wait tells the supervisor, which kills. Without
    one, a signal that comes `REPEAT_SECONDS` later ends the process at once; a notebook's kernel outlives its cell, so
    there the stop button raises KeyboardInterrupt then.

    Args:
      unanswered: asked again and again from the request on, in a thread of its own and with the seconds since, until
        the block of `installed` ends: why this process may end with 42 now, whatever the main thread does; None for
        not yet.
      told: called once, in that thread, when the request has come.
    """

    unanswered: Callable[[float], str | None] = lambda seconds: None
    told: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._signal: int | None = None
        self._heard_at = 0.0
        self._noticed = False
        self._answered = threading.Event()

    def __call__(self) -> bool:
        """Whether this process has been asked to stop."""
        return self._noticed or self._signal is not None

    def notice(self, reason: str) -> None:
        """Asks to stop for another reason than a signal, from any thread; the first signal still is the first."""
        _say(f"{reason}: finishing the step and saving")
        is_first, self._noticed = not self(), True
        if is_first:
            self._await_answer()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Takes over both signals inside the block, if this is the main thread, which alone may."""
        try:
            if not _ends_with_run:
                configure(NOTICES, None)
            numbers = signal.SIGTERM, signal.SIGINT, *_own_notices()
            with _listening(self._heard, *numbers, ignored_after=self._is_repeated):
                try:
                    yield
                except Preempted as error:
                    self._noticed = True  # maybe by a peer first, and this worker's own signal is still to come
                    error.signal = self._signal
                    raise
        finally:
            self._answered.set()

    def _is_repeated(self, number: int) -> bool:
        """Whether a signal that comes now is to end nothing, as the process is about to end."""
        is_terminated = number == self._signal == signal.SIGTERM and notebook.shell() is None
        return self() and (_ends_with_run or is_terminated)

    def _heard(self, number: int) -> None:
        now, is_first = time.monotonic(), not self()
        if number in notices:
            self.notice(name(number))
            return
        if self._signal is None:
            self._signal, self._heard_at = number, now
            again = "" if _is_supervised() else f"; once more, after {REPEAT_SECONDS:g} s, to end at once"
            _say(f"{name(number)}: finishing the step and saving{again}")
        elif not _is_supervised() and now - self._heard_at >= REPEAT_SECONDS:
            if number != signal.SIGINT or _ends_with_run:
                os._exit(128 + number)
            main = ctypes.c_ulong(threading.main_thread().ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(KeyboardInterrupt))
        # Without a supervisor SIGINT is a person's, who may want to keep the process, such as a notebook's.
        if is_first and (number == signal.SIGTERM or _is_supervised()):
            self._await_answer()

    def _await_answer(self) -> None:
        threading.Thread(target=self._answer, name="request to stop", daemon=True).start()

    def _answer(self) -> None:
        self.told()
        began = time.monotonic()
        try:
            while (why := self.unanswered(time.monotonic() - began)) is None:
                if self._answered.wait(_TURN_SECONDS):
                    return
        except LauncherError as error:
            progress.record_error(os.environ, error, error.exit_code)
            _say(f"error: {error}")
            os._exit(error.exit_code)
        _say(why)
        os._exit(EXIT_PREEMPTED)


@contextlib.contextmanager
def before_training() -> Iterator[None]:
    """Inside the block SIGTERM ends the process at once with 42, until a `StopRequest` is installed and after it.

    There is nothing to save. The process is the launcher's, and ends with the run.
    """
    global _ends_with_run
    with _listening(launcher.leave, signal.SIGTERM, *_own_notices()):
        _ends_with_run, before = True, _ends_with_run
        try:
            yield
        finally:
            _ends_with_run = before


@contextlib.contextmanager
def _listening(
    heard: Callable[[int], None], *numbers: int, ignored_after: Callable[[int], bool] = lambda number: False
) -> Iterator[None]:
    """Calls `heard` for each of the signals, if this is the main thread, which alone may take them over.

    In another thread: the main thread may be inside TensorFlow for minutes, where no handler of Python's runs. What
    repeats a request that has been answered must not end the process with another code: `ignored_after` the block,
    except in a notebook's kernel, which goes on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    source, target = os.pipe()
    os.set_blocking(target, False)
    before = {number: signal.signal(number, _wake) for number in numbers}
    wakeup = signal.set_wakeup_fd(target, warn_on_full_buffer=False)

    def listen() -> None:
        while heard_numbers := os.read(source, 64):
            for number in filter(numbers.__contains__, heard_numbers):
                heard(number)

    def hand_back(handlers: Mapping[int, Any]) -> None:
        for number in numbers:
            if signal.getsignal(number) is _wake:
                signal.signal(number, signal.SIG_IGN if ignored_after(number) else handlers[number])

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    try:
        yield
    finally:
        hand_back(dict.fromkeys(numbers, _wake))  # what repeats a request is no new one to a block around this one
        signal.set_wakeup_fd(wakeup)
        os.close(target)
        listener.join()
        os.close(source)
        hand_back(before)


def _wake(number: int, frame: FrameType | None) -> None:
    """Without a handler of Python's no signal would come to `_listening`."""


# A forked child shares the pipe: its signals are not its parent's.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def configure(signals: str, stop_after: str | None) -> None:
    """Takes --notice_signals and --stop_after, else the end of a Slurm job; a supervisor hears for its workers.

    Of the time that is left to a Slurm job, a tenth is for saving, two minutes at most.

    Raises:
      UsageError: one is no such thing.
    """
    global notices
    stop_after = stop_after or ""
    names = signals.replace("SIG", "").split(",") if signals else []
    if unknown := {*names} - {*NOTICES.split(",")}:
        raise UsageError(f"--notice_signals={signals}: {min(unknown)!r} is none of {NOTICES}")
    if not re.fullmatch(r"(\d+[dhms])*", stop_after):
        raise UsageError(f"--stop_after={stop_after}: write days, hours, minutes and seconds, such as 3h50m or 90s")
    notices = {signal.SIGALRM, *(getattr(signal, f"SIG{name}") for name in names)}
    seconds = float(sum(int(n) * _SECONDS[unit] for n, unit in re.findall(r"(\d+)(.)", stop_after)))
    if not stop_after and (end := os.environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
        left = int(end) - time.time()
        seconds = left - min(left / 10, _MOST_MARGIN_SECONDS)
    if seconds > 0 and not _is_supervised() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, launcher.leave)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def name(number: int) -> str:
    """The name of a signal, for people."""
    return "the time is up" if number == signal.SIGALRM else signal.Signals(number).name


def _own_notices() -> list[int]:
    """Signals that give notice and that nobody else has taken.

    Under a supervisor, which hears them, they print stacks and rehearse faults.
    """
    free = signal.SIG_DFL, launcher.leave, _wake
    return [number for number in notices if not _is_supervised() and signal.getsignal(number) in free]


def hear_again() -> None:
    """Gives SIGTERM back to `before_training`: TensorFlow takes it when it connects several workers, and ignores it."""
    if signal.getsignal(signal.SIGTERM) is _wake:
        signal.signal(signal.SIGTERM, _wake)


def ignore_repeats() -> None:
    """From here on, what asks this process to stop is ignored: it is about to end with an exit code of its own."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *notices):
        signal.signal(number, signal.SIG_IGN)


def _is_supervised() -> bool:
    return bool(os.environ.get(progress.PROGRESS_FILE))


def _say(text: str) -> None:
    # Not print: the signal may have come in the middle of one.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
