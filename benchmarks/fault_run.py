"""One job under python -m launcher.launch, and what its files and processes tell; for benchmarks/faults.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
STEPS = 60
FLAGS = (
    f"--workers={WORKERS}",
    "--gin_file=resnet_cpu.gin",
    f"--gin_param=train.steps = {STEPS}",
    "--gin_param=train.global_batch_size = 64",
    "--gin_param=train.steps_per_loop = 1",
    "--gin_param=train.log_every = 1",
    "--gin_param=train.evaluate_every = 0",
    "--gin_param=train.checkpoint_every = 5",
    "--gin_param=resnet.depth = 8",
)
_DEADLINE_SECONDS = 900.0
_STEP = re.compile(r"^step (\d+)/", re.MULTILINE)
_RESTORED = re.compile(r"^restored step (\d+) ", re.MULTILINE)


class Run:
    """A job in a folder of its own; the same command may be given again."""

    def __init__(self, folder: Path, *flags: str, environ: dict[str, str] | None = None):
        self.folder, self.model_dir = folder, folder / "run"
        self._flags = (*FLAGS, *flags, f"--model_dir={self.model_dir}")
        paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        self._environ = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **os.environ, "PYTHONPATH": paths}
        self._environ.update(environ or {})
        self._marks: set[str] = set()
        self.output = folder / "output.txt"
        folder.mkdir(parents=True)

    def prepend_path(self, folder: Path) -> None:
        """Lets the job's processes import what is in `folder` first."""
        self._environ["PYTHONPATH"] = os.pathsep.join([str(folder), self._environ["PYTHONPATH"]])

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """The supervisor, in a session of its own."""
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launcher.launch", *self._flags, *flags],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=self._environ, cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        return self.process

    def wait(self) -> int:
        """Its exit code."""
        self.until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def until(self, condition: Callable[[], object], *, every: float = 0.005) -> bool:
        """Waits for a condition; False if the supervisor ended first."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not condition():
            if self.process.poll() is not None:
                return bool(condition())
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder.name}: nothing after {_DEADLINE_SECONDS:.0f} s, see {self.output}")
            time.sleep(every)
        return True

    # --------------------------------------------------------------------------------------------------------- files

    def log(self, attempt: int, rank: int = 0) -> str:
        path = self.model_dir / "logs" / f"attempt_{attempt}" / f"worker_{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def step(self, attempt: int) -> int:
        """The last step that the chief logged in an attempt; 0 before the first."""
        return max(map(int, _STEP.findall(self.log(attempt))), default=0)

    def restored(self, attempt: int) -> int:
        """The step that an attempt went on from; 0 for a new start."""
        return max(map(int, _RESTORED.findall(self.log(attempt))), default=0)

    def attempts(self) -> int:
        return len(list((self.model_dir / "logs").glob("attempt_*")))

    def error(self, attempt: int) -> dict[str, Any]:
        """What error.json says of an attempt; empty without one."""
        path = self.model_dir / "logs" / f"attempt_{attempt}" / "error.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def first_event(self, *, since: float) -> float | None:
        """When the first training step after `since` was logged; both in Unix seconds."""
        with contextlib.suppress(OSError):
            for line in (self.model_dir / "metrics.jsonl").read_text().splitlines():
                event = json.loads(line)
                if event["split"] == "train" and event["time"] > since:
                    return event["time"]
        return None

    # ----------------------------------------------------------------------------------------------------- processes

    def workers(self) -> dict[int, psutil.Process]:
        """The running workers by rank."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, KeyError, ValueError):
                if f"--model_dir={self.model_dir}" in process.cmdline() and "launcher.main" in process.cmdline():
                    environ = process.environ()
                    self._marks.add(environ["LAUNCHER_JOB"])
                    found[json.loads(environ["TF_CONFIG"])["task"]["index"]] = process
        return found

    def attempt_of(self, worker: psutil.Process) -> int:
        """The attempt that a worker belongs to."""
        return int(re.search(r"attempt_(\d+)_", worker.environ()["LAUNCHER_PROGRESS_FILE"])[1])

    def orphans(self) -> int:
        """Processes that carry the mark of a job that `workers` has seen, or the folder in their command line."""
        count = 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("LAUNCHER_JOB") in self._marks or any(
                    str(self.folder) in word for word in process.cmdline()
                )
                count += mine and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
        return count

    def end(self) -> None:
        """Leaves nothing running, whatever has happened."""
        with contextlib.suppress(ProcessLookupError, AttributeError):
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)


def difference(one: Path, other: Path) -> str:
    """How the arrays of two runs' last checkpoints differ; empty when they are equal bit for bit."""
    from launcher.checkpoints import CheckpointStore

    stores = [CheckpointStore(str(model_dir / "checkpoints")) for model_dir in (one, other)]
    steps = [store.latest() for store in stores]
    if steps != [STEPS, STEPS]:
        return f"last checkpoints {steps}"
    left, right = (store.read(STEPS) for store in stores)
    if left.keys() != right.keys():
        return "other arrays"
    differing = [name for name in left if left[name].tobytes() != right[name].tobytes()]
    return f"{len(differing)} of {len(left)} arrays differ" if differing else ""
