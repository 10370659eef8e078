"""`--profile_steps=10:20`: a trace of some steps, for TensorBoard's profiler."""

from __future__ import annotations

import collections
import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from launcher.errors import UsageError
from launcher.run.actions.base import Action, Phase


class ProfiledSteps(NamedTuple):
    """The first and the last step of a trace, counted from 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str, total_steps: int) -> ProfiledSteps:
        """Reads "10:20", of a run with so many steps; UsageError where it is something else or there are no such."""
        first, last = map(int, match.groups()) if (match := re.fullmatch(r"(\d+):(\d+)", text)) else (0, 0)
        if not 2 <= first <= last <= total_steps:
            raise UsageError(
                f"--profile_steps={text}: give the first and the last step, such as --profile_steps=10:20, from 2 on, "
                f"as in step 1 everything is compiled, to {total_steps}, the last of the run"
            )
        return cls(first, last)


def kernels(folder: Path, num_steps: int) -> list[tuple[str, int, float]]:
    """The ten kernels of JAX's newest trace that take most of a GPU: name, how often in all, ms a step."""
    newest = max(folder.glob("plugins/profile/*/*.trace.json.gz"), key=os.path.getmtime, default=None)
    events = json.loads(gzip.decompress(newest.read_bytes()))["traceEvents"] if newest else []
    # Beside a GPU's streams stand others that say the same by module and by operation.
    names = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event.get("name") == "thread_name"
    }
    durations: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "Stream" in names.get((event["pid"], event["tid"]), ""):
            durations[event["name"]].append(event["dur"])
    ranked = sorted(durations.items(), key=lambda item: -sum(item[1]))[:10]
    return [(name, len(times), sum(times) / 1e3 / num_steps) for name, times in ranked]


class ProfileSteps(Action):
    """Traces some steps into MODEL_DIR/tensorboard; TensorBoard shows it under "Profile".

    The profiler is TensorFlow's, or `by_jax` that of JAX, which runs the steps.

    All workers' loops of steps end before and after them. A run that goes on from a step within them traces the rest.
    `folder` is None where this worker makes no trace.
    """

    def __init__(self, steps: ProfiledSteps, folder: str | None, note: Callable[[str], None], *, by_jax: bool):
        self._steps, self._folder, self._note = steps, folder, note
        self._by_jax, self._kernels = by_jax, list[tuple[str, int, float]]()
        self._start, self._stop = tf.profiler.experimental.start, tf.profiler.experimental.stop
        if by_jax:
            import jax  # which need not be there

            self._start, self._stop = jax.profiler.start_trace, jax.profiler.stop_trace
        self._is_due = self._is_open = False

    def steps_until_due(self, step: int) -> int | None:
        self._is_due = self._steps.first - 1 <= step < self._steps.last
        return min((until - step for until in (self._steps.first - 1, self._steps.last) if until > step), default=None)

    def before_steps(self) -> None:
        if self._folder is None or not self._is_due or self._is_open:
            return
        try:
            self._start(self._folder)
            self._is_open = True
        except (tf.errors.OpError, OSError, RuntimeError) as error:  # another profiler runs in this process
            self._give_up(error)

    def after_steps(self, step: int, phase: Phase) -> None:
        if step >= self._steps.last:
            self.close()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            first, last = self._steps
            self._stop()
        except (tf.errors.OpError, OSError, RuntimeError) as error:
            self._give_up(error)
            return
        self._note(f"a trace of steps {first} to {last} is in {self._folder}: see TensorBoard")
        try:
            self._kernels = kernels(Path(str(self._folder)), last - first + 1) if self._by_jax else []
        except Exception as error:  # JAX's file of it is none that this version reads
            self._note(f"the kernels in it are not read: {type(error).__name__}: {error}")

    def summary(self) -> dict[str, Any]:
        return {"kernels": self._kernels} if self._kernels else {}

    def _give_up(self, error: Exception) -> None:
        self._folder = None
        self._note(f"There is no trace of steps: {error}. Training goes on without.")
