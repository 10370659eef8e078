"""What NVIDIA's driver says of the GPUs, without TensorFlow."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from launcher.doctor.context import Context
from launcher.doctor.finding import Finding, Skip, fail, ok, warn

_SECONDS = 30.0
_QUERY = ("index", "name", "driver_version", "memory.used", "memory.total")
# The oldest driver for every release of a CUDA version (NVIDIA, CUDA Toolkit Release Notes, minor version
# compatibility); TensorFlow 2.20 and 2.21 are built for CUDA 12.
_OLDEST = (525, 60)
_CUDA = "CUDA 12"
_MUCH = 0.1


def driver(context: Context) -> Iterator[Finding]:
    """The driver's version, and memory of the GPUs that other programs hold."""
    program = shutil.which("nvidia-smi", path=context.environ.get("PATH"))
    there = sorted(path.name for path in (context.root / "dev").glob("nvidia[0-9]*"))
    if program is None and not there:
        raise Skip("no NVIDIA GPU")
    if program is None:
        yield warn("driver", f"{', '.join(there)}, and no nvidia-smi to ask", "put nvidia-smi on PATH")
        return
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield fail("driver", f"nvidia-smi does not answer within {_SECONDS:.0f} s", "restart this machine")
        return
    if done.returncode != 0:
        words = " ".join((done.stdout + done.stderr).split())[:300]
        yield fail(
            "driver", f"nvidia-smi fails: {words}", "install the driver anew; in a container, run it with --gpus"
        )
        return
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    yield from _findings([row for row in rows if len(row) == len(_QUERY)])


def _findings(rows: list[list[str]]) -> Iterator[Finding]:
    if not rows:
        yield fail("driver", "nvidia-smi lists no GPU", "in a container, run it with --gpus all")
        return
    version = rows[0][2]
    seen = f"NVIDIA {version} with {len(rows)} GPU{'s' if len(rows) > 1 else ''}"
    numbers = [int(part) for part in version.split(".") if part.isdigit()]
    if tuple(numbers[:2]) < _OLDEST:
        yield fail("driver", f"{seen}, too old for {_CUDA}", f"install a driver from {_OLDEST[0]}.{_OLDEST[1]} on")
    else:
        yield ok("driver", seen)
    for index, name, _, used, total in rows:
        if used.isdigit() and total.isdigit() and int(used) > _MUCH * int(total):
            yield warn(
                "driver",
                f"GPU {index} ({name}): {int(used):,} of {int(total):,} MiB are taken by other programs",
                "nvidia-smi lists them: end them, or choose other GPUs with CUDA_VISIBLE_DEVICES",
            )
