"""What the checks share: the request, the machine, and what is found out once for several of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from launcher.doctor import child
from launcher.doctor.finding import Skip
from launcher.errors import UsageError
from launcher.machine import cluster as cluster_lib

TENSORFLOW_SECONDS = 300.0

_T = TypeVar("_T")


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
    def tensorflow(self) -> child.Outcome:
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
