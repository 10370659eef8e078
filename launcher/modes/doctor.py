"""`--mode=doctor`: whether this machine and its peers are fit. Imports no TensorFlow, which may be missing."""

import os

from launcher.doctor import examination
from launcher.doctor.check import Context
from launcher.errors import EXIT_DONE, UsageError
from launcher.modes import DoctorRequest


def run(request: DoctorRequest) -> int:
    """Examines this machine; see `examination.run`."""
    checks = examination.chosen(request.doctor_checks)
    if request.doctor_wait <= 0:
        raise UsageError(f"--doctor_wait={request.doctor_wait:g}: must be more than 0 seconds")
    if request.dry_run:
        examination.plan(checks)
        return EXIT_DONE
    context = Context(
        environ=os.environ,
        gin_files=request.gin_file,
        gin_params=request.gin_param,
        model_dir=request.model_dir,
        strategy=request.strategy,
        replicas=request.replicas,
        tpu=request.tpu,
        wait_seconds=request.doctor_wait,
    )
    return examination.run(checks, context, in_json=request.json)
