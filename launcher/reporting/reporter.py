"""Tells people and programs how a run goes: console, metrics.jsonl, TensorBoard, at the end a summary and a page."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from launcher.errors import EXIT_DONE
from launcher.reporting import panels
from launcher.reporting.console import make_console
from launcher.reporting.metrics_file import MetricsFile, MetricsWriteError
from launcher.reporting.report import FILE_NAME as REPORT
from launcher.reporting.report import LiveReport
from launcher.reporting.run_folder import RunRecord
from launcher.reporting.sinks import RunStart, Samples, Sink, Sinks
from launcher.reporting.strict_json import Record
from launcher.reporting.summary import SummaryWriteError, write_summary
from launcher.reporting.tensorboard import TensorBoard

_logger = logging.getLogger(__name__)


class Reporter:
    """Fans every event out to the console, metrics.jsonl and the sinks; only the chief shows and writes anything.

    Nothing is made on disk before the first event. `close` belongs in a `finally`: it gives the terminal back. A disk
    that takes no events does not end a training: that is said once, and events wait in memory for room.

    Args:
        total_steps: The training's last step.
        is_chief: Whether this process reports. Elsewhere every method returns at once.
        stream: The console's stream; standard output when None.
        epochs: Those that the console tells of; None where it tells of log events and evaluations.
        clock: Counts the seconds that train.
        config: Gives the text of the operative configuration, once the first event is there.
    """

    def __init__(
        self,
        *,
        model_dir: str,
        total_steps: int,
        is_chief: bool,
        stream: TextIO | None = None,
        sinks: Sequence[Sink] = (),
        config: Callable[[], str] = str,
        epochs: panels.Epochs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._model_dir = model_dir
        self._total_steps = total_steps
        self._is_chief = is_chief
        self._events_wait = False
        self._first_step = 0
        self._config, self._epochs = config, epochs
        self.of_epoch: Callable[[], Mapping[str, float]] = dict
        self._last: Record = {}
        if not is_chief:
            return
        self._console = make_console(total_steps=total_steps, stream=stream, clock=clock, epochs=epochs)
        self._metrics = MetricsFile(model_dir)
        self._page = LiveReport(model_dir)
        self._plan: dict[str, str] = {}
        self._sinks = Sinks([TensorBoard(str(Path(model_dir, "tensorboard"))), *sinks], self._run_start)

    def plan(self, lines: Mapping[str, str], *, again: bool = False) -> None:
        """Shows the resolved plan as a table, of which the sinks are told, too.

        If `again`, an attempt before this one has just shown it: only its notes are shown then.
        """
        if self._is_chief:
            self._plan = dict(lines)
            left_out = lines if again else panels.OF_RECIPES if self._epochs else ()
            shown = {name: line for name, line in lines.items() if name.startswith("note") or name not in left_out}
            if shown:
                self._console.plan(shown)

    def waiting(self, text: object) -> AbstractContextManager[None]:
        """Shows what is being waited for while the block is open, and for how long; a text may change meanwhile."""
        return self._console.waiting(text) if self._is_chief else contextlib.nullcontext()

    def progress(self, step: int) -> None:
        """Shows how far the training is, where a person looks on; no log event."""
        if self._is_chief:
            self._console.progress(step)

    def begin(self, record: RunRecord) -> None:
        """Keeps what a training begins with, for run.json and the report; both are written with the first event."""
        if self._is_chief:
            self._page.begin(record)

    def train(self, event: Record) -> None:
        """Reports training up to `event["step"]`: loss, the task's metrics, and the fields of `MetricsFile`."""
        if self._is_chief:
            self._guarded(self._metrics.append, "train", event)
            self._sinks.tell("train", event)
            self._last = event
            self._console.train({**event, **self.of_epoch()})
            self._page.event()

    def evaluation(self, event: Record) -> None:
        """Reports an evaluation: step, loss, the task's metrics."""
        if self._is_chief:
            self._guarded(self._metrics.append, "eval", event)
            self._sinks.tell("evaluation", event)
            if self._epochs is None or event["step"] % self._epochs.steps:
                self._console.evaluation(event)
            self._page.event()

    def epoch(self, step: int, logs: Mapping[str, float]) -> None:
        """Shows an epoch that ends after `step` steps, by what Keras's callbacks are told of it; no log event."""
        if self._is_chief:
            self._console.epoch({**self._last, **logs, "step": step})

    def samples(self, step: int, make: Callable[[], Samples]) -> None:
        """Reports what the model made of some examples; nothing without any."""
        if self._is_chief and (samples := make()):
            self._sinks.tell("samples", step, samples)
            self._page.samples(step, samples)

    def precision(self, event: Record, exponents: Record) -> None:
        """Reports what was seen of gradients after `event["step"]` steps: see `precision_watch.Sample`."""
        if self._is_chief:
            self._guarded(self._metrics.append, "precision", event)
            self._sinks.tell("precision", event, exponents)

    def spike(self, event: Record) -> None:
        """Reports a spike of loss or gradient norm, or that the run went back for it to `event["step"]`."""
        if self._is_chief:
            self._guarded(self._metrics.append, "spike", event)

    def note(self, text: str) -> None:
        """Shows a line for people: a skipped step, a checkpoint restored."""
        if self._is_chief:
            self._console.note(text)

    def truncate_after(self, step: int, *, evaluated: bool = True) -> int:
        """Forgets what was reported past `step`, from which this attempt goes on, or to which the run goes back.

        Where it is not `evaluated` yet, its evaluation is forgotten, too. Returns how many lines of metrics.jsonl were
        dropped.

        Raises:
            MetricsWriteError: metrics.jsonl cannot be rewritten.
        """
        if not self._is_chief:
            return 0
        self._first_step = max(step, 0)
        self._sinks.tell("truncate_after", step)
        return self._metrics.truncate_after(step, evaluated=evaluated)

    def flush(self) -> None:
        """Waits until the events are on the disk; call before a checkpoint, whose step must find them there."""
        if self._is_chief:
            self._guarded(self._metrics.flush)

    def finish(
        self,
        summary: Record,
        *,
        best: tuple[str, float, int] | None = None,
        commands: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Writes summary.json and report.html, and shows how the run ended; the caller may print then.

        A report that cannot be written is a warning, and so is a summary after a run that failed: what stopped the run
        is the error that people must see.

        Args:
            best: Metric, value and step of the best evaluation, if there was one.
            commands: What can be done next, by what it is for; shown after a run that completed.

        Raises:
            SummaryWriteError: The run completed, but summary.json cannot be written.
        """
        if not self._is_chief:
            return
        self.flush()
        self._console.close()
        try:
            write_summary(self._model_dir, summary)
        except SummaryWriteError as error:
            if summary["exit_code"] == EXIT_DONE:
                raise
            _logger.warning("%s", error)
        self._page.finish()
        self._sinks.tell("finished", summary)
        self._sinks.close()
        report = Path(self._model_dir, REPORT)
        self._console.closing(
            panels.closing_rows(
                summary, total_steps=self._total_steps, best=best, report=str(report) if report.exists() else None
            ),
            commands if summary["exit_code"] == EXIT_DONE else {},
        )

    def close(self) -> None:
        """Gives the terminal back and closes the files; again is no error."""
        if self._is_chief:
            self._console.close()
            self._sinks.close()

    def _run_start(self) -> RunStart:
        return RunStart(
            model_dir=self._model_dir,
            plan=self._plan,
            config=self._config(),
            step=self._first_step,
            total_steps=self._total_steps,
        )

    def _guarded(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except MetricsWriteError as error:
            if not self._events_wait:
                self.note(f"{error.facts} Training goes on; the events wait in memory until there is room.")
            self._events_wait = True
            return
        if self._events_wait:
            self._events_wait = False
            self.note("The events that waited for room have been written.")
