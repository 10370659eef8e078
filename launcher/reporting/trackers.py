"""Sinks of other programs: two experiment trackers, extras that are imported when a run starts, Kubernetes, Prometheus.

For Prometheus the newest numbers stand on a port of the loopback interface. A sidecar or an agent on the same host
scrapes it.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import logging
import os
import re
import ssl
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gin

from launcher.errors import UsageError
from launcher.machine import installation
from launcher.reporting import strict_json
from launcher.reporting.panels import ProgressText
from launcher.reporting.sinks import RunStart, Sink
from launcher.reporting.strict_json import Record

_LOOPBACK = "127.0.0.1"
_TRAINJOB_SECONDS = 5.0  # between two updates, which is as often as Trainer asks for, and for one

_logger = logging.getLogger(__name__)


@gin.configurable
class WandbSink(Sink):
    """Logs a run to Weights & Biases; the attempts of one model_dir are one run there.

    Args:
      project: its project. What is None, here and below, is W&B's to decide, by WANDB_PROJECT, WANDB_MODE and so on.
      name: of the run; the folder's name where there is no WANDB_NAME.
      mode: "online", "offline" (files in model_dir/wandb, for `wandb sync`) or "disabled".
    """

    def __init__(self, project: str | None = None, name: str | None = None, mode: str | None = None):
        self._settings = {"project": project, "mode": mode, "name": name}
        self._run: Any = None

    def started(self, run: RunStart) -> None:
        wandb: Any = installation.required("wandb", by="train.sinks", extra="wandb")
        folder = Path(run.model_dir).absolute()
        same = hashlib.sha256(str(folder).encode()).hexdigest()[:16]  # for all attempts in a folder
        given = {"name": os.environ.get("WANDB_NAME", folder.name), "id": os.environ.get("WANDB_RUN_ID", same)}
        self._run = wandb.init(
            **{**given, **{name: value for name, value in self._settings.items() if value is not None}},
            resume="allow",
            dir=str(folder),
            config=run.hyperparameters,
            notes="\n".join(f"{name}: {value}" for name, value in run.plan.items()),
            settings=wandb.Settings(silent=True),
        )
        # Its own counter of steps refuses a step that is not larger than the last, as an evaluation's.
        self._run.define_metric("*", step_metric="step")

    def measured(self, split: str, event: Record) -> None:
        self._run.log({"step": event["step"], **_numbers(split, event)})

    def finished(self, summary: Record) -> None:
        if self._run is not None:
            self._run.finish(exit_code=summary["exit_code"])
            self._run = None


@gin.configurable
class MlflowSink(Sink):
    """Logs a run to MLflow; the attempts of one model_dir are one run there.

    Args:
      experiment: its name; MLFLOW_EXPERIMENT_NAME when None, or "launcher".
      name: of the run; the folder's name when None.
      tracking_uri: a server or a database, such as sqlite:///mlflow.db; MLflow's own variables say where when None.
    """

    def __init__(self, experiment: str | None = None, name: str | None = None, tracking_uri: str | None = None):
        self._experiment, self._name, self._uri = experiment, name, tracking_uri
        self._client: Any = None
        self._run = ""

    def started(self, run: RunStart) -> None:
        mlflow: Any = installation.required("mlflow", by="train.sinks", extra="mlflow")
        client = mlflow.MlflowClient(tracking_uri=self._uri)
        named = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "launcher")
        found = client.get_experiment_by_name(named)
        experiment = found.experiment_id if found is not None else client.create_experiment(named)
        name = self._name or Path(run.model_dir).absolute().name
        tags = {"model_dir": str(Path(run.model_dir).absolute())}
        earlier = client.search_runs([experiment], f"tags.model_dir = {tags['model_dir']!r}", max_results=1)
        self._run = (earlier or [client.create_run(experiment, run_name=name, tags=tags)])[0].info.run_id
        self._client = client
        client.update_run(self._run, "RUNNING")
        for name, value in ({} if earlier else run.hyperparameters).items():  # one that is logged cannot change
            client.log_param(self._run, name, value)
        client.log_text(self._run, run.config, "config.gin")

    def measured(self, split: str, event: Record) -> None:
        for name, value in _numbers(split, event).items():
            taken = re.sub(r"[^\w./ -]", "_", name)  # top@5 is none that MLflow takes
            self._client.log_metric(self._run, taken, value, step=int(event["step"]))

    def finished(self, summary: Record) -> None:
        if self._client is not None:
            status = {"completed": "FINISHED", "preempted": "KILLED"}.get(summary["status"], "FAILED")
            self._client.set_terminated(self._run, status)
            self._client = None


def _numbers(split: str, event: Record) -> dict[str, float]:
    return {f"{split}/{name}": strict_json.number(value) for name, value in event.items() if name != "step"}


class TrainJobStatus(Sink):
    """Progress, time to go and numbers in the status of a TrainJob, by the server of Kubeflow Trainer (its KEP-2779).

    Args:
      environ: where that server is, as Trainer tells the containers of a TrainJob.
    """

    URL = "KUBEFLOW_TRAINER_SERVER_URL"

    def __init__(self, environ: Mapping[str, str]):
        self._url, self._certificate = environ[self.URL], environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT")
        self._token = Path(environ.get("KUBEFLOW_TRAINER_SERVER_TOKEN", ""))
        self._next = 0.0
        self._numbers: dict[str, float] = {}
        self._has_failed = False

    def started(self, run: RunStart) -> None:
        self._progress = ProgressText(run.total_steps, time.monotonic)

    def measured(self, split: str, event: Record) -> None:
        self._numbers |= _numbers(split, event)
        step = int(event["step"])
        to_go = self._progress.seconds_to_go(step)
        if time.monotonic() >= self._next:
            self._tell(100 * step // self._progress.total_steps, to_go)

    def finished(self, summary: Record) -> None:
        if summary["status"] == "completed":
            self._tell(100, 0.0)

    def _tell(self, percent: int, seconds: float | None) -> None:
        self._next = time.monotonic() + _TRAINJOB_SECONDS
        status: dict[str, Any] = {
            "progressPercentage": percent,
            "metrics": [{"name": name[:64], "value": f"{value:.6g}"} for name, value in self._numbers.items()][:256],
            "lastUpdatedTime": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        if seconds is not None:
            status["estimatedRemainingSeconds"] = round(seconds)
        content = json.dumps({"trainerStatus": status}).encode()
        try:
            headers = {"Authorization": f"Bearer {self._token.read_text().strip()}", "Content-Type": "application/json"}
            context = ssl.create_default_context(cafile=self._certificate)
            request = urllib.request.Request(self._url, content, headers)
            urllib.request.urlopen(request, timeout=_TRAINJOB_SECONDS, context=context).close()
        except (OSError, ValueError) as error:
            if not self._has_failed:
                _logger.warning("the TrainJob's status was not updated, and is tried again: %s", error)
            self._has_failed = True


class Prometheus(Sink):
    """Serves `launcher_train_loss`, `launcher_eval_accuracy` and so on at http://127.0.0.1:PORT/metrics.

    The port is 1 to 65535, or 0 for any that is free; UsageError where it cannot be had.
    """

    def __init__(self, port: int):
        import prometheus_client  # late: few runs need it

        registry = prometheus_client.CollectorRegistry()
        self._gauge = functools.cache(lambda name: prometheus_client.Gauge(name, name, registry=registry))
        try:
            self._server, _ = prometheus_client.start_http_server(port, addr=_LOOPBACK, registry=registry)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "a port is a number from 0 to 65535"
            raise UsageError(f"--metrics_port={port}: {why}; choose another port") from None
        self.port = self._server.server_port

    def started(self, run: RunStart) -> None:
        self._gauge("launcher_step").set(run.step)
        self._gauge("launcher_total_steps").set(run.total_steps)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def measured(self, split: str, event: Record) -> None:
        self._gauge("launcher_step").set(int(event["step"]))
        for name, value in event.items():
            self._gauge(re.sub(r"\W", "_", f"launcher_{split}_{name}")).set(strict_json.number(value))
