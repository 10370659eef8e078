"""What every test may rely on: devices, clean global state, and launchers as real processes that never outlive a test.

TensorFlow is configured when something imports it first, so tests that need none of it start at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import importlib.abc
import importlib.machinery
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import built
import forked
import hypothesis
import psutil
import pytest
from places import ROOT

NUM_LOGICAL_CPUS = 4

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # the same devices everywhere; set it to test on GPUs
os.environ["KERAS_BACKEND"] = "tensorflow"

# Tracing makes many objects and little garbage, of which each module's end frees what there is.
gc.set_threshold(100_000, 20, 20)

hypothesis.settings.register_profile("launcher", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("launcher")


# ------------------------------------------------------------------------------------------------ TensorFlow's devices


class _LogicalCpus(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports TensorFlow and at once gives it logical CPU devices, which is too late after the first operation."""

    def __init__(self) -> None:
        self._loader: importlib.abc.Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # TensorFlow asks it for the paths of its files
        self._loader.exec_module(module)
        cpu = module.config.list_physical_devices("CPU")[0]
        devices = [module.config.LogicalDeviceConfiguration() for _ in range(NUM_LOGICAL_CPUS)]
        module.config.set_logical_device_configuration(cpu, devices)


if "tensorflow" not in sys.modules:
    sys.meta_path.insert(0, _LogicalCpus())


# ------------------------------------------------------------------------------------------------------------- signals


def _keep_for_oneself(number: signal.Signals) -> None:
    """Under nohup or in a script's background signals are ignored, and processes inherit that, but no handler."""
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


_keep_for_oneself(signal.SIGHUP)
_keep_for_oneself(signal.SIGINT)


# -------------------------------------------------------------------------------------------------------- global state


def pytest_collection_finish() -> None:
    """What all test modules have imported stays: no collection of garbage need walk it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """Frees what a module leaves; what TensorFlow keeps for good is not walked again either."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Leaves no gin binding and no dtype policy behind for the next test."""
    yield
    if "launcher.config.gin_bindings" in sys.modules:
        sys.modules["launcher.config.gin_bindings"].reset()
    if "keras" in sys.modules:
        sys.modules["keras"].config.set_dtype_policy("float32")


# ---------------------------------------------------------------------------------- what all workers of a run make once


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """made_once(name, make): the folder of that name, which the first pytest-xdist worker that asks for it has filled
    by `make(folder)`; without `make`, an empty folder that all write to."""
    own = tmp_path_factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def once(name: str, make: Callable[[Path], object] = Path.mkdir) -> Path:
        folder, unfinished = root / name, root / f"{name}.unfinished"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                make(unfinished)
                unfinished.rename(folder)
        return folder

    return once


@pytest.fixture(scope="session")
def sdist(made_once: Callable[..., Path]) -> Path:
    """The source distribution, unpacked."""
    return made_once("built", built.build) / "source"


@pytest.fixture(scope="session")
def wheel(sdist: Path) -> Path:
    """The wheel that was built of it."""
    (wheel,) = sdist.parent.glob("*.whl")
    return wheel


