"""Examination of `--mode=doctor`: the table of checks, quick ones first, and their run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launcher.doctor import (
    collective,
    disk_speed,
    findings_report,
    host,
    packages,
    peer_exchange,
    tensorflow_checks,
    variables,
)
from launcher.doctor.check import Check, Context, Finding, Skip, exit_code, fail
from launcher.errors import EXIT_FAILED, UsageError, advice
from launcher.reporting import report, run_folder, strict_json

_PATIENCE_SECONDS = 1.0
_TENSORFLOW = "starting TensorFlow in a process of its own"

CHECKS = (
    Check(name="python", looks_at="version and platform that TensorFlow has wheels for", run=packages.python),
    Check(
        name="tensorflow_package",
        looks_at="one distribution that brings TensorFlow, not none or two",
        run=packages.tensorflow_package,
    ),
    Check(name="packages", looks_at="missing, old, doubled or conflicting packages", run=packages.packages),
    Check(
        name="variables", looks_at="environment variables and keras.json that get in the way", run=variables.variables
    ),
    Check(name="processor", looks_at="the CPU's instructions and the policy for it", run=host.processor),
    Check(name="cores", looks_at="threads against cores and the container's quota", run=host.cores),
    Check(name="memory", looks_at="memory that is free within the container's limit", run=host.memory),
    Check(name="open_files", looks_at="limits on files, processes, file size, locked memory", run=host.open_files),
    Check(name="shared_memory", looks_at="/dev/shm, for NCCL", run=host.shared_memory),
    Check(name="driver", looks_at="NVIDIA's driver, and GPU memory that others hold", run=host.driver),
    Check(name="cluster", looks_at="TF_CONFIG, Slurm, Kubernetes, Cloud TPU", run=peer_exchange.cluster),
    Check(
        name="model_dir",
        looks_at="whether --model_dir can be written, and how fast",
        run=disk_speed.model_dir,
        waits_for="writing 64 MiB, for 5 s at most",
    ),
    Check(
        name="peers",
        looks_at="this worker's port is free, the others' answer",
        run=peer_exchange.peers,
        waits_for="waiting for the other workers' doctors",
    ),
    Check(name="clock", looks_at="clocks of the other workers", run=peer_exchange.clock),
    Check(name="agreement", looks_at="versions of the other workers", run=peer_exchange.agreement),
    Check(
        name="tensorflow",
        looks_at="TensorFlow and Keras 3 start",
        run=tensorflow_checks.tensorflow,
        waits_for=_TENSORFLOW,
    ),
    Check(name="build", looks_at="CUDA, cuDNN, NCCL, oneDNN of TensorFlow", run=tensorflow_checks.build),
    Check(name="devices", looks_at="GPUs and TPUs, and the policy for each", run=tensorflow_checks.devices),
    Check(name="gpus", looks_at="memory growth, TF32, a product on each GPU", run=tensorflow_checks.gpus),
    Check(name="xla", looks_at="XLA compiles a function", run=tensorflow_checks.xla),
    Check(name="recipe", looks_at="--gin_file loads", run=tensorflow_checks.recipe),
    Check(name="data", looks_at="the recipe's data set is prepared", run=tensorflow_checks.data),
    Check(name="strategy", looks_at="the strategy that a training would take", run=tensorflow_checks.strategy),
    Check(
        name="collective",
        looks_at="all-reduces over replicas and workers: right, and how fast",
        run=collective.collective,
        waits_for=f"all-reduces, for {collective.LIMIT_SECONDS:.0f} s at most",
    ),
)


def run(checks: Iterable[Check], context: Context, *, as_json: bool = False) -> int:
    """Examines this machine; returns 0, or the exit code of the worst failure."""
    shown = findings_report.JsonReport() if as_json else findings_report.TextReport()
    findings = examine(checks, context, shown)
    code = exit_code(findings)
    shown.end(findings, code)
    peers = context.cluster_or_error
    is_chief = isinstance(peers, UsageError) or peers.is_chief
    if is_chief and context.model_dir is not None and os.path.isdir(context.model_dir):
        content = strict_json.dumps(findings_report.as_json(findings, [], code), indent=2)
        with contextlib.suppress(OSError):  # that it cannot be written to is a finding
            strict_json.replace_file(Path(context.model_dir, run_folder.DOCTOR), f"{content}\n")
            report.refresh(context.model_dir)
    return code


def chosen(names: Sequence[str]) -> tuple[Check, ...]:
    """Returns the checks of these names, in the order of `CHECKS`; all for no name.

    Raises:
      UsageError: there is no such check.
    """
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise UsageError(f"--doctor_checks={','.join(names)}: no check {name!r}{advice(name, known)}")
    return tuple(check for check in CHECKS if not names or check.name in names)


def examine(checks: Iterable[Check], context: Context, shown: findings_report.DoctorReport) -> list[Finding]:
    """Runs checks in order and returns their findings; one that breaks does not stop the others."""
    findings: list[Finding] = []
    for check in checks:
        found: list[Finding] = []
        try:
            with _announced(check, shown):
                found.extend(check.run(context))  # keeps what came before an error
        except Skip as skip:
            shown.skip(check.name, str(skip))
        except Exception as error:
            found.append(_broken(check.name, error))
        for finding in found:
            shown.finding(finding)
        findings += found
    return findings


@contextlib.contextmanager
def _announced(check: Check, shown: findings_report.DoctorReport) -> Iterator[None]:
    """Reports what a check waits for, once it takes a while."""
    timer = threading.Timer(_PATIENCE_SECONDS, shown.wait, (check.name, check.waits_for or check.looks_at))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _broken(name: str, error: Exception) -> Finding:
    seen = f"this check itself broke: {type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("launcher"):
        return fail(name, seen, f"pip install {error.name}")
    return fail(name, seen, "please report it with this line; the other checks went on", exit_code=EXIT_FAILED)
