"""Processes of one topology: started together, watched against a deadline, and always ended."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import EXIT_USAGE
from launcher.machine import child_process, nvidia
from launcher.machine.cluster import tf_config
from launcher.machine.ports import free_ports
from launcher.verify.settings import Topology

_POLL_SECONDS = 0.05


class Refused(Exception):
    """The recipe cannot be built on this topology; the text is the reason."""

    outcome = "not applicable"


class Died(Exception):
    """A process ended badly or not in time; the text says how, with the last lines it printed."""

    outcome = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Task of the processes of one topology: the recipe, as the flags of these names gave it, and where.

    Attributes:
      folder: where `record_path` and `refusal_path` are.
      control: whether this is the control; see `launcher.verify.control`.
    """

    gin_files: tuple[str, ...]
    gin_params: tuple[str, ...]
    seed: int
    deterministic: bool
    topology: Topology
    steps: int
    folder: str
    control: bool = False

    @property
    def path(self) -> Path:
        return Path(self.folder, "job.json")

    def record_path(self, rank: int) -> Path:
        """File in which worker `rank` leaves its record."""
        return Path(self.folder, f"record-{rank}.npz")

    def refusal_path(self, rank: int) -> Path:
        """File in which worker `rank` leaves why it refuses the topology."""
        return Path(self.folder, f"refused-{rank}.txt")

    def log_path(self, rank: int) -> Path:
        return Path(self.folder, f"worker-{rank}.log")


def read_job(path: str) -> TrainingJob:
    """The job that `run` wrote."""
    content = json.loads(Path(path).read_text("utf-8"))
    return TrainingJob(**{**content, "topology": Topology(**content["topology"])})


def run(job: TrainingJob, *, num_gpus: int, timeout_seconds: float) -> list[Path]:
    """Runs a topology's processes to their end, on so many GPUs of this machine or, for 0, on logical CPU devices.

    Returns:
      The record of each worker in the order of rank.

    Raises:
      Refused: the recipe cannot be built so, or there are too few GPUs.
      Died: one ended badly, or they did not end in time.
    """
    job.path.write_text(json.dumps(dataclasses.asdict(job)), "utf-8")
    command = [sys.executable, "-m", "launcher.verify.worker", str(job.path)]
    with contextlib.ExitStack() as all_running:
        processes = [
            all_running.enter_context(child_process.running(command, log=job.log_path(rank), environ=environ))
            for rank, environ in enumerate(environments(job.topology, os.environ, num_gpus=num_gpus))
        ]
        _wait(job, processes, timeout_seconds)
    return [job.record_path(rank) for rank in range(job.topology.workers)]


def environments(topology: Topology, environ: Mapping[str, str], *, num_gpus: int) -> list[dict[str, str]]:
    """The environment of each worker: nothing of a cluster that this process may belong to, and a GPU of its own."""
    base = {name: value for name, value in environ.items() if name != "TF_CONFIG"}
    if not num_gpus:
        base[nvidia.VARIABLE] = "-1"
    elif num_gpus < topology.workers:
        raise Refused(f"{topology.workers} workers need a GPU each, and there are {num_gpus}; verify.devices = 'cpu'")
    if topology.workers == 1:
        return [base]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(topology.workers)]
    visible = nvidia.names(environ) or [*map(str, range(topology.workers))]
    gpus = [{nvidia.VARIABLE: name} for name in visible] if num_gpus else [{}] * topology.workers
    return [{**base, **gpus[rank], **tf_config.of_worker(addresses, rank)} for rank in range(topology.workers)]


def _wait(job: TrainingJob, processes: list[subprocess.Popen[bytes]], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while any(codes := [process.poll() for process in processes]) or None in codes:
        for rank, code in enumerate(codes):
            if code:
                raise _failure(job, rank, code)
        if time.monotonic() > deadline:
            late = codes.index(None)
            raise Died(
                f"{_named(job, late)} did not end within verify.timeout_seconds = {timeout_seconds:g}"
                f"{child_process.last_words(_printed(job, late))}"
            )
        time.sleep(_POLL_SECONDS)


def _failure(job: TrainingJob, rank: int, code: int) -> Exception:
    refusal = job.refusal_path(rank)
    if code == EXIT_USAGE and refusal.exists():
        return Refused(refusal.read_text("utf-8"))
    return Died(f"{_named(job, rank)} {child_process.describe_end(code, _printed(job, rank))}")


def _named(job: TrainingJob, rank: int) -> str:
    return f"worker {rank}" if job.topology.workers > 1 else "its process"


def _printed(job: TrainingJob, rank: int) -> list[str]:
    return job.log_path(rank).read_text("utf-8", errors="replace").splitlines()
