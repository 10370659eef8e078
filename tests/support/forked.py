"""`python -m MODULE ARGS` without its seconds of imports: forked from a process that has imported TensorFlow.

The server imports TensorFlow and Keras as a worker does, runs nothing of them, has one thread of Python, and forks a
process for each start: with its own session, environment, working directory, module path, streams, random numbers and
exit. It is no child of the test's process, and ends with it.

What such a process starts itself (a job its workers, a verification its topologies, a run its trials of memory) is
forked, too: beside each process waits its nursery, a fork as untouched as the server, which bears its children. They
are its children to the kernel as well: it is the subreaper of a process that forks one and ends. Tests that ask for a
fresh process get one that starts fresh ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
from places import PYTHONPATH, ROOT

_IMPORTED_AT_START = ("TF_", "XLA_", "KERAS_", "CUDA_", "PYTHON", "LD_", "OMP_")
"""What names of variables begin with that are read before a fork."""


def can_start(module: str, args: Sequence[str], changes: Mapping[str, str | None]) -> bool:
    """Whether a fork does what a fresh process would: what counts while TensorFlow is imported is as it is here."""
    early = _early(changes)
    ours = f"{early.pop('PYTHONPATH', PYTHONPATH)}{os.pathsep}".startswith(f"{PYTHONPATH}{os.pathsep}")
    # Of launchers, the supervisor of fake workers imports no TensorFlow; of modules of tests, each does.
    uses = "--worker_module=fake_worker" not in args if module in _START_OTHERS else not module.startswith("launcher.")
    return sys.platform == "linux" and uses and ours and not early


SUPERVISOR = "launcher.launch"


def can_supervise(module: str, args: Sequence[str], changes: Mapping[str, str | None]) -> bool:
    """Whether it is the supervisor of fake workers, of which no variable is read before a fork."""
    early = {name: value for name, value in _early(changes).items() if not name.startswith("CUDA_")}
    fakes = module == SUPERVISOR and "--worker_module=fake_worker" in args
    return sys.platform == "linux" and fakes and early in ({}, {"PYTHONPATH": PYTHONPATH})


class Forked:
    """A process, with what `subprocess.Popen` calls pid, returncode, poll, wait, send_signal and kill."""

    def __init__(self, pid: int, status: socket.socket):
        self.pid, self.returncode = pid, None
        self.stdin: IO[bytes] | None = None
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

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """Starts at the first use; ends when this process does or closes it.

    Args:
      modules: what it imports in place of TensorFlow.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._control: socket.socket | None = None

    def start(
        self,
        module: str,
        args: Sequence[str],
        cwd: Path,
        environ: Mapping[str, str],
        stdout: IO,
        stderr: IO,
        *,
        piped: bool = False,
    ) -> Forked:
        """Forks a process; `piped`: its standard input is a pipe, else it is empty."""
        control = self._control or self._started(environ)
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # the process's id, then its end
        wanted = {"module": module, "args": args, "cwd": str(cwd), "environ": dict(environ)}
        content = json.dumps(wanted).encode()
        source, own = os.pipe() if piped else (os.open(os.devnull, os.O_RDONLY), None)
        with theirs:
            streams = [theirs.fileno(), source, stdout.fileno(), stderr.fileno()]
            socket.send_fds(control, [len(content).to_bytes(4, "big")], streams)
            control.sendall(content)
        os.close(source)
        started = Forked(int(status.recv(64)), status)
        started.stdin = None if own is None else os.fdopen(own, "wb", 0)
        return started

    def _started(self, environ: Mapping[str, str]) -> socket.socket:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno()), *self._modules]
            nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            # Not what the first process alone is to find, such as a PATH that leads nowhere.
            # JAX reads its own at its import, which only servers of it have done before a fork.
            read = (*_IMPORTED_AT_START, "JAX_")
            early = {name: value for name, value in environ.items() if name.startswith(read)}
            subprocess.run(
                command, env={**os.environ, **early}, pass_fds=[theirs.fileno()], check=True, cwd="/", **nothing
            )
        return self._control

    def close(self) -> None:
        if self._control is not None:
            self._control.close()


