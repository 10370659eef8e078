"""A supervisor as a test sees it: its process, its logs and the processes of its workers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from running import is_running


@dataclasses.dataclass(frozen=True)
class LaunchedJob:
    """A supervisor under way or ended, and what its job left in `model_dir`."""

    started: object
    model_dir: Path

    def wait(self):
        return self.started.wait(60)

    def until(self, condition: Callable[[], object]) -> None:
        self.started.wait_until(condition, 60)

    def log(self, attempt: int, rank: int) -> str:
        path = self.model_dir / "logs" / f"attempt_{attempt}" / f"worker_{rank}.log"
        return path.read_text() if path.exists() else ""

    def error(self, attempt: int | None = None) -> dict:
        folder = self.model_dir / "logs" / f"attempt_{attempt}" if attempt else self.model_dir
        return json.loads((folder / "error.json").read_text())

    def attempts(self) -> list[str]:
        return sorted(path.name for path in (self.model_dir / "logs").glob("*"))

    def numbers(self, name: str) -> list[int]:
        """Process ids that the workers wrote to a file."""
        path = self.model_dir / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def running(self) -> list[int]:
        """Which of the workers and their children still run."""
        return [number for number in (*self.numbers("pids"), *self.numbers("children")) if is_running(number)]


def fault(do: str, *, rank: int = 1, attempt: int = 1, step: int = 2, **arguments: object) -> dict[str, object]:
    """What a fake worker is to do, and when; see fake_worker.py."""
    return {"rank": rank, "attempt": attempt, "step": step, "do": do, **arguments}
