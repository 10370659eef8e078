"""A real Slurm on this machine while tests need it: munged, a controller, and two nodes that are this host."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from launcher.machine.ports import free_ports

NODES = ("node1", "node2")
_PROGRAMS = ("setpriv", "munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
_SECONDS = 60
# Debian puts daemons where a person's PATH may not lead.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])


def missing() -> str:
    """Why there can be no Slurm here; empty where there can."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else ""


@dataclasses.dataclass(frozen=True)
class SlurmCluster:
    """The cluster; its files, and those of its jobs, are in `folder`."""

    folder: Path

    def environment(self, **changes: str) -> dict[str, str]:
        """What a person on a login node has."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf"), **changes}

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Runs one of Slurm's commands, and returns what it prints."""
        done = subprocess.run(
            words, env=env or self.environment(), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}{self.log()}"
        return done.stdout

    def submit(self, script: Path, *words: str, options: tuple[str, ...] = (), **environ: str) -> str:
        """Submits a batch script with its arguments; returns the job's id."""
        output = f"--output={self.folder}/%j.out"
        sbatch = ("sbatch", "--parsable", output, *options, str(script), *words)
        return self.run(*sbatch, env=self.environment(**environ)).strip()

    def output(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """What the controller knows of a job, such as JobState and ExitCode."""
        shown = self.run("scontrol", "show", "job", job)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, job: str) -> dict[str, str]:
        """Waits until a job has ended, and returns what the controller knows of it."""
        _until(lambda: self.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), lambda: self.output(job))
        return self.job(job)

    def clear(self) -> None:
        """Ends every job, and waits for the nodes to be free."""
        for job in self.run("squeue", "--noheader", "--format=%i").split():
            with contextlib.suppress(AssertionError):  # it has just ended
                self.run("scancel", "--full", "--signal=KILL", job)
                self.run("scancel", job)
        _until(lambda: not self.run("squeue", "--noheader"), self.log)
        _until(self.is_ready, self.log)

    def is_ready(self) -> bool:
        with contextlib.suppress(AssertionError):
            return self.run("sinfo", "--noheader", "--Node", "--format=%N %t").split() == [
                word for node in NODES for word in (node, "idle")
            ]
        return False

    def log(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join("\n".join([f"--- {p.name}", *p.read_text().splitlines()[-8:]]) for p in self._logs())

    def _logs(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))


@contextlib.contextmanager
def slurm(folder: Path):
    """Starts Slurm in an empty folder with a short path, and ends it with everything that it started."""
    environ = {**os.environ, "PATH": PATH}
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    cluster = SlurmCluster(folder)
    controller, *ports = free_ports(1 + len(NODES))
    (folder / "slurm.conf").write_text(_configuration(folder, controller, ports))
    (folder / "state").mkdir()
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    configured = ["-D", "-f", str(folder / "slurm.conf")]
    commands = [munged, ["slurmctld", *configured]]
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
        commands.append(["slurmd", *configured, "-N", node])
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with open(folder / f"{len(daemons)}-{command[0]}.log", "wb") as log:
                daemons.append(
                    subprocess.Popen(
                        # They end with the tests also when somebody kills these.
                        ["setpriv", "--pdeathsig=KILL", *command],
                        env=environ,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            if command is munged:
                _until((folder / "munge.sock").exists, cluster.log)
        _until(cluster.is_ready, cluster.log)
        yield cluster
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            cluster.clear()
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
        _end_all_of(folder)


def _configuration(folder: Path, controller: int, ports: list[int]) -> str:
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        f"NodeName={node} NodeHostName={host} NodeAddr=127.0.0.1 Port={port} CPUs=4"
        for node, port in zip(NODES, ports, strict=True)
    )
    # config_overrides: a node may claim more processors than the machine has. cred_expire: a requeued job may start
    # when the credential of its last start has expired, by default after two minutes. KillWait: Slurm's default; a
    # cancelled job's workers have this long to save, on a busy machine, too.
    return f"""\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={getpass.getuser()}
SlurmdUser={getpass.getuser()}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=0
KillWait=30
ReturnToService=2
{nodes}
PartitionName=all Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
"""


def _until(condition: Callable[[], object], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"condition not met after {_SECONDS} s\n{said()}"
        time.sleep(0.05)


def _end_all_of(folder: Path) -> None:
    """Kills what Slurm has started: its steps' managers, which leave their daemon's group, and whatever they ran."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environ = Path(f"/proc/{process.pid}/environ").read_bytes() if sys.platform == "linux" else b""
            if mark in environ.split(b"\0") or str(folder) in " ".join(process.cmdline()):
                process.kill()
