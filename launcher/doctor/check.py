"""A check of the doctor: the context it is given, and the findings it returns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from launcher.doctor import child
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RETRY, EXIT_USAGE, UsageError
from launcher.machine import cluster as cluster_lib

TENSORFLOW_SECONDS = 300.0

_T = TypeVar("_T")

OK = "ok"
WARN = "warn"
FAIL = "fail"

# What nobody needs to run again before it is mended comes first, what may pass by itself last.
_WORST_FIRST = (EXIT_USAGE, EXIT_FAILED, EXIT_RETRY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """One run of the doctor.

    Attributes:
      environ: the process's environment variables.
      gin_files, gin_params, model_dir, strategy, replicas, tpu: as the flags of these names; empty or None: not given.
      wait_seconds: how long the other workers are waited for.
      root: where /proc, /sys and /dev are.
    """

    environ: Mapping[str, str]
    gin_files: tuple[str, ...] = ()
    gin_params: tuple[str, ...] = ()
    model_dir: str | None = None
    strategy: str | None = None
    replicas: int | None = None
    tpu: str | None = None
    wait_seconds: float = 30.0
    root: Path = Path("/")
    _known: dict[Callable[[Context], Any], Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def cluster_or_error(self) -> cluster_lib.Cluster | UsageError:
        """Who the peers are, or why that cannot be told."""
        try:
            return cluster_lib.resolve(self.environ)
        except UsageError as error:
            return error

    @property
    def cluster(self) -> cluster_lib.Cluster:
        """Who the peers are.

        Raises:
          Skip: that cannot be told, which the check `cluster` reports.
        """
        if isinstance(self.cluster_or_error, UsageError):
            raise Skip("the cluster is not known")
        return self.cluster_or_error

    def once(self, find_out: Callable[[Context], _T]) -> _T:
        """What a function returns for this context; it is called once and its result is kept for other checks."""
        if find_out not in self._known:
            self._known[find_out] = find_out(self)
        return cast(_T, self._known[find_out])

    @functools.cached_property
    def tensorflow(self) -> child.ChildResult:
        """What TensorFlow says, in a process of its own."""
        request = {
            name: getattr(self, name)
            for name in ("gin_files", "gin_params", "model_dir", "strategy", "replicas", "tpu")
        }
        return child.run("tensorflow_child", request, environ=self.environ, timeout_seconds=TENSORFLOW_SECONDS)

    def says(self, topic: str) -> child.Answer:
        """TensorFlow's answer on one topic.

        Raises:
          Skip: TensorFlow could not be imported or did not get so far, which the check `tensorflow` reports.
        """
        answer = self.tensorflow.answers.get(topic)
        if answer is None:
            raise Skip("TensorFlow did not get so far")
        return answer

    def read(self, path: str) -> str | None:
        """A file of the system under `root`, stripped; None where it cannot be read."""
        try:
            return (self.root / path).read_text("utf-8", errors="replace").strip()
        except OSError:
            return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One part of the examination.

    Attributes:
      name: that of its findings, and of --doctor_checks.
      looks_at: what at, in a few words.
      run: gives the findings; raises Skip where there is nothing to look at.
      waits_for: what takes long about it, for people; empty when it is quick.
    """

    name: str
    looks_at: str
    run: Callable[[Context], Iterable[Finding]]
    waits_for: str = ""


class Skip(Exception):
    """A check has nothing to look at; the text says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
      check: the check that says so.
      status: "ok", "warn" (it will train, worse than it could) or "fail" (it will not train).
      seen: what was seen, with the values.
      fix: what to do; empty where nothing has to be done.
      exit_code: of a failure, as `launcher.errors` has them; 0 for the others.
    """

    check: str
    status: str
    seen: str
    fix: str = ""
    exit_code: int = EXIT_DONE


def ok(check: str, seen: str) -> Finding:
    return Finding(check=check, status=OK, seen=seen)


def warn(check: str, seen: str, fix: str) -> Finding:
    return Finding(check=check, status=WARN, seen=seen, fix=fix)


def fail(check: str, seen: str, fix: str, *, exit_code: int = EXIT_USAGE) -> Finding:
    """A failure that somebody has to mend (64), unless it is ours (70) or may pass by itself (75)."""
    return Finding(check=check, status=FAIL, seen=seen, fix=fix, exit_code=exit_code)


def worst(findings: Iterable[Finding]) -> str:
    """The worst status there is."""
    found = {finding.status for finding in findings}
    return next((status for status in (FAIL, WARN) if status in found), OK)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without a failure; else 64 if anything has to be mended, 70 if a check broke, 75 if all of it may pass."""
    found = {finding.exit_code for finding in findings if finding.status == FAIL}
    return next((code for code in _WORST_FIRST if code in found), EXIT_DONE)
