"""The job's folder, as the supervisor reads and writes it: a disk that does not answer holds nobody up."""

import contextlib
import errno
import json
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


class JobFolder:
    """One job's `model_dir`. When it does not answer in time, that is said and the supervisor goes on without.

    Its error.json says which worker failed first in the attempt that ended the job, and why. Members have a supervisor
    each, none of which sees the others: each writes what became of its own worker to
    logs/attempt_K/worker_I.error.json, and error.json is the first of these that is not the echo of another.
    """

    def __init__(self, job: Job, console: JobConsole):
        self._job = job
        self._console = console
        self._path = Path(job.model_dir)
        self._seconds = _DISK_SECONDS

    def next_attempt(self) -> int:
        """The number of the job's next attempt; raises PeerError where the folder does not answer."""
        number = self._ask("for the attempts before this one", self._job.next_attempt)
        if number is None:
            raise PeerError(f"--model_dir={self._path} does not answer; is its file server there?")
        return int(number)

    def begin(self, attempt: int) -> None:
        """Forgets the report of an error before `attempt`."""
        self._ask("for the report of an earlier error", lambda: _forget_error(self._job, before=attempt))

    def newest_step(self) -> int:
        """The step of the newest complete checkpoint; -1 without one."""
        step = self._ask("for the newest checkpoint", lambda: files.newest_step(self._path))
        return -1 if step is None else int(step)

    def check_writable(self) -> None:
        """Raises NotReady where the folder of earlier attempts takes no more, so that no worker could save."""
        if why := self._ask("to be written to", lambda: _why_not_writable(self._path)):
            advice = "make it writable and run the same command again"
            raise NotReady(
                f"--model_dir={self._path} cannot be written to any more: {why}; {advice}", 0, may_pass=False
            )

    def write_error(self, error: FirstError, *, exit_code: int | None) -> str:
        """Writes error.json, with the job's exit code or None for one that goes on; what to say beside it, or ""."""
        record = error.record(exit_code=exit_code)
        return self._ask("to write error.json", lambda: _write_error(self._job, error, record)) or ""

    def clear_error(self) -> None:
        """Removes error.json: all went well in the end."""
        self._ask("to remove error.json", lambda: _forget_error(self._job))

    def remove_logs(self, logs: Path) -> None:
        """Removes the logs of an attempt in which nothing was run."""
        self._ask("to remove the logs", lambda: _remove_logs(self._job, logs))

    def end_attempt(self, number: int, *, since: attempts.Beginning, ended_by: str) -> None:
        """Appends to attempts.jsonl what ended an attempt that began at `since` and of which nothing runs any more."""

        def add() -> None:
            name, path = self._job.attempt_name(number), os.fspath(self._path)
            with contextlib.suppress(OSError):
                attempts.add_end(path, attempt=name, started=since.time, seconds=since.seconds, ended_by=ended_by)

        self._ask("to write attempts.jsonl", add)

    def ensure_summary(self, *, since: attempts.Beginning, exit_code: int, error: str, step: int) -> None:
        """Writes summary.json for a job that failed before its chief could.

        Of one written after `since`, when the last attempt began, only the attempts and their goodput are renewed.
        """
        self._ask("to write summary.json", lambda: _ensure_summary(self._path, since, exit_code, error, step))
        self._ask("to write report.html", lambda: report.refresh(self._path))

    def _ask(self, what: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, which reads or writes the folder; None when it has taken too long."""
        try:
            return run_forked(work, seconds=self._seconds, turn=self._console.turn)
        except TimeoutError:
            waited, self._seconds = self._seconds, _DEAD_DISK_SECONDS
            self._console.note(f"{self._path} has not answered for {waited:g} s when asked {what}")
        except (OSError, RuntimeError) as error:  # no process can be started, or the disk has failed
            self._console.note(f"{self._path} cannot be asked {what}: {str(error).splitlines()[-1]}")
        return None


# ----------------------------------------------------------------------------- what a forked child does, which may wait


def _why_not_writable(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:  # a disk that is full or fails may be better soon, and a worker says what it wanted
        return str(error.strerror) if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else ""


def _ensure_summary(model_dir: Path, since: attempts.Beginning, exit_code: int, error: str, step: int) -> None:
    path = model_dir / summary.FILE_NAME
    reckoned = attempts.reckon(os.fspath(model_dir))
    with contextlib.suppress(OSError, ValueError, summary.SummaryWriteError):
        if path.stat().st_mtime >= since.time:
            summary.write_summary(os.fspath(model_dir), {**json.loads(path.read_bytes()), **reckoned})
            return
    content = summary.make_summary(
        exit_code=exit_code,
        error=error,
        metrics={},
        step=max(0, step),
        seconds={"total": since.seconds},
        measured=reckoned,
    )
    with contextlib.suppress(summary.SummaryWriteError):
        summary.write_summary(os.fspath(model_dir), content)


def _forget_error(job: Job, *, before: int | None = None) -> None:
    """Removes error.json, which is the chief's to do; what a faster peer says of attempt `before` stays."""
    path = Path(job.model_dir, FILE_NAME)
    if before is not None and job.member is not None:
        record = strict_json.read_object(path)
        if not record or record["attempt"] >= before:
            return
    if not job.member:
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_logs(job: Job, logs: Path) -> None:
    if job.member is None:
        shutil.rmtree(logs, ignore_errors=True)
    for path in logs.glob(f"worker_{job.member}.*"):
        with contextlib.suppress(OSError):
            path.unlink()
    for folder in (logs, logs.parent, logs.parent.parent):
        with contextlib.suppress(OSError):  # as soon as there is something else in it
            folder.rmdir()


def _write_error(job: Job, error: FirstError, record: Mapping[str, Any]) -> str:
    logs, shared = error.log.parent, (error.log.parent / FILE_NAME, Path(job.model_dir, FILE_NAME))
    if job.member is None:
        for path in shared:
            _write(path, record)
        return ""
    _write(error.log.with_suffix(".error.json"), {**record, "symptom": error.cause.state is WorkerState.VICTIM})
    before: list[dict[str, Any]] = []
    # Members write at the same time. Whoever is overtaken sees more when it looks again, so the last one to write
    # has seen them all.
    while True:
        records = [*filter(None, map(strict_json.read_object, sorted(logs.glob("worker_*.error.json"))))]
        if len(records) == len(before):
            break
        before = records
        cause = min(records, key=_order)
        victims = [{name: record[name] for name in ("worker", "what")} for record in records]
        others = [victim for victim in victims if victim["worker"] != cause["worker"]]
        chosen = {**cause, "victims": sorted(others, key=lambda victim: int(victim["worker"]))}
        for path in shared:
            _write(path, chosen)
    if not before or chosen["worker"] == job.member:
        return ""
    said = chosen["error"] or {}
    what = f"worker {chosen['worker']} {chosen['what']}" + (f": {said['type']}: {said['message']}" if said else "")
    return f"This worker is a victim. Failed before it: {what} ({chosen['log']})"


def _order(record: Mapping[str, Any]) -> tuple[bool, float, int]:
    """Causes before symptoms, then by time, as far as the clocks of different hosts allow."""
    failed_at = (record["error"] or record)["time"]
    return record["symptom"], failed_at, record["worker"]


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """A disk that refuses it does not matter: the report is printed, too."""
    with contextlib.suppress(OSError):
        strict_json.write(path, record)
