"""A child process: in a session of its own, gone when its parent is gone, killed with all that it started.

A child learns that its parent is gone from the kernel (`die_with_parent`, Linux only) or from the end of its standard
input (`follow_parent`), of which the parent holds the other end: that also works after a SIGKILL of the parent.

Imports nothing but the standard library, for children that `helper` starts.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

try:
    import ctypes

    _LIBRARY = ctypes.CDLL(None)
except (ImportError, OSError):  # not everywhere
    _LIBRARY = None  # type: ignore[assignment]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ROOT = str(Path(__file__).parents[2])  # this very launcher, wherever the working directory is
_TURN_SECONDS = 0.02
_CHUNK_BYTES = 65536
_TAIL_LINES = 12
_REQUEST = "request.json"
_MOST_FILES = 2**20  # looked at where the limit is no int of C: on macOS it may be 2**63 - 1


# ---------------------------------------------------------------------------------------------------- in the parent


def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a child process in a session of its own: what a terminal sends to a group reaches this process alone.

    `options` are of `subprocess.Popen`; standard input is a pipe unless they say otherwise.
    """
    return subprocess.Popen(argv, **{"stdin": subprocess.PIPE, "bufsize": 0, "start_new_session": True, **options})


@contextlib.contextmanager
def running(argv: Sequence[str], *, log: Path, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child process inside the block, with all that it prints in `log`; afterwards nothing of it is left.

    Its program calls `follow_parent`; this process never writes to its standard input.
    """
    with log.open("wb") as output:
        process = start(argv, stdout=output, stderr=subprocess.STDOUT, env=dict(environ))
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


@contextlib.contextmanager
def asked(
    command: Sequence[str], request: Mapping[str, Any], *, environ: Mapping[str, str], seconds: float | None = None
) -> Iterator[tuple[Path, int | None, list[str]]]:
    """The end of a child process that was given a request as JSON, in a folder that is its last argument.

    Its program takes it by `request_in`.

    Yields:
      The folder, which goes with the block; the exit code, negative for the signal that ended the process, or None
      where its time was over and nothing is left of it; and the lines that it printed.
    """
    import tempfile  # late: a helper has no use for it

    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name, "log")
        (folder / _REQUEST).write_text(json.dumps(request), "utf-8")
        with running([*command, name], log=log, environ=environ) as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
        yield folder, code, log.read_text("utf-8", errors="replace").splitlines()


def helper(module: str, *arguments: str) -> list[str]:
    """The command of a child that starts in milliseconds: `main(*arguments)` of a module of this package.

    The module sees the standard library and launcher, and no installed package.
    """
    program = f"import sys; sys.path.append({_ROOT!r}); from {module} import main; main(*sys.argv[1:])"
    return [sys.executable, "-I", "-S", "-c", program, *arguments]


def ignore_signals() -> None:
    """Goes on whatever a terminal or a scheduler sends to all processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_end(returncode: int, lines: Sequence[str]) -> str:
    """The end of a child process, "ended with exit code 3" or "ended with signal SIGABRT", and its last words."""
    how = f"exit code {returncode}" if returncode >= 0 else f"signal {signal_name(-returncode)}"
    return f"ended with {how}{last_words(lines)}"


def last_words(lines: Sequence[str]) -> str:
    """The last lines that a child printed, indented, each behind a line break."""
    return "".join(f"\n  | {line}" for line in lines[-_TAIL_LINES:]) or ", without a word"


def run_forked(work: Callable[[], Any], *, seconds: float, turn: Callable[[], None] = lambda: None) -> Any:
    """Returns what `work` returns, done by a forked child: what waits for a dead disk there can be left behind.

    A thread would not do: a process with a thread that waits for a disk cannot end. What `work` changes in memory is
    lost, and JSON can hold what it returns. `turn` is called again and again meanwhile.

    Raises:
      TimeoutError: the time is over.
      OSError: no process can be started.
      RuntimeError: `work` raised; the message is its traceback.
    """
    if not hasattr(os, "fork"):
        return work()
    source, target = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none here holds what `work` could want
        try:
            child = os.fork()
        except OSError:
            os.close(source)
            os.close(target)
            raise
    if not child:
        _work(work, target)
    os.close(target)
    try:
        answer = _receive(source, time.monotonic() + seconds, turn)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)  # and not waited for
        raise
    finally:
        os.close(source)
    os.waitpid(child, 0)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]


def _receive(source: int, deadline: float, turn: Callable[[], None]) -> dict[str, Any]:
    content = b""
    while True:
        if select.select([source], [], [], _TURN_SECONDS)[0]:
            chunk = os.read(source, _CHUNK_BYTES)
            if not chunk and not content:
                return {"error": "the child process ended without an answer"}
            if not chunk:
                return dict(json.loads(content))
            content += chunk
        elif time.monotonic() > deadline:
            raise TimeoutError
        turn()


# ----------------------------------------------------------------------------------------------------- in the child


def follow_parent() -> None:
    """Ends this process as soon as its standard input ends, which it never writes to: the parent is gone then."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)  # which nobody is there to read

    threading.Thread(target=wait, daemon=True).start()


def request_in(folder: str) -> Any:
    """The request of `asked`, in the child; from now on it ends when its parent is gone."""
    follow_parent()
    return json.loads(Path(folder, _REQUEST).read_text("utf-8"))


def signal_at_parents_end(number: int) -> None:
    """Has the kernel send this process a signal when the thread that started it ends; does nothing but on Linux."""
    if sys.platform.startswith("linux") and _LIBRARY is not None:
        _LIBRARY.prctl(_PR_SET_PDEATHSIG, int(number))


def die_with_parent(processors: Sequence[int] = ()) -> Callable[[], None]:
    """For `preexec_fn`: what a child does before it runs its program, so that the kernel kills it with this process.

    It runs on `processors` alone, if there are any.
    """
    parent = os.getpid()

    def before_exec() -> None:
        signal_at_parents_end(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if processors:
            with contextlib.suppress(OSError):  # somebody has taken them away meanwhile
                os.sched_setaffinity(0, processors)

    return before_exec


def _work(work: Callable[[], Any], target: int) -> NoReturn:
    """The life of a forked child. It keeps nothing open that somebody else waits to see closed."""
    import resource

    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor, own in enumerate((nothing, nothing, nothing, target)):
            os.dup2(own, descriptor)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        os.closerange(4, most if 0 <= most <= _MOST_FILES else _MOST_FILES)
        try:
            answer = {"result": work()}
        except Exception:
            answer = {"error": traceback.format_exc()}
        with open(3, "wb") as file:
            file.write(json.dumps(answer).encode())
    finally:
        os._exit(0)
