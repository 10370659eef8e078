"""The job's folder, as the supervisor reads and writes it: a disk that does not answer holds nobody up."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import PeerError
from launcher.jobs.drill import files
from launcher.jobs.first_error import FILE_NAME, FirstError
from launcher.jobs.job import Job, NotReady
from launcher.jobs.output import JobConsole
from launcher.jobs.policy import WorkerState
from launcher.machine.child_process import run_forked
from launcher.reporting import attempts, report, strict_json, summary

# What the folder has to answer; after it has been too slow once, it is not waited for as long again.
_DISK_SECONDS = 10.0
_DEAD_DISK_SECONDS = 1.0

_Method = Callable[..., Any]


def _asked(what: str, *, otherwise: Any = None) -> Callable[[_Method], _Method]:
    """Has a forked child run a method, which reads or writes the folder; `otherwise` is for one that takes too long."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def ask(self: JobFolder, *arguments: Any, **named: Any) -> Any:
            work, note = functools.partial(method, self, *arguments, **named), self._console.note
            try:
                return run_forked(work, seconds=self._seconds, turn=self._turn)
            except TimeoutError:
                note(f"{self._path} has not answered for {self._seconds:g} s when asked {what}")
                self._seconds = _DEAD_DISK_SECONDS
            except (OSError, RuntimeError) as error:  # no process can be started, or the disk has failed
                note(f"{self._path} cannot be asked {what}: {str(error).splitlines()[-1]}")
            return otherwise

        return ask

    return decorate


class JobFolder:
    """One job's `model_dir`. When it does not answer in time, that is said and the supervisor goes on without.

    Its error.json says which worker failed first in the attempt that ended the job, and why. Members have a supervisor
    each, none of which sees the others: each writes what became of its own worker to
    logs/attempt_K/worker_I.error.json, and error.json is the first of these that is not the echo of another.

    `turn` is called again and again while the folder is waited for.
    """

    def __init__(self, job: Job, console: JobConsole, turn: Callable[[], None]):
        self._job = job
        self._console = console
        self._turn = turn
        self._path = Path(job.model_dir)
        self._seconds = _DISK_SECONDS

    @_asked("for the attempts before this one")
    def _next_attempt(self) -> int:
        return self._job.next_attempt()

    def next_attempt(self) -> int:
        """The number of the job's next attempt; raises PeerError where the folder does not answer."""
        number = self._next_attempt()
        if number is None:
            raise PeerError(f"--model_dir={self._path} does not answer; is its file server there?")
        return int(number)

    @_asked("for the newest checkpoint", otherwise=-1)
    def newest_step(self) -> int:
        """The step of the newest complete checkpoint; -1 without one."""
        return max(files.all_steps(self._path), default=-1)

    @_asked("to be written to")
    def _why_not_writable(self) -> str:
        try:
            with tempfile.TemporaryFile(dir=self._path):
                return ""
        except OSError as error:  # a disk that is full or fails may be better soon, and a worker says what it wanted
            return str(error.strerror) if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else ""

    def check_writable(self) -> None:
        """Raises NotReady where the folder of earlier attempts takes no more, so that no worker could save."""
        if why := self._why_not_writable():
            what = f"--model_dir={self._path} cannot be written to any more: {why}"
            raise NotReady(f"{what}; make it writable and run the same command again", 0, may_pass=False)

    @_asked("to write error.json")
    def write_error(self, error: FirstError, *, exit_code: int | None) -> str:
        """Writes error.json, with the job's exit code or None for one that goes on; what to say beside it, or ""."""
        chosen, logs, member = error.record(exit_code=exit_code), error.log.parent, self._job.member
        shared = (logs / FILE_NAME, self._path / FILE_NAME)
        if member is None:
            _write(chosen, *shared)
            return ""
        symptom = error.cause.state is WorkerState.VICTIM
        _write({**chosen, "symptom": symptom}, error.log.with_suffix(".error.json"))
        seen = 0
        # Members write at the same time. Whoever is overtaken sees more when it looks again, so the last one to write
        # has seen them all.
        while len(records := _records(logs)) > seen:
            seen, cause = len(records), min(records, key=_order)
            victims = [{name: record[name] for name in ("worker", "what")} for record in records if record is not cause]
            chosen = {**cause, "victims": victims}
            _write(chosen, *shared)
        if chosen["worker"] == member:
            return ""
        said = chosen["error"]
        what = f"worker {chosen['worker']} {chosen['what']}" + (f": {said['type']}: {said['message']}" if said else "")
        return f"This worker is a victim. Failed before it: {what} ({chosen['log']})"

    @_asked("to remove error.json")
    def forget_error(self, *, before: int | None = None) -> None:
        """Removes error.json, which is the chief's to do; what a faster peer says of attempt `before` stays."""
        path, member = self._path / FILE_NAME, self._job.member
        if before is not None and member is not None and strict_json.read_object(path).get("attempt", 0) >= before:
            return
        if not member:
            with contextlib.suppress(OSError):
                path.unlink()

    @_asked("to remove the logs")
    def remove_logs(self, logs: Path) -> None:
        """Removes the logs of an attempt in which nothing was run."""
        if self._job.member is None:
            shutil.rmtree(logs, ignore_errors=True)
        for path in logs.glob(f"worker_{self._job.member}.*"):
            with contextlib.suppress(OSError):
                path.unlink()
        for folder in (logs, logs.parent, logs.parent.parent):
            with contextlib.suppress(OSError):  # as soon as there is something else in it
                folder.rmdir()

    @_asked("to write attempts.jsonl")
    def end_attempt(self, number: int, *, since: attempts.Beginning, ended_by: str) -> None:
        """Appends to attempts.jsonl what ended an attempt that began at `since` and of which nothing runs any more."""
        name, folder = self._job.attempt_name(number), os.fspath(self._path)
        with contextlib.suppress(OSError):
            attempts.add_end(folder, attempt=name, started=since.time, seconds=since.seconds, ended_by=ended_by)

    @_asked("to write summary.json and report.html")
    def ensure_summary(self, *, since: attempts.Beginning, exit_code: int, error: str, step: int) -> None:
        """Writes summary.json and the report for a job that failed before its chief could.

        Of one written after `since`, when the last attempt began, only the attempts and their goodput are renewed.
        """
        folder, path = os.fspath(self._path), self._path / summary.FILE_NAME
        content: Mapping[str, Any] = {}
        with contextlib.suppress(OSError):
            content = strict_json.read_object(path) if path.stat().st_mtime >= since.time else {}
        reckoned = attempts.reckon(folder)
        content = content or summary.make_summary(
            exit_code=exit_code,
            error=error,
            metrics={},
            step=max(0, step),
            seconds={"total": since.seconds},
            measured={},
        )
        with contextlib.suppress(summary.SummaryWriteError):
            summary.write_summary(folder, {**content, **reckoned})
        report.refresh(self._path)


def _records(logs: Path) -> list[dict[str, Any]]:
    paths = logs.glob("worker_*.error.json")
    return sorted(filter(None, map(strict_json.read_object, paths)), key=lambda record: int(record["worker"]))


def _order(record: Mapping[str, Any]) -> tuple[bool, float, int]:
    """Causes before symptoms, then by time, as far as the clocks of different hosts allow."""
    failed_at = (record["error"] or record)["time"]
    return record["symptom"], failed_at, record["worker"]


def _write(record: Mapping[str, Any], *paths: Path) -> None:
    """A disk that refuses it does not matter: the report is printed, too."""
    for path in paths:
        with contextlib.suppress(OSError):
            strict_json.write(path, record)
