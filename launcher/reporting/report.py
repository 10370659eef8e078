"""report.html: one self-contained page on all that the folder of a run holds, to be opened or sent by mail."""

import html
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import launcher
from launcher.errors import UsageError
from launcher.reporting import run_folder, sections, strict_json
from launcher.reporting.page import page
from launcher.reporting.run_folder import RunFolder, RunRecord

FILE_NAME = "report.html"

_EVERY_SECONDS = 30.0
_LARGEST_SHARE = 0.01  # of a run's time that may go into its page

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


def write_report(model_dir: str | Path, *, running: bool = False) -> Path:
    """Writes DIR/report.html from the files in DIR, of which any may be missing, atomically, and returns its path."""
    folder = run_folder.read(model_dir, running=running)
    return strict_json.replace_file(folder.path / FILE_NAME, make_page(folder))


def refresh(model_dir: str | Path) -> None:
    """Writes the page again, after a file of the folder has changed; not being able to is a warning."""
    if "://" in str(model_dir):
        return
    try:
        write_report(model_dir)
    except OSError as error:
        _logger.warning("%s could not be written to %s: %s.", FILE_NAME, model_dir, error)


def write_result(model_dir: str | Path, name: str, content: str) -> str:
    """Writes what a mode found into a folder; returns the file's path, or UsageError where it cannot be written."""
    try:
        return str(strict_json.replace_file(Path(model_dir, name), f"{content}\n"))
    except OSError as error:
        raise UsageError(f"{name} cannot be written to --model_dir={model_dir}: {error.strerror or error}") from None


def make_page(folder: RunFolder) -> str:
    """The page on a folder."""
    made = [_made(make, folder) for make in (*sections.SECTIONS, sections.plan)]
    return page(
        folder.name,
        header=_made(sections.header, folder) or f"<h1>{html.escape(folder.name)}</h1>",
        sections=[section for section in made if section is not None],
        footer=f"Launcher {html.escape(launcher.__version__)}, from the files in {html.escape(str(folder.path))}",
    )


def _made(make: Callable[[RunFolder], _T | None], folder: RunFolder) -> _T | None:
    """A part of the page; None, and a warning, where a file is not as this version writes it: it must end no run."""
    try:
        return make(folder)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        _logger.warning(
            "%s of %s is without its part %r: a file there is damaged or of another version (%r at %s:%d).",
            FILE_NAME, folder.path, make.__name__, error, place.filename, place.lineno,
        )  # fmt: skip
        return None


class LiveReport:
    """Keeps a run's page current while it trains, by a monotonic clock in seconds; its failures are warnings.

    Nothing is written before the first event. The page is written then and at most every 30 seconds, and less often
    where that would take more than a hundredth of the time.
    """

    def __init__(self, model_dir: str, *, clock: Callable[[], float] = time.monotonic):
        self._model_dir = Path(model_dir)
        self._clock = clock
        self._record: RunRecord | None = None
        self._next = clock()
        self._has_warned = False

    def begin(self, record: RunRecord) -> None:
        """Keeps what the run begins with, for run.json."""
        self._record = record

    def samples(self, step: int, samples: Sequence[tuple[str, str, str]]) -> None:
        """Writes samples.json: (what was given, what the model wrote, what was expected) after `step` steps."""
        try:
            strict_json.write(self._model_dir / run_folder.SAMPLES, {"step": step, "rows": samples}, indent=1)
        except OSError as error:
            self._warn(error)

    def event(self) -> None:
        """Writes the page if that is due; call it at log events."""
        started = self._clock()
        if started < self._next:
            return
        self._write(running=True)
        now = self._clock()
        self._next = now + max(_EVERY_SECONDS, (now - started) / _LARGEST_SHARE)

    def finish(self) -> None:
        """Writes the page of the run that has ended."""
        self._write(running=False)

    def _write(self, *, running: bool) -> None:
        try:
            if self._record is not None:
                run_folder.write_record(self._model_dir, self._record)
                self._record = None
            write_report(self._model_dir, running=running)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            _logger.warning("The report of this run could not be written: %s.", error)
        self._has_warned = True
