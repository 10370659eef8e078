"""The job's folder, as the supervisor reads and writes it: a disk that does not answer holds nobody up."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import PeerError
from launcher.jobs.error_files import error_files
from launcher.jobs.first_error import FirstError
from launcher.jobs.job import Job, NotReady
from launcher.jobs.output import JobConsole
from launcher.machine.child_process import run_forked
from launcher.reporting import attempts, report, summary

# What the folder has to answer; after it has been too slow once, it is not waited for as long again.
_DISK_SECONDS = 10.0
_DEAD_DISK_SECONDS = 1.0


class JobFolder:
    """One job's `model_dir`. When it does not answer in time, that is said and the supervisor goes on without.

    Args:
      job: whose it is.
      console: where that is said, and what must go on meanwhile.
    """

    def __init__(self, job: Job, console: JobConsole):
        self._job = job
        self._console = console
        self._path = Path(job.model_dir)
        self._error_files = error_files(job)
        self._seconds = _DISK_SECONDS

    def next_attempt(self) -> int:
        """The number of the job's next attempt.

        Raises:
          PeerError: the folder does not answer.
        """
        number = self._ask("for the attempts before this one", self._job.next_attempt)
        if number is None:
            raise PeerError(f"--model_dir={self._path} does not answer; is its file server there?")
        return int(number)

    def begin(self, attempt: int) -> None:
        """Forgets the report of an error before `attempt`."""
        self._ask("for the report of an earlier error", lambda: self._error_files.begin(attempt))

    def newest_step(self) -> int:
        """The step of the newest complete checkpoint; -1 without one."""
        found = self._ask("for the newest checkpoint", lambda: _newest_step(self._path))
        return -1 if found is None else int(found)

    def check_writable(self) -> None:
        """Whether the folder that earlier attempts have written to still lets itself be written to.

        Raises:
          NotReady: it does not, and no worker could save.
        """
        if why := self._ask("to be written to", lambda: _why_not_writable(self._path)):
            advice = "make it writable and run the same command again"
            raise NotReady(
                f"--model_dir={self._path} cannot be written to any more: {why}; {advice}", 0, may_pass=False
            )

    def write_error(self, error: FirstError, *, exit_code: int | None) -> str:
        """Writes error.json; returns what a person is to know beside it, or ""."""
        return self._ask("to write error.json", lambda: self._error_files.write(error, exit_code=exit_code)) or ""

    def clear_error(self) -> None:
        """Removes error.json."""
        self._ask("to remove error.json", self._error_files.clear)

    def remove_logs(self, logs: Path) -> None:
        """Removes the logs of an attempt in which nothing was run."""
        self._ask("to remove the logs", lambda: self._error_files.remove_logs(logs))

    def end_attempt(self, number: int, *, since: attempts.Beginning, ended_by: str) -> None:
        """Appends to attempts.jsonl what ended an attempt of which nothing runs any more.

        Args:
          number: of the attempt.
          since: when it began.
          ended_by: what ended it.
        """
        name = self._job.attempt_name(number)
        self._ask("to write attempts.jsonl", lambda: _end_attempt(self._path, name, since, ended_by))

    def ensure_summary(self, *, since: attempts.Beginning, exit_code: int, error: str, step: int) -> None:
        """Writes summary.json for a job that failed before its chief could.

        Of one written after `since`, only the attempts and their goodput are renewed.

        Args:
          since: when the last attempt began.
          exit_code, error, step: what there is to tell.
        """
        self._ask("to write summary.json", lambda: _ensure_summary(self._path, since, exit_code, error, step))
        self._ask("to write report.html", lambda: report.refresh(self._path))

    def _ask(self, what: str, work: Callable[[], Any]) -> Any:
        """What `work` returns that reads or writes the folder; None when it has taken too long."""
        try:
            return run_forked(work, seconds=self._seconds, turn=self._console.turn)
        except TimeoutError:
            waited, self._seconds = self._seconds, _DEAD_DISK_SECONDS
            self._console.note(f"{self._path} has not answered for {waited:g} s when asked {what}")
        except OSError as error:
            self._console.note(f"{self._path} cannot be asked {what}: no process can be started: {error.strerror}")
        return None


def _why_not_writable(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:  # a disk that is full or fails may be better soon, and a worker says what it wanted
        return str(error.strerror) if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else ""


def _newest_step(model_dir: Path) -> int:
    # Reads manifests only. NumPy comes with it, which a job that never ends early need not wait for.
    if not (model_dir / "checkpoints").is_dir():
        return -1
    from launcher.checkpoints import CheckpointReadError, CheckpointStore

    try:
        return max(CheckpointStore(str(model_dir / "checkpoints")).steps(), default=-1)
    except CheckpointReadError:
        return -1


def _end_attempt(model_dir: Path, name: str, since: attempts.Beginning, ended_by: str) -> None:
    with contextlib.suppress(OSError):
        lasted = since.seconds
        attempts.add_end(os.fspath(model_dir), attempt=name, started=since.time, seconds=lasted, ended_by=ended_by)


def _ensure_summary(model_dir: Path, since: attempts.Beginning, exit_code: int, error: str, step: int) -> None:
    path = model_dir / summary.FILE_NAME
    reckoned = attempts.reckon(os.fspath(model_dir))
    with contextlib.suppress(OSError, ValueError, summary.SummaryWriteError):
        if path.stat().st_mtime >= since.time:
            summary.write_summary(os.fspath(model_dir), {**json.loads(path.read_bytes()), **reckoned})
            return
    unknown: Mapping[str, Any] = dict.fromkeys(("strategy", "num_replicas", "policy", "loss_scale"))
    with contextlib.suppress(summary.SummaryWriteError):
        summary.write_summary(
            os.fspath(model_dir),
            summary.make_summary(
                exit_code=exit_code,
                error=error,
                metrics={},
                step=max(0, step),
                seconds={"total": since.seconds},
                measured=reckoned,
                **unknown,
            ),
        )