# ------------------------------------------------------------------------------------------------ launchers, processes


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process that has ended: exit code (negative: the signal that ended it) and all it printed."""

    returncode: int
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True)
class Started:
    """A process under way, in a process group of its own, printing to files."""

    process: subprocess.Popen[bytes] | forked.Forked
    stdout_path: Path
    stderr_path: Path

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def wait(self, timeout: float = 240.0) -> Finished:
        """Waits until it ends; fails the test after `timeout` seconds."""
        try:
            returncode = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout:.0f} s\n{self.tail()}")
        return Finished(returncode, self.stdout, self.stderr)

    def wait_until(self, condition: Callable[[], object], timeout: float = 240.0) -> None:
        """Waits for a condition on what the process does; fails the test if it ends before, or after `timeout`."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None and not condition():
                pytest.fail(f"ended with {self.process.returncode} before the condition held\n{self.tail()}")
            if time.monotonic() > deadline:
                pytest.fail(f"condition not met after {timeout:.0f} s\n{self.tail()}")
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process and all it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def tail(self, lines: int = 40) -> str:
        texts = {"stdout": self.stdout, "stderr": self.stderr}
        return "\n".join("\n".join([f"--- {name}", *text.splitlines()[-lines:]]) for name, text in texts.items())

    def end(self) -> None:
        """Kills it, its group, and children that left the group."""
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
        self.send(signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait()


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This environment without anything that says who or where a worker is; None takes a variable away."""
    scheduler = (
        "SLURM_",
        "KUBERNETES_",
        "JOB_COMPLETION_",
        "TPU_",
        "GCE_",
        "MEGASCALE_",
        "PMI_",
        "OMPI_",
        "COV_",
        "PYTEST_",
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith(scheduler)}
    for name in ("TF_CONFIG", "XLA_FLAGS", "TF_XLA_FLAGS", "PYTHONWARNINGS"):
        environ.pop(name, None)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    environ["PYTHONUNBUFFERED"] = "1"
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return environ


@pytest.fixture(scope="session")
def fork_server() -> Iterator[forked.Server]:
    server = forked.Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def supervisor_server() -> Iterator[forked.Server]:
    server = forked.Server(forked.SUPERVISOR)
    yield server
    server.close()


@pytest.fixture
def start_launcher(
    tmp_path: Path, fork_server: forked.Server, supervisor_server: forked.Server
) -> Iterator[Callable[..., Started]]:
    """start_launcher(*args, env=None, cwd=None, module="launcher.main", fresh=False): starts `python -m MODULE ARGS` in
    the test's temporary folder and returns it `Started`; fresh where how it imports TensorFlow is what is tested, else
    forked after the imports (forked.py). Whatever still runs at the test's end is killed with all its children."""
    started: list[Started] = []

    def start(
        *args: str,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        module: str = "launcher.main",
        fresh: bool = False,
    ) -> Started:
        logs = tmp_path / ".processes"
        logs.mkdir(exist_ok=True)
        out, err = logs / f"{len(started)}.out", logs / f"{len(started)}.err"
        changes, folder = env or {}, cwd or tmp_path
        with out.open("wb") as stdout, err.open("wb") as stderr:
            server = fork_server if forked.can_start(module, args, changes) else supervisor_server
            if not fresh and (server is fork_server or forked.can_supervise(module, args, changes)):
                process = server.start(module, args, folder, _environment(changes), stdout, stderr)
            else:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, *args],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=folder,
                    env=_environment(changes),
                    start_new_session=True,
                )
        started.append(Started(process, out, err))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def run_launcher(start_launcher: Callable[..., Started]) -> Callable[..., Finished]:
    """run_launcher(*args, timeout=240, env=None, cwd=None, module="launcher.main"): the same, run to its end."""

    def run(*args: str, timeout: float = 240.0, **options: object) -> Finished:
        return start_launcher(*args, **options).wait(timeout)

    return run


@pytest.fixture
def run_workers(
    start_launcher: Callable[..., Started], free_ports: Callable[[int], list[int]]
) -> Callable[..., list[Finished]]:
    """run_workers(n, *args, timeout=240, env=None, cwd=None): n workers of one TF_CONFIG cluster on loopback, run to
    their end; outcomes in the order of rank. A list in `env` has one a worker. The deadline is one for all. A proxy
    that is not there stands in the environment, as in many clusters: gRPC must not look for workers behind it."""

    def run(num_workers: int, *args: str, timeout: float = 240.0, **options: object) -> list[Finished]:
        hosts = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
        env = options.pop("env", None) or {}
        envs = env if isinstance(env, list) else [env] * num_workers
        workers = []
        for index in range(num_workers):
            config = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
            place = {"http_proxy": "http://127.0.0.1:9", "TF_CONFIG": json.dumps(config)}
            workers.append(start_launcher(*args, env={**place, **envs[index]}, **options))
        deadline = time.monotonic() + timeout
        return [worker.wait(max(0.0, deadline - time.monotonic())) for worker in workers]

    return run


@pytest.fixture
def peak_growth() -> Callable[[], contextlib.AbstractContextManager[list[int]]]:
    """with peak_growth() as grown: afterwards, grown[0] is by how many bytes this process's memory was larger at most
    than at the beginning. Only for what is so large that the system gives it pages of its own."""

    def kibibytes(what: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
        return int(line.split()[1])

    @contextlib.contextmanager
    def measured() -> Iterator[list[int]]:
        grown: list[int] = []
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before = kibibytes("VmRSS")
        yield grown
        grown.append(1024 * (kibibytes("VmHWM") - before))

    return measured


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.call(mount, stderr=subprocess.DEVNULL) != 0:
        pytest.skip("a file system of 8 MiB can only be mounted by root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


_next_port = random.Random(os.getpid()).randrange(2000)


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """free_ports(n): n loopback ports nobody listens on. They lie below the range that the system gives to outgoing
    connections, a range of its own for every pytest-xdist worker, and none is given out twice."""

    def find(count: int) -> list[int]:
        global _next_port
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        ports: list[int] = []
        while len(ports) < count:
            port = 10000 + 2000 * (worker % 10) + _next_port
            _next_port = (_next_port + 1) % 2000
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        return ports

    return find


def pytest_terminal_summary(terminalreporter):
    """The table of `beside` (test_keras_defects.py): what Keras came to, next to ours."""
    rows = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in getattr(report, "user_properties", ())
        if name == "beside Keras" and report.when == "call"
    ]
    if rows:
        terminalreporter.section("Keras's own machinery beside ours")
        for row, theirs, ours in sorted(rows):
            terminalreporter.write_line(f"{row}\n    Keras: {theirs}\n    ours:  {ours}")
