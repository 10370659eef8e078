"""Sinks: where the events of a run go besides the console and metrics.jsonl, TensorBoard's among them."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.config import gin_files
from launcher.errors import LauncherError
from launcher.machine import exit_barrier
from launcher.reporting.strict_json import Record

PICTURE = "data:image/png;base64,"
"""Beginning of the first part of a sample where a picture was given to the model."""

Samples = Sequence[tuple[str, str, str]]
"""Some evaluation examples: what was given, what the model made of it and what was expected."""

_EVENTS = ("train", "evaluation", "samples", "precision")
_MOST_WAITING = 1000
_PATIENCE_SECONDS = 10.0

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

    Every worker makes the sinks of its recipe, so that making one must cost nothing; only the chief's are called, each
    in a thread of its own, one event after the other. One that is slow, raises or never answers loses events, which is
    said, and costs no step. `started` is tried again with the next event. But a LauncherError that it raises within
    10 s, such as for a missing package, is the user's to mend and ends the run before its first event.
    """

    def started(self, run: RunStart) -> None:
        """The first event is about to come."""

    def train(self, event: Record) -> None:
        """A log event of the training: `step`, `loss` and the other numbers of metrics.jsonl."""
        self.measured("train", event)

    def evaluation(self, event: Record) -> None:
        """An evaluation: `step`, `loss`, the task's metrics."""
        self.measured("eval", event)

    def measured(self, split: str, event: Record) -> None:
        """Either of these two, "train" or "eval"."""

    def samples(self, step: int, rows: Samples) -> None:
        """Some evaluation examples: what was given, what the model made of it and what was expected."""

    def precision(self, event: Record, exponents: Record) -> None:
        """Statistics of gradients; see `launcher.run.actions.precision_watch.Sample`."""

    def truncate_after(self, step: int) -> None:
        """Steps past `step`, which an earlier attempt reported, are about to come again; called before `started`.

        Also called later, when a run goes back to an earlier step.
        """

    def finished(self, summary: Record) -> None:
        """The run has ended, whatever ended it; the contents of summary.json."""

    def close(self) -> None:
        """No event follows; again is no error."""


class Sinks:
    """Several sinks as one, of which none can hold up or end a training; `start` makes what they are told at first."""

    def __init__(self, sinks: Sequence[Sink], start: Callable[[], RunStart]):
        self._outlets = [_Outlet(sink) for sink in sinks]
        self._start = start
        self._has_started = False

    def tell(self, name: str, *arguments: Any) -> None:
        """Has the method of this name of each sink called; the first event starts them."""
        if not self._has_started and name in _EVENTS:
            self._has_started = True
            self._tell("started", self._start())
            deadline = time.monotonic() + _PATIENCE_SECONDS
            for outlet in self._outlets:
                outlet.check_start(deadline - time.monotonic())
        self._tell(name, *arguments)

    def close(self) -> None:
        """Waits until the sinks have taken all events, 10 s at most; again is no error."""
        self._tell("close")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for outlet in self._outlets:
            outlet.join(deadline - time.monotonic())
        self._outlets = []

    def _tell(self, name: str, *arguments: Any) -> None:
        for outlet in self._outlets:
            outlet.tell(name, *arguments)


class _Outlet:
    """A sink, its thread, and the events that it has not taken yet."""

    def __init__(self, sink: Sink):
        self._sink, self._name = sink, type(sink).__name__
        self._waiting: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._starts: RunStart | None = None  # what it is started with, until it has
        self._tried = threading.Event()
        self._refusal: LauncherError | None = None
        self._lost = 0
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._work, name=f"sink {self._name}", daemon=True)

    def tell(self, name: str, *arguments: Any) -> None:
        if self._thread.ident is None:
            self._thread.start()
        if name in _EVENTS and self._waiting.qsize() >= _MOST_WAITING:
            self._lost += 1
            self._say("does not answer: %d events wait for it, and it gets no more until it does", _MOST_WAITING)
        else:
            self._waiting.put((name, arguments))

    def check_start(self, seconds: float) -> None:
        """Raises what `started` says of the user's mistakes."""
        if not self._tried.wait(max(seconds, 0)):
            self._tried.set()
            self._say("has not started after %g s; the training goes on without waiting for it", _PATIENCE_SECONDS)
        elif self._refusal is not None:
            raise self._refusal

    def join(self, seconds: float) -> None:
        self._thread.join(max(seconds, 0))
        if self._thread.is_alive():
            exit_barrier.end_first()  # what the tracker has for the end of the process may wait as long
            self._say("has not answered within %g s at the end, and is left", _PATIENCE_SECONDS)
        if lost := self._lost + self._waiting.qsize():
            self._say("lacks %d events of this run", lost)

    def _work(self) -> None:
        name = ""
        while name != "close":
            name, arguments = self._waiting.get()
            try:
                self._call(name, *arguments)
            except Exception as error:
                self._lost += name in _EVENTS
                if isinstance(error, LauncherError) and not self._tried.is_set():
                    self._refusal = error
                else:
                    method = name if self._starts is None else "started"
                    self._say("lacks events of this run: its %s() raised %s: %s", method, type(error).__name__, error)
            if name == "started":
                self._tried.set()

    def _call(self, name: str, *arguments: Any) -> None:
        if name == "started":
            (self._starts,) = arguments
        if self._starts is not None and name in ("started", *_EVENTS):
            self._sink.started(self._starts)
            self._starts = None
        if name != "started" and (self._starts is None or name not in (*_EVENTS, "finished")):
            getattr(self._sink, name)(*arguments)

    def _say(self, what: str, *arguments: Any) -> None:
        if what not in self._said:
            self._said.add(what)
            _logger.warning(f"%s {what}", self._name, *arguments)
