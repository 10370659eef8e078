"""The words of a log event: how far, how good, how fast, how long to go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.reporting import strict_json
from launcher.reporting.metrics_file import LAST_FIELDS
from launcher.reporting.units import clock

_NOT_THE_TASKS = ("step", "loss", *LAST_FIELDS)


class ProgressText:
    """Words a training event: step, loss, the task's metrics, speed, loss scale when it is not 1, time to go.

    Args:
        total_steps: The training's last step.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float]):
        self.total_steps = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def text(self, event: Mapping[str, Any], width: int | None = None) -> str:
        """Returns the words; within `width` characters, those of speed and time to go rather than measurements."""
        step = int(event["step"])
        place, measured, pace, scale = [f"step {step}/{self.total_steps}"], _measurements(event), [], []
        if "examples_per_second" in event:
            pace = [f"{strict_json.number(event['examples_per_second']):,.0f} examples/s"]
        if strict_json.number(event.get("loss_scale", 1)) != 1:
            scale = [f"loss scale {strict_json.number(event['loss_scale']):g}"]
        to_go = self._time_to_go(step)

        def text() -> str:
            return "  ".join([*place, *measured, *pace, *scale, *to_go])

        while width is not None and len(text()) > width and (scale or measured):
            (scale or measured).pop()
        return text()

    def _time_to_go(self, step: int) -> list[str]:
        """The pace since the first event, so without the compilation before it, and with evaluations and saves."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, since = self._first
        if not first_step < step < self.total_steps:
            return []
        return [f"ETA {clock((now - since) / (step - first_step) * (self.total_steps - step))}"]


def evaluation_text(event: Mapping[str, Any]) -> str:
    """Words an evaluation: step, loss, the task's metrics."""
    return "  ".join([f"evaluation at step {int(event['step'])}", *_measurements(event)])


def _measurements(event: Mapping[str, Any]) -> list[str]:
    names = [name for name in ("loss", *event) if name in event]
    shown = dict.fromkeys(name for name in names if name == "loss" or name not in _NOT_THE_TASKS)
    return [f"{name} {strict_json.number(event[name]):.4g}" for name in shown]
