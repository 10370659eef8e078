"""The local backend: all workers on this host, each a process with a session of its own."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.errors import UsageError, failures
from launcher.jobs import guard
from launcher.jobs.job import Command, Job, NotReady, Worker
from launcher.jobs.output import JobConsole, Tee
from launcher.jobs.policy import Outcome, Trouble, WorkerState
from launcher.jobs.standby import Spare
from launcher.machine import child_process, nvidia
from launcher.machine.cluster import tf_config, without_peers
from launcher.machine.ports import free_ports
from launcher.worker import progress

_CHUNK_BYTES = 65536
_TURN_SECONDS = 0.005
# A process that was killed is gone as soon as the kernel has taken its memory and its devices back.
_DEATH_SECONDS = 30.0
_GUARD_SECONDS = 10.0


class LocalBackend:
    """Starts workers as processes of this host; see `launcher.jobs.job.Backend`.

    Whatever becomes of the supervisor, a guard process ends the workers with it.

    Args:
      environ: what workers inherit.
      make_tee: makes what takes a worker's output; None for the console and the log.
      while_waiting: called again and again while killed workers are waited for.
      standby: whether spare processes are kept for the next attempt; see `launcher.jobs.standby`.
    """

    def __init__(
        self,
        job: Job,
        console: JobConsole,
        environ: Mapping[str, str],
        make_tee: Callable[[Command], Tee] | None = None,
        while_waiting: Callable[[], None] = lambda: None,
        standby: bool = False,
    ):
        self._job = job
        self._console = console
        self._environ = environ
        self._make_tee = make_tee or (lambda command: console.tee(command.rank, command.log))
        self._while_waiting = while_waiting
        self._standby = standby
        self._spares: list[Spare] = []
        self._gpus = divide_gpus(nvidia.names(environ), job.workers, "workers")
        self._processes: list[WorkerProcess] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def gpus_of(self, rank: int) -> dict[str, str]:
        """The variable that gives a worker its share of the GPUs; nothing where there are none."""
        return {nvidia.VARIABLE: ",".join(self._gpus[rank])} if self._gpus else {}

    def prepare(self, stop: Callable[[], bool]) -> None:
        """This host is always there."""

    def plan(self, attempt: int) -> str:
        commands = self.commands(attempt)
        return "".join(f"# worker {command.rank}, log: {command.log}\n{command}\n" for command in commands)

    def commands(self, attempt: int) -> tuple[Command, ...]:
        """The commands of an attempt, on ports that are free now; a member finds its peers in the environment."""
        job = self._job
        if job.member is not None:
            return (self._command(attempt, job.member, {}),)
        addresses = [f"127.0.0.1:{port}" for port in free_ports(job.workers)]
        places = [{**tf_config.of_worker(addresses, rank), **self.gpus_of(rank)} for rank in range(job.workers)]
        return tuple(self._command(attempt, rank, place) for rank, place in enumerate(places))

    def start(self, commands: tuple[Command, ...]) -> list[Worker]:
        try:
            self._job.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
            for command in commands:
                progress.make_files(command.progress_file, command.error_file)
        except OSError as error:
            raise NotReady(
                f"the temporary folder {self._job.scratch.parent} cannot take what the workers report: "
                f"{error.strerror or error}; make room there, or set TMPDIR to another folder, then run the same "
                "command again",
                0,
                is_outage=True,
            ) from error
        rank, became = 0, []
        try:
            self._start_guard()
            for command in commands:
                rank = command.rank
                environ = self._all_variables(command)
                spare = self._spare_process(command, environ)
                became += [rank] if spare else []
                self._processes.append(WorkerProcess(command, self._make_tee(command), environ, spare))
                self._tell_guard()
            self._drop_spares()
            if became:
                self._console.note(f"--standby: spare processes became worker(s) {', '.join(map(str, became))}")
        except OSError as error:
            self.clear()
            program = error.filename or sys.executable
            what = f"{program} cannot be run: {error.strerror or error}; mend that and run the same command again"
            raise NotReady(what, rank, may_pass=failures.is_machine_failure(error), is_outage=True) from None
        return [process.worker for process in self._processes]

    def pump(self, timeout_seconds: float) -> None:
        self._replace_guard()
        if self._standby:
            self._keep_spares()
        printing = [process for process in self._processes if not process.has_said_all]
        if self._console.is_behind or not printing:
            time.sleep(timeout_seconds)
        else:
            for process in select.select(printing, [], [], timeout_seconds)[0]:
                process.read()
        for process in self._processes:
            process.refresh()

    def can_grow(self) -> bool:
        return False

    def leave_out(self, rank: int, why: str) -> str:
        return "this host"

    def clear(self, cause: Outcome | None = None) -> None:
        """Kills what still runs, also processes that left their worker's session; spares stay."""
        for process in self._processes:
            process.kill()
        guard.kill_marked(self._job.identity, but=[spare.process.pid for spare in self._spares])
        self._wait_for_death()
        for process in self._processes:
            process.close()
        self._processes = []
        self._tell_guard()

    def close(self) -> None:
        """Kills what still runs, ends the guard and removes the scratch folder."""
        self._drop_spares()
        self.clear()
        if self._guard is not None:
            assert self._guard.stdin is not None
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(_GUARD_SECONDS)
            self._guard = None
        shutil.rmtree(self._job.scratch, ignore_errors=True)

    def _command(self, attempt: int, rank: int, place: Mapping[str, str]) -> Command:
        environ = {**place, "PYTHONUNBUFFERED": "1", guard.JOB: self._job.identity}
        command = self._job.command(attempt, rank, python=sys.executable, environ=environ)
        return command.reporting_in(self._job.scratch)

    def _all_variables(self, command: Command) -> dict[str, str]:
        # A worker that is told its place must not hear of another one from a scheduler.
        inherited = without_peers(self._environ) if "TF_CONFIG" in command.environ else self._environ
        return {**inherited, **command.environ}

    def _keep_spares(self) -> None:
        """Once all workers train, starts one process for each, which can take its place in the next attempt."""
        workers = [process.worker for process in self._processes]
        if self._spares or not workers or not all(map(_trains, workers)):
            return
        try:
            for worker in workers:
                self._spares.append(Spare(worker.command.argv, self._all_variables(worker.command)))
                self._tell_guard()
            self._console.note(f"--standby: {len(self._spares)} spare process(es) stand by")
        except OSError as error:
            self._standby = False
            self._drop_spares()
            self._console.note(f"--standby: no spare process can be started: {error}; the job goes on without them")

    def _spare_process(self, command: Command, environ: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """A spare that is this worker from now on; None where there is none that can be."""
        for spare in [spare for spare in self._spares if spare.fits(command.argv, environ)]:
            self._spares.remove(spare)
            with contextlib.suppress(OSError):
                return spare.become(environ)
        return None

    def _drop_spares(self) -> None:
        for spare in self._spares:
            spare.close()
        self._spares = []

    def _wait_for_death(self) -> None:
        deadline = time.monotonic() + _DEATH_SECONDS
        while alive := [process for process in self._processes if process.refresh() is None]:
            if time.monotonic() > deadline:
                for process in alive:
                    what = f"cannot be killed: {process.describe_state()}, for {_DEATH_SECONDS:g} s"
                    process.worker.trouble = Trouble(state=WorkerState.UNKILLABLE, what=what)
                return
            self._while_waiting()
            time.sleep(_TURN_SECONDS)

    def _start_guard(self) -> None:
        if self._guard is not None and self._guard.poll() is None:
            return
        self._guard = child_process.start(
            child_process.helper("launcher.jobs.guard", self._job.identity, str(self._job.scratch)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )

    def _replace_guard(self) -> None:
        """Starts the guard again, if somebody has killed it."""
        if not self._processes or self._guard is None or self._guard.poll() is None:
            return
        try:
            self._start_guard()
        except OSError as error:
            self._guard = None
            self._console.note(f"the guard was killed and cannot be started again: {error}; workers go on without it")
            return
        self._console.note("the guard was killed; another one has taken its place")
        self._tell_guard()

    def _tell_guard(self) -> None:
        if self._guard is None or self._guard.stdin is None or self._guard.poll() is not None:
            return
        groups = [str(process.pid) for process in self._processes if process.worker.exit_code is None]
        groups += [str(spare.process.pid) for spare in self._spares]
        with contextlib.suppress(OSError):
            self._guard.stdin.write(" ".join(groups).encode() + b"\n")
            self._guard.stdin.flush()


class WorkerProcess:
    """The process of a worker on this host.

    Args:
      environ: all its variables.
      process: one that has become this worker already; None to start one.

    Attributes:
      has_said_all: whether the last byte there will be was passed on.
    """

    def __init__(
        self, command: Command, tee: Tee, environ: Mapping[str, str], process: subprocess.Popen[bytes] | None = None
    ):
        self._process = process or child_process.start(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            preexec_fn=child_process.die_with_parent(command.processors),
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.worker = Worker(command, tee, self._send)
        self.has_said_all = False
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)

    def fileno(self) -> int:
        """The descriptor of what it prints."""
        return self._output.fileno()

    def read(self) -> None:
        """Passes on what it has printed, up to a limit."""
        with contextlib.suppress(BlockingIOError):
            content = os.read(self.fileno(), _CHUNK_BYTES)
            if content:
                self.worker.tee.feed(content)
            self.has_said_all = not content

    def refresh(self) -> int | None:
        """Reads its reports and whether it has ended; returns the exit code."""
        worker, now = self.worker, time.monotonic()
        if worker.exit_code is not None:
            return worker.exit_code
        if self._has_ended():
            self.kill()
            worker.exit_code = self._process.wait()
        else:
            worker.last_alive = now
        worker.is_frozen = worker.exit_code is None and self._state() == "T"
        worker.report = progress.read_report(worker.command.progress_file) or worker.report
        worker.error = progress.read_error(worker.command.error_file) or worker.error
        return worker.exit_code

    def describe_state(self) -> str:
        """The state in which the kernel has it, as far as it says so."""
        waits = ", as for a disk or a device that does not answer" if self._state() == "D" else ""
        return f"process {self.pid} is in state {self._state() or 'unknown'}{waits}"

    def kill(self) -> None:
        if self.worker.exit_code is None:
            # Not reaped yet, so the number cannot have gone to another group.
            child_process.kill_group(self.pid)

    def close(self) -> None:
        """Passes on what is left in the pipe; whoever still holds its other end is not waited for."""
        with contextlib.suppress(OSError):
            while content := os.read(self.fileno(), _CHUNK_BYTES):
                self.worker.tee.feed(content)
        self._output.close()
        self.worker.tee.close()

    def _send(self, number: int) -> None:
        # To the process alone: what it started may be needed until it has ended.
        if self.worker.exit_code is None:
            os.kill(self.pid, number)  # not Popen.send_signal, which may reap it; see kill()

    def _state(self) -> str:
        """Its state in the kernel's letter; known on Linux only."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _trains(worker: Worker) -> bool:
    report = worker.report
    if report is None or report.step is None or report.first_step is None:
        return False
    return report.step > report.first_step


def divide_gpus(gpus: list[str], count: int, flag: str) -> list[list[str]]:
    """GPUs of each of as many as a flag says, in equal shares: two processes on one GPU would fill its memory twice."""
    if not gpus:
        return []
    share, rest = divmod(len(gpus), count)
    if not share or rest:
        raise UsageError(
            f"--{flag}={count}: this host has {len(gpus)} GPU(s), which cannot be divided among them in equal "
            f"shares; change --{flag}, name the GPUs to use in CUDA_VISIBLE_DEVICES, or set it to -1 to train on CPUs"
        )
    return [gpus[rank * share : (rank + 1) * share] for rank in range(count)]
