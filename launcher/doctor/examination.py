"""Examination of `--mode=doctor`: the table of checks, quick ones first, and their run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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

CHECKS = (
    Check("python", "version and platform that TensorFlow has wheels for", packages.python),
    Check(
        "tensorflow_package", "one distribution that brings TensorFlow, not none or two", packages.tensorflow_package
    ),
    Check("packages", "missing, old, doubled or conflicting packages", packages.packages),
    Check("variables", "environment variables and keras.json that get in the way", variables.variables),
    Check("processor", "the CPU's instructions and the policy for it", host.processor),
    Check("cores", "threads against cores and the container's quota", host.cores),
    Check("memory", "memory that is free within the container's limit", host.memory),
    Check("open_files", "limits on files, processes, file size, locked memory", host.open_files),
    Check("shared_memory", "/dev/shm, for NCCL", host.shared_memory),
    Check("driver", "NVIDIA's driver, and GPU memory that others hold", host.driver),
    Check("cluster", "TF_CONFIG, Slurm, Kubernetes, Cloud TPU", peer_exchange.cluster),
    Check(
        "model_dir",
        "whether --model_dir can be written, and how fast",
        disk_speed.model_dir,
        waits_for="writing 64 MiB, for 5 s at most",
    ),
    Check(
        "peers",
        "this worker's port is free, the others' answer",
        peer_exchange.peers,
        waits_for="waiting for the other workers' doctors",
    ),
    Check("clock", "clocks of the other workers", peer_exchange.clock),
    Check("agreement", "versions of the other workers", peer_exchange.agreement),
    Check(
        "tensorflow",
        "TensorFlow and Keras 3 start",
        tensorflow_checks.tensorflow,
        waits_for="starting TensorFlow in a process of its own",
    ),
    Check("build", "CUDA, cuDNN, NCCL, oneDNN of TensorFlow", tensorflow_checks.build),
    Check("devices", "GPUs and TPUs, and the policy for each", tensorflow_checks.devices),
    Check("gpus", "memory growth, TF32, a product on each GPU", tensorflow_checks.gpus),
    Check("xla", "XLA compiles a function", tensorflow_checks.xla),
    Check("recipe", "--gin_file loads", tensorflow_checks.recipe),
    Check("data", "the recipe's data set is prepared", tensorflow_checks.data),
    Check("strategy", "the strategy that a training would take", tensorflow_checks.strategy),
    Check(
        "collective",
        "all-reduces over replicas and workers: right, and how fast",
        collective.collective,
        waits_for=f"all-reduces, for {collective.LIMIT_SECONDS:.0f} s at most",
    ),
)


def run(checks: Iterable[Check], context: Context, *, as_json: bool = False) -> int:
    """Examines this machine; returns 0, or the exit code of the worst failure."""
    findings, skipped = examine(checks, context, None if as_json else findings_report.show)
    code = exit_code(findings)
    if as_json:
        sys.stdout.write(f"{strict_json.dumps(findings_report.as_json(findings, skipped, code), indent=2)}\n")
    else:
        findings_report.show_end(findings, skipped, code)
    peers = context.cluster_or_error
    is_chief = isinstance(peers, UsageError) or peers.is_chief
    if is_chief and context.model_dir is not None and os.path.isdir(context.model_dir):
        found = findings_report.as_json(findings, [], code)
        with contextlib.suppress(OSError):  # that it cannot be written to is a finding
            strict_json.write(Path(context.model_dir, run_folder.DOCTOR), found)
            report.refresh(context.model_dir)
    return code


def chosen(names: Sequence[str]) -> tuple[Check, ...]:
    """Returns the checks of these names, in the order of `CHECKS`; all for no name, UsageError for one that is none."""
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise UsageError(f"--doctor_checks={','.join(names)}: no check {name!r}{advice(name, known)}")
    return tuple(check for check in CHECKS if not names or check.name in names)


def examine(
    checks: Iterable[Check], context: Context, show: Callable[[Finding], None] | None = None
) -> tuple[list[Finding], list[dict[str, str]]]:
    """Runs checks in order; one that breaks does not stop the others.

    Args:
      show: called with each finding.

    Returns:
      The findings; and of checks that had nothing to look at, "check" and "why".
    """
    findings: list[Finding] = []
    skipped: list[dict[str, str]] = []
    for check in checks:
        found: list[Finding] = []
        try:
            with _announced(check):
                found.extend(check.run(context))  # keeps what came before an error
        except Skip as skip:
            skipped.append({"check": check.name, "why": str(skip)})
        except Exception as error:
            found.append(_broken(error))
        for finding in found:
            findings.append(dataclasses.replace(finding, check=check.name))
            if show is not None:
                show(findings[-1])
    return findings, skipped


@contextlib.contextmanager
def _announced(check: Check) -> Iterator[None]:
    """Says on standard error what a check waits for, once it takes a while."""
    words = f"... {check.name}: {check.waits_for or check.looks_at}\n"
    timer = threading.Timer(_PATIENCE_SECONDS, sys.stderr.write, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _broken(error: Exception) -> Finding:
    seen = f"this check itself broke: {type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("launcher"):
        return fail(seen, f"pip install {error.name}")
    return fail(seen, "please report it with this line; the other checks went on", exit_code=EXIT_FAILED)
