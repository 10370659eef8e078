"""Sinks: where the events of a run go besides the console and metrics.jsonl, TensorBoard's among them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.config import gin_files
from launcher.errors import LauncherError

PICTURE = "data:image/png;base64,"
"""What the first part of a sample begins with where a picture was given to the model."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStart:
    """A run, as its sinks are told of it before its first event.

    Attributes:
      plan: what the run resolved to, by name.
      config: text of the operative gin configuration.
      step: the step that it goes on from; 0 for a new run.
      total_steps: the training's last step.
    """

    model_dir: str
    plan: Mapping[str, str]
    config: str
    step: int
    total_steps: int

    @property
    def hyperparameters(self) -> dict[str, bool | int | float | str]:
        """The bindings of the configuration that are one value, by name; references such as `@momentum` as text."""
        found: dict[str, bool | int | float | str] = {}
        for name, value in gin_files.values(self.config).items():
            if isinstance(value, bool | int | float | str):
                found[name] = value
            elif isinstance(value, gin_files.Name) and value.sign == "@":
                found[name] = repr(value)
        return found


class Sink:
    """Takes the events of a run; a subclass answers those that it wants, and recipes bind it in `train.sinks`.

        import gin
        from launcher.reporting.sinks import Sink

        @gin.configurable
        class Bell(Sink):
            def finished(self, summary):
                print("\\a", summary["status"])

    Every worker makes the sinks of its recipe, so that making one must cost nothing; only the chief's are called. What
    one raises is one warning, after which it is left out: it never ends a training. But a LauncherError that `started`
    raises, such as for a missing package, is the user's to mend and ends the run before its first event.
    """

    def started(self, run: RunStart) -> None:
        """The first event is about to come."""

    def train(self, event: Mapping[str, Any]) -> None:
        """A log event of the training: `step`, `loss` and the other numbers of metrics.jsonl."""
        self.measured("train", event)

    def evaluation(self, event: Mapping[str, Any]) -> None:
        """An evaluation: `step`, `loss`, the task's metrics."""
        self.measured("eval", event)

    def measured(self, split: str, event: Mapping[str, Any]) -> None:
        """Either of these two, "train" or "eval"."""

    def samples(self, step: int, rows: Sequence[tuple[str, str, str]]) -> None:
        """What was given, what the model made of it and what was expected, of some evaluation examples."""

    def precision(self, event: Mapping[str, Any], exponents: Mapping[str, Any]) -> None:
        """What was seen of gradients; see `launcher.watch.precision_watch.Sample`."""

    def truncate_after(self, step: int) -> None:
        """What an earlier attempt reported past `step` is about to happen again; called before `started`.

        Also called later, when a run goes back to an earlier step.
        """

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run has ended, whatever ended it; the contents of summary.json."""

    def close(self) -> None:
        """No event follows; again is no error."""


class Sinks:
    """Several sinks as one, of which none can end a training; `start` makes what they are told at first."""

    def __init__(self, sinks: Sequence[Sink], start: Callable[[], RunStart]):
        self._sinks = list(sinks)
        self._start = start
        self._has_started = False

    def tell(self, name: str, *arguments: Any) -> None:
        """Calls the method of this name of each sink; the first event starts them."""
        if not self._has_started and name in ("train", "evaluation", "samples", "precision"):
            self._has_started = True
            run = self._start()
            self._call("started", run)
        self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, name)(*arguments)
            except Exception as error:
                if name == "started" and isinstance(error, LauncherError):
                    raise
                self._sinks.remove(sink)
                raised = f"{type(error).__name__}: {error}"
                _logger.warning("%s gets no more of this run: its %s() raised %s", type(sink).__name__, name, raised)
