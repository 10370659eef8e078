"""Reports that were made before: kept with all that decided them, and shown again without TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_DONE, UsageError
from launcher.model_dir import check_model_dir
from launcher.preflight import inputs
from launcher.reporting import report, run_folder, strict_json, tables
from launcher.reporting.console import Console, make_console

_FOLDER = "reports"


class Recorder:
    """A console of which all that a report says is kept, to be said again.

    Attributes:
      shown: the console itself; what is said to it alone is not kept.
      calls: what was said, each with the name of the method.
    """

    def __init__(self, shown: Console, model_dir: str | None):
        self.shown = shown
        self.calls: list[tuple[str, Any]] = []
        self.lasting = True
        self._model_dir = model_dir

    def plan(self, lines: Mapping[str, str]) -> None:
        """A panel of names and values."""
        self._do("plan", dict(lines))

    def note(self, text: str) -> None:
        """A line."""
        self._do("note", text)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """A table whose first row is its heading."""
        self._do("table", [list(row) for row in rows])

    def write(self, content: Mapping[str, Any]) -> None:
        """The report for programs, which goes to --model_dir where that is given."""
        self._do("write", strict_json.dumps(content, indent=2))

    def _do(self, what: str, value: Any) -> None:
        self.calls.append((what, value))
        self.say(what, value)

    def say(self, what: str, value: Any) -> None:
        """Shows one of `calls`, or writes it."""
        if what == "plan":
            self.shown.plan(value)
        elif what == "note":
            self.shown.note(value)
        elif what == "table":
            tables.show_table(value, self.shown)
        elif self._model_dir is not None:
            written = report.write_result(self._model_dir, run_folder.PREFLIGHT, value)
            self.shown.note("")
            self.shown.note(f"written: {written}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptReports:
    """The reports in one folder.

    Attributes:
      cache_dir: `--preflight_cache`; they lie in a folder in it.
      key: of the command, as `inputs.key` makes it; None where nothing is to be found or kept.
    """

    cache_dir: str
    key: str | None

    @property
    def _entry(self) -> Path:
        return Path(os.path.expanduser(self.cache_dir), _FOLDER, f"{self.key}.json.gz")

    def find(self) -> dict[str, Any] | None:
        """The report of the same command, when nothing that it was made from has changed since."""
        if self.key is None:
            return None
        try:
            with gzip.open(self._entry, "rt", encoding="utf-8") as file:
                kept = json.load(file)
            unchanged = all(inputs.state(entry) == was for entry, was in kept["manifest"].items())
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            return None
        return kept if unchanged else None

    def keep(self, recorder: Recorder, error: UsageError | None, manifest: Mapping[str, str]) -> None:
        """Writes a report down; that it cannot be written is no reason to fail, the next look just takes longer."""
        content = {
            "calls": recorder.calls,
            "error": None if error is None else str(error),
            "manifest": manifest,
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        partial = self._entry.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._entry.parent.mkdir(parents=True, exist_ok=True)
            with gzip.open(partial, "wt", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(partial, self._entry)

    @contextlib.contextmanager
    def making(self, model_dir: str | None) -> Iterator[Recorder]:
        """Gives the console for a new report, and keeps what was said to it when the report is whole.

        It is kept in spite of a UsageError that is its end, and only where `Recorder.lasting` is still true.
        """
        recorder = Recorder(make_console(total_steps=1), model_dir)
        error: UsageError | None = None
        with inputs.recorded() as reads:
            try:
                yield recorder
            except UsageError as raised:
                error = raised
        if self.key is not None and recorder.lasting and any(what == "write" for what, _ in recorder.calls):
            entries = inputs.manifest(reads, os.path.expanduser(self.cache_dir))
            why = inputs.doubt(reads, entries, _texts())
            if why is None:
                self.keep(recorder, error, entries)
            else:
                recorder.shown.note(f"This report is not kept, the next look starts anew: {why}.")
        if error is not None:
            raise error


def show(kept: Mapping[str, Any], model_dir: str | None) -> int:
    """Says a kept report again, and that it is one.

    Returns:
      The exit code.

    Raises:
      UsageError: the report's own end.
    """
    if model_dir is not None:
        check_model_dir(model_dir)
    recorder = Recorder(make_console(total_steps=1), model_dir)
    for what, value in kept["calls"]:
        recorder.say(what, value)
    recorder.shown.note(
        f"This is the report of {kept['time']}: nothing that decides it has changed. --preflight_fresh makes a new one."
    )
    if kept["error"] is not None:
        raise UsageError(kept["error"])
    return EXIT_DONE


def _texts() -> list[str]:
    """All texts that the bindings hold."""
    from launcher.config.gin_bindings import loaded

    found: list[str] = []

    def look(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            look([*value, *value.values()])
        elif isinstance(value, list | tuple | set):
            for part in value:
                look(part)

    for binding in loaded.bound.values():
        look(binding.value)
    return found
