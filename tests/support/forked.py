"""`python -m MODULE ARGS` without its seconds of imports: forked from a process that has imported TensorFlow.

The server imports TensorFlow and Keras as a worker does, runs nothing of them, has one thread of Python, and forks a
process for each start: with its own session, environment, working directory, module path, streams, random numbers and
exit. It is no child of the test's process, and ends with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import selectors
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from places import PYTHONPATH, ROOT

_IMPORTED_AT_START = ("TF_", "XLA_", "KERAS_", "CUDA_", "PYTHON", "LD_", "OMP_")
"""What names of variables begin with that are read before a fork."""


def can_start(module: str, args: Sequence[str], changes: Mapping[str, str | None]) -> bool:
    """Whether a fork does what a fresh process would: what counts while TensorFlow is imported is as it is here."""
    early = {name: value for name, value in changes.items() if name.startswith(_IMPORTED_AT_START)}
    early.pop("TF_CONFIG", None)
    ours = early.pop("PYTHONPATH", PYTHONPATH) == PYTHONPATH
    # The doctor imports nothing itself; modules of tests that are no launchers import TensorFlow, too.
    trains = "--mode=doctor" not in args if module == "launcher.main" else not module.startswith("launcher.")
    return sys.platform == "linux" and trains and ours and not early


class Forked:
    """A process, with what `subprocess.Popen` calls pid, returncode, poll and wait."""

    def __init__(self, pid: int, status: socket.socket):
        self.pid, self.returncode = pid, None
        self._status = status

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self._status], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            told = self._status.recv(64)
            if not told:
                raise OSError(f"the server of process {self.pid} is gone")
            self.returncode = os.waitstatus_to_exitcode(int(told))
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Server:
    """Starts at the first use; ends when this process does or closes it."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None

    def start(
        self, module: str, args: Sequence[str], cwd: Path, environ: Mapping[str, str], stdout: IO, stderr: IO
    ) -> Forked:
        control = self._control or self._started(environ)
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # the process's id, then its end
        wanted = {"module": module, "args": args, "cwd": str(cwd), "environ": dict(environ)}
        content = json.dumps(wanted).encode()
        with theirs:
            streams = [theirs.fileno(), stdout.fileno(), stderr.fileno()]
            socket.send_fds(control, [len(content).to_bytes(4, "big")], streams)
            control.sendall(content)
        return Forked(int(status.recv(64)), status)

    def _started(self, environ: Mapping[str, str]) -> socket.socket:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
            nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run(command, env=dict(environ), pass_fds=[theirs.fileno()], check=True, cwd="/", **nothing)
        return self._control

    def close(self) -> None:
        if self._control is not None:
            self._control.close()


# ---------------------------------------------------------------------------------------------------------- the server


def _prepare() -> None:
    """Imports what every worker imports, all but the module that is run."""
    from launcher.machine.tensorflow_import import import_tensorflow

    import_tensorflow()
    for name in ("gin", "absl.flags", "launcher.modes.train"):
        importlib.import_module(name)
    sys.modules["launcher.run.loading"].import_builtins()
    gc.collect()
    gc.freeze()  # or each forked process copies these objects' pages when it collects garbage


def _serve(control: socket.socket) -> tuple[dict, list[int]] | None:
    """Forks until the control socket is closed; returns in a forked process, with what to run and its streams."""
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    pid, status = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with status, contextlib.suppress(OSError):
                        status.send(str(os.waitpid(pid, 0)[1]).encode())
                    continue
                head, given, *_ = socket.recv_fds(control, 4, 3)
                if not head:
                    return None
                theirs, *streams = given
                content = json.loads(_exactly(control, int.from_bytes(head, "big")))
                status = socket.socket(fileno=theirs)
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    for handle, (_, other) in running.items():
                        os.close(handle)
                        other.close()
                    status.close()
                    return content, streams
                for stream in streams:
                    os.close(stream)
                handle = os.pidfd_open(pid)
                running[handle] = (pid, status)
                selector.register(handle, selectors.EVENT_READ)
                status.send(str(pid).encode())


def _exactly(control: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        content += control.recv(size - len(content))
    return content


def _become(wanted: dict, streams: Sequence[int]) -> None:
    """Makes this process what `python -m` would: streams, environment, working directory, module path, seeds."""
    for source, target in zip((os.open(os.devnull, os.O_RDONLY), *streams), (0, 1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(wanted["environ"])
    os.chdir(wanted["cwd"])
    sys.path[:] = [wanted["cwd"], *wanted["environ"]["PYTHONPATH"].split(os.pathsep), *sys.path]
    sys.argv = [wanted["module"], *wanted["args"]]
    random.seed()
    sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    with socket.socket(fileno=int(sys.argv[1])) as _control:
        ours = {sys.path[0], str(ROOT), *os.environ["PYTHONPATH"].split(os.pathsep)}
        _prepare()
        sys.path[:] = [path for path in sys.path if path not in ours]
        _started = _serve(_control)
    if _started is not None:
        _become(*_started)
        runpy.run_module(_started[0]["module"], run_name="__main__", alter_sys=True)
