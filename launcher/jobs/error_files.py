"""The files error.json of a job, with one supervisor or many, and what is left of an attempt that ran nothing."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.jobs import first_error
from launcher.jobs.first_error import FirstError
from launcher.jobs.job import Job
from launcher.jobs.policy import WorkerState
from launcher.reporting import strict_json


def error_files(job: Job) -> Sole | Shared:
    """Those that fit the job: its model_dir belongs to one supervisor, or is shared by as many as it has workers."""
    return Sole(job) if job.member is None else Shared(job, job.member)


class Sole:
    """MODEL_DIR/error.json of one supervisor: which worker failed first in the attempt that ended the job, and why."""

    def __init__(self, job: Job):
        self._path = Path(job.model_dir, first_error.FILE_NAME)

    def begin(self, attempt: int) -> None:
        """Forgets what attempts before `attempt` left in error.json."""
        self.clear()

    def write(self, error: FirstError, *, exit_code: int | None) -> str:
        """Writes the report, and returns what to say beside it; `exit_code` is None for a job that goes on."""
        _write(error.log.parent / first_error.FILE_NAME, error.record(exit_code=exit_code))
        _write(self._path, error.record(exit_code=exit_code))
        return ""

    def clear(self) -> None:
        """Removes error.json: all went well in the end."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def remove_logs(self, logs: Path) -> None:
        """Removes what a mistake in the flags has left: nothing was run."""
        shutil.rmtree(logs, ignore_errors=True)
        _remove_empty(logs.parent, logs.parent.parent)


class Shared:
    """As `Sole`, of a supervisor a worker, none of which sees the others: each writes what became of its own worker to
    logs/attempt_K/worker_I.error.json, and error.json is the first of these that is not the echo of another."""

    def __init__(self, job: Job, rank: int):
        self._rank = rank
        self._path = Path(job.model_dir, first_error.FILE_NAME)

    def begin(self, attempt: int) -> None:
        # A peer may have started and failed before; what it says of this attempt stays.
        found = _read(self._path)
        if self._rank == 0 and found is not None and found["attempt"] < attempt:
            self.clear()

    def write(self, error: FirstError, *, exit_code: int | None) -> str:
        own = error.log.with_suffix(".error.json")
        _write(own, {**error.record(exit_code=exit_code), "symptom": error.cause.state is WorkerState.VICTIM})
        before: list[dict[str, Any]] = []
        # Members write at the same time. Whoever is overtaken sees more when it looks again, so the last one to write
        # has seen them all.
        while len(records := _records(error.log.parent)) > len(before):
            before = records
            cause = min(records, key=_order)
            victims = [_victim(record) for record in records if record["worker"] != cause["worker"]]
            chosen = {**cause, "victims": sorted(victims, key=lambda victim: int(victim["worker"]))}
            self._write_shared(error.log.parent / first_error.FILE_NAME, chosen)
            self._write_shared(self._path, chosen)
        if not before or chosen["worker"] == self._rank:
            return ""
        said = chosen["error"] or {}
        what = f"worker {chosen['worker']} {chosen['what']}" + (f": {said['type']}: {said['message']}" if said else "")
        return f"This worker is a victim. Failed before it: {what} ({chosen['log']})"

    def clear(self) -> None:
        if self._rank == 0:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def remove_logs(self, logs: Path) -> None:
        for path in logs.glob(f"worker_{self._rank}.*"):
            with contextlib.suppress(OSError):
                path.unlink()
        _remove_empty(logs, logs.parent, logs.parent.parent)

    def _write_shared(self, path: Path, record: Mapping[str, Any]) -> None:
        # A name of its own until it is whole: the members' process ids may be the same, each in its container.
        own = path.with_name(f".{path.name}.worker_{self._rank}")
        _write(own, record)
        with contextlib.suppress(OSError):
            own.replace(path)


def _order(record: Mapping[str, Any]) -> tuple[bool, float, int]:
    """Causes before symptoms, then by time, as far as the clocks of different hosts allow."""
    failed_at = (record["error"] or record)["time"]
    return record["symptom"], failed_at, record["worker"]


def _victim(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"worker": record["worker"], "what": record["what"]}


def _records(logs: Path) -> list[dict[str, Any]]:
    found = map(_read, sorted(logs.glob("worker_*.error.json")))
    return [record for record in found if record is not None]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """A disk that refuses it does not matter: the report is printed, too."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        strict_json.replace_file(path, strict_json.dumps(record, indent=2) + "\n")


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # as soon as there is something else in it
            folder.rmdir()