_NURSERY = "nursery"


def children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    """Those of a process, without what is only here for it to fork them."""
    return without_nurseries(psutil.Process(pid).children(recursive=recursive))


def without_nurseries(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that are not only here to fork others; in its first moments a nursery has another name, as any fork."""
    return [one for one in processes if _name_of(one) != _NURSERY]


def _name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


class Child:
    """A child of this process, with what `launcher` asks of a `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None):
        self.pid, self.stdin, self.stdout, self.returncode = pid, stdin, stdout, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            handle = os.pidfd_open(self.pid)
            try:
                select.select([handle], [], [], timeout)
            finally:
                os.close(handle)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode


# ---------------------------------------------------------------------------------------------------------- the server


def _prepare(modules: Sequence[str]) -> None:
    """Imports these modules, or what every worker imports, all but the module that is run."""
    if not modules:
        from launcher.machine.tensorflow_import import import_tensorflow

        import_tensorflow()
        modules = ("gin", "absl.flags", "launcher.modes.train")
    for name in modules:
        importlib.import_module(name)
    if "launcher.run.loading" in sys.modules:
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
                head, given, *_ = socket.recv_fds(control, 4, 4)
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
                    control.close()
                    return content, streams
                for stream in streams:
                    os.close(stream)
                handle = os.pidfd_open(pid)
                running[handle] = (pid, status)
                selector.register(handle, selectors.EVENT_READ)
                status.send(str(pid).encode())


# ------------------------------------------------------------------------------------------------------- the nurseries

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_START_OTHERS = ("launcher.main", "launcher.launch")
_IMPORT_TENSORFLOW = (  # or start what does
    *_START_OTHERS, "launcher.verify.worker", "launcher.run.memory_trial", "launcher.doctor.tensorflow_child",
    "launcher.doctor.collective",
)  # fmt: skip


def _with_nursery(wanted: dict, streams: Sequence[int]) -> tuple[dict, Sequence[int], socket.socket | None]:
    """Forks a nursery, where one may be needed; returns here and in each process that it forks, with what to run."""
    while wanted["module"] in _START_OTHERS and "tensorflow" in sys.modules:
        parent = os.getpid()
        nursery, control = socket.socketpair()
        if os.fork():
            control.close()
            return wanted, streams, nursery
        nursery.close()
        for stream in streams:
            os.close(stream)
        wanted, streams = _bear(control, parent)
    return wanted, streams, None


def _bear(control: socket.socket, parent: int) -> tuple[dict, list[int]]:
    """Forks children of `parent` until it is gone; returns in a forked process, with what to run and its streams."""
    kept = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    name = _name(_NURSERY)
    while True:
        head, streams, *_ = socket.recv_fds(control, 4, 3)
        if not head:
            os._exit(0)
        content = json.loads(_exactly(control, int.from_bytes(head, "big")))
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                control.sendall(child.to_bytes(8, "big"))
                os._exit(0)
            control.close()
            _name(name)
            for number, handler in kept.items():
                signal.signal(number, handler)
            os.setsid()
            while os.getppid() not in (parent, 1):
                time.sleep(0.001)
            return content, streams
        for stream in streams:
            os.close(stream)
        os.waitpid(between, 0)
        control.sendall(b"1")


def _name(name: str) -> str:
    """Gives this process another name; returns the one it had."""
    path = Path("/proc/self/comm")
    before = path.read_text().strip()
    path.write_text(name)
    return before


def _start_by(nursery: socket.socket) -> None:
    """Has the launcher in this process start by its nursery what a fresh process would do no differently."""
    from launcher.machine import child_process

    fresh, early = child_process.start, _early(os.environ)

    def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes] | Child:
        environ = options.get("env", os.environ)
        known = argv[0] == sys.executable and argv[1] == "-m" and argv[2] in _IMPORT_TENSORFLOW
        if not known or _early(environ) != early or "pass_fds" in options:
            return fresh(argv, **options)
        _become_subreaper(True)
        try:
            return _born(nursery, argv, environ, options)
        finally:
            _become_subreaper(False)

    child_process.start = start


def _born(nursery: socket.socket, argv: Sequence[str], environ: Mapping[str, str], options: Mapping[str, Any]) -> Child:
    with contextlib.ExitStack() as theirs:

        def given(descriptor: int) -> int:
            theirs.callback(os.close, descriptor)
            return descriptor

        stdin = stdout = None
        if options.get("stdin", subprocess.PIPE) == subprocess.PIPE:
            source, own = os.pipe()
            stdin, source = os.fdopen(own, "wb", 0), given(source)
        else:
            source = given(os.open(os.devnull, os.O_RDONLY))
        output, errors = options["stdout"], None
        if output == subprocess.PIPE:
            own, target = os.pipe()
            stdout, target = os.fdopen(own, "rb", 0), given(target)
        elif output is None:
            target, errors = 1, 2
        else:
            target = output.fileno()
        wanted = {
            "module": argv[2],
            "args": argv[3:],
            "cwd": os.getcwd(),
            "environ": dict(environ),
            "parent": os.getpid(),
            "dies_with_parent": "preexec_fn" in options,
        }
        content = json.dumps(wanted).encode()
        socket.send_fds(nursery, [len(content).to_bytes(4, "big")], [source, target, errors or target])
        nursery.sendall(content)
        return Child(int.from_bytes(_exactly(nursery, 9)[:8], "big"), stdin, stdout)


def _join_namespaces(parent: int) -> None:
    """Enters those that the parent has entered since its nursery was forked: a job may have a network of its own."""
    for name, flag in (("user", 0x10000000), ("net", 0x40000000)):  # linux/sched.h
        with open(f"/proc/{parent}/ns/{name}") as theirs:
            if os.readlink(theirs.name) == os.readlink(f"/proc/self/ns/{name}"):
                continue
            library = ctypes.CDLL(None, use_errno=True)
            if library.setns(theirs.fileno(), flag):
                raise OSError(ctypes.get_errno(), f"cannot enter {theirs.name}")


def _become_subreaper(whether: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0)


def _early(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environ.items() if name.startswith(_IMPORTED_AT_START)}
    found.pop("TF_CONFIG", None)
    return found


def _exactly(control: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        content += control.recv(size - len(content)) or _gone()
    return content


def _gone() -> bytes:
    raise OSError("the process at the other end is gone")


def _become(wanted: dict, streams: Sequence[int]) -> None:
    """Makes this process what `python -m` would: streams, environment, working directory, module path, seeds."""
    for source, target in zip(streams, (0, 1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(wanted["environ"])
    os.chdir(wanted["cwd"])
    sys.path[:] = [wanted["cwd"], *wanted["environ"]["PYTHONPATH"].split(os.pathsep), *sys.path]
    sys.argv = [wanted["module"], *wanted["args"]]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    tempfile.tempdir = None
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.modules.pop(wanted["module"], None)
    if wanted["module"] in _START_OTHERS:
        signal.signal(signal.SIGTERM, sys.modules["launcher"].leave)
    if "parent" in wanted:
        if wanted["dies_with_parent"]:
            sys.modules["launcher.machine.child_process"].signal_at_parents_end(signal.SIGKILL)
        if os.getppid() != wanted["parent"]:
            os._exit(1)
        _join_namespaces(wanted["parent"])


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    with socket.socket(fileno=int(sys.argv[1])) as _control:
        ours = {sys.path[0], str(ROOT), *os.environ["PYTHONPATH"].split(os.pathsep)}
        _prepare(sys.argv[2:])
        sys.path[:] = [path for path in sys.path if path not in ours]
        _started = _serve(_control)
    if _started is not None:
        _wanted, _streams, _nursery = _with_nursery(*_started)
        _become(_wanted, _streams)
        if _nursery is not None:
            _start_by(_nursery)
        runpy.run_module(_wanted["module"], run_name="__main__", alter_sys=True)
