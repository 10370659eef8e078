"""A check of the doctor: the context it is given, and the findings it returns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from launcher.doctor import child
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RETRY, EXIT_USAGE, UsageError
from launcher.machine import cluster as cluster_lib
from launcher.modes import DoctorRequest

TENSORFLOW_SECONDS = 300.0

OK = "ok"
WARN = "warn"
FAIL = "fail"

# First what has to be fixed before running again, last what may pass by itself.
_WORST_FIRST = (EXIT_USAGE, EXIT_FAILED, EXIT_RETRY)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """The context of one run of the doctor, which its checks share; equal to itself alone.

    Attributes:
      environ: the process's environment variables.
      root: where /proc, /sys and /dev are.
    """

    environ: Mapping[str, str]
    request: DoctorRequest = dataclasses.field(default_factory=DoctorRequest)
    root: Path = Path("/")

    @functools.cached_property
    def cluster_or_error(self) -> cluster_lib.Cluster | UsageError:
        """The cluster of this process, or the error that keeps it from being resolved."""
        try:
            return cluster_lib.resolve(self.environ)
        except UsageError as error:
            return error

    @property
    def cluster(self) -> cluster_lib.Cluster:
        """The cluster of this process; Skip where it cannot be resolved, which the check `cluster` reports."""
        if isinstance(self.cluster_or_error, UsageError):
            raise Skip("the cluster is not known")
        return self.cluster_or_error

    @functools.cached_property
    def tensorflow(self) -> child.ChildResult:
        """The answers of TensorFlow, which runs in a process of its own."""
        return self.run_child("tensorflow_child", timeout_seconds=TENSORFLOW_SECONDS)

    def run_child(self, module: str, *, timeout_seconds: float) -> child.ChildResult:
        """Runs a module of this package in a process of its own; see `child.run`."""
        request = dataclasses.asdict(self.request)
        return child.run(module, request, environ=self.environ, timeout_seconds=timeout_seconds)

    def says(self, topic: str) -> child.Answer:
        """TensorFlow's answer on one topic; Skip where it did not get so far, as the check `tensorflow` reports."""
        answer = self.tensorflow.answers.get(topic)
        if answer is None:
            raise Skip("TensorFlow did not get so far")
        return answer

    def read(self, path: str) -> str | None:
        """Reads a file of the system under `root`; None where it cannot be read."""
        try:
            return (self.root / path).read_text("utf-8", errors="replace").strip()
        except OSError:
            return None


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of the doctor.

    Attributes:
      name: for --doctor_checks.
      looks_at: what at, in a few words.
      run: gives the findings; raises Skip where there is nothing to look at.
      waits_for: what takes long about it, for people; empty when it is quick.
    """

    name: str
    looks_at: str
    run: Callable[[Context], Iterable[Finding]]
    waits_for: str = ""

    def __call__(self, context: Context) -> Iterable[Finding]:
        return self.run(context)


def check(looks_at: str, *, waits_for: str = "") -> Callable[[Callable[[Context], Iterable[Finding]]], Check]:
    """Makes a check of a function of its name."""
    return lambda run: Check(run.__name__, looks_at, run, waits_for)


class Skip(Exception):
    """Raised by a check that has nothing to look at; the text says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding of a check: a line of the report.

    Attributes:
      check: the name of the check that says so, which its examination fills in.
      status: "ok", "warn" (it will train, worse than it could) or "fail" (it will not train).
      seen: what was seen, with the values.
      fix: what to do; empty where nothing has to be done.
      exit_code: of a failure: to be fixed (64), a defect of ours (70), or one that may pass (75); 0 for the others.
    """

    check: str = ""
    status: str
    seen: str
    fix: str = ""
    exit_code: int = EXIT_DONE


def ok(seen: str) -> Finding:
    return Finding(status=OK, seen=seen)


def warn(seen: str, fix: str) -> Finding:
    return Finding(status=WARN, seen=seen, fix=fix)


def fail(seen: str, fix: str, *, exit_code: int = EXIT_USAGE) -> Finding:
    return Finding(status=FAIL, seen=seen, fix=fix, exit_code=exit_code)


def worst(findings: Iterable[Finding]) -> str:
    """Returns the worst status of findings."""
    statuses = {finding.status for finding in findings}
    return next((status for status in (FAIL, WARN) if status in statuses), OK)


def exit_code(findings: Iterable[Finding]) -> int:
    """Exit code of findings: 0 without a failure, 64 if anything has to be fixed, 70 if a check broke, else 75."""
    codes = {finding.exit_code for finding in findings if finding.status == FAIL}
    return next((code for code in _WORST_FIRST if code in codes), EXIT_DONE)
