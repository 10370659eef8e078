"""Child process of the doctor, for a part of the examination that may crash, hang or print.

The process writes what it finds out to a file, an answer a line, so that what it knew before it died is not lost.
"""

import contextlib
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_DONE, UsageError
from launcher.errors.failures import unwrap
from launcher.machine import child_process

_PACKAGE = __name__.rpartition(".")[0]
# What TensorFlow says whenever it starts.
_NOISE = ("before absl::InitializeLog()", "oneDNN custom operations are on")

_Topic = Callable[[dict[str, Any]], Mapping[str, Any] | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The process's answer on one topic: values, the message of a user's mistake, or another error in one line."""

    topic: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refused: str = ""
    error: str = ""

    @property
    def problem(self) -> str:
        """Message instead of values; empty without."""
        return self.refused or self.error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChildResult:
    """The result of the process: its answers by topic, all it printed, and how it ended.

    Attributes:
      returncode: negative for the signal that ended it; None when it was killed because its time was over.
    """

    answers: Mapping[str, Answer]
    log: str
    returncode: int | None
    seconds: float

    @property
    def how(self) -> str:
        """End of the process in words, with the last lines it printed."""
        lines = [line for line in self.log.splitlines() if line.strip() and not any(noise in line for noise in _NOISE)]
        if self.returncode is None:
            return f"did not end within {self.seconds:.0f} s and was stopped{child_process.last_words(lines)}"
        return child_process.describe_end(self.returncode, lines)


def run(module: str, request: Mapping[str, Any], *, environ: Mapping[str, str], timeout_seconds: float) -> ChildResult:
    """Runs a module of this package, which calls `answer_topics` with a request in JSON, to its end or to the end of
    its time; nothing of it is left then.
    """
    started = time.monotonic()
    command = [sys.executable, "-m", f"{_PACKAGE}.{module}"]
    with child_process.asked(command, request, environ=environ, seconds=timeout_seconds) as (folder, code, lines):
        return ChildResult(
            answers=_read(folder / "answers"),
            log="\n".join(lines),
            returncode=code,
            seconds=time.monotonic() - started,
        )


def _read(path: Path) -> dict[str, Answer]:
    answers = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # the line that it was killed over
            answer = Answer(**json.loads(line))
            answers[answer.topic] = answer
    return answers


def answer_topics(folder: str, topics: Mapping[str, _Topic], *, essential: str) -> int:
    """In the process: takes the topics in order and writes the answers to a folder, `run`'s argument; returns the exit
    code.

    A topic makes JSON values of the request, or None for no answer. One that raises is answered with the error, and the
    others are still taken, but not after the `essential` one. Each may leave something for later ones in the request.
    """
    request = child_process.request_in(folder)
    with Path(folder, "answers").open("w", encoding="utf-8") as file:
        for topic, find_out in topics.items():
            answer = _answer(topic, find_out, request)
            if answer is not None:
                file.write(json.dumps(dataclasses.asdict(answer)) + "\n")
                file.flush()
            if topic == essential and (answer is None or answer.problem):
                break
    return EXIT_DONE


def _answer(topic: str, find_out: _Topic, request: dict[str, Any]) -> Answer | None:
    try:
        values = find_out(request)
    except Exception as error:
        original = unwrap(error)
        if isinstance(original, UsageError):
            return Answer(topic=topic, refused=str(original))
        traceback.print_exc()
        return Answer(topic=topic, error=f"{type(error).__name__}: {error}")
    return None if values is None else Answer(topic=topic, values=values)
