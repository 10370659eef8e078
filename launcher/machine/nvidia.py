"""NVIDIA's GPUs as their driver lists them, and which of them a process may use. Imports no TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import glob
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER_SECONDS = 30.0
_FIELDS = ("index", "name", "driver_version", "memory.used", "memory.total")
_NEWEST_FIELD = "compute_cap"  # old drivers do not know it


class NvidiaGpu(NamedTuple):
    """A GPU in nvidia-smi's words; `capability` is such as "9.0", and empty where the driver does not say."""

    number: str
    name: str = ""
    driver: str = ""
    used: str = ""
    total: str = ""
    capability: str = ""
    uuid: str = ""

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """(major, minor)."""
        version = re.fullmatch(r"(\d+)\.(\d+)", self.capability)
        return (int(version[1]), int(version[2])) if version else None


def ask(program: str, *fields: str) -> subprocess.CompletedProcess[str]:
    """nvidia-smi's answer on some fields, a line for each GPU."""
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=False)


def ask_all(program: str) -> tuple[subprocess.CompletedProcess[str], tuple[NvidiaGpu, ...]]:
    """nvidia-smi's answer, and the GPUs that it lists."""
    done = ask(program, *_FIELDS, _NEWEST_FIELD, "uuid")
    if done.returncode != 0 and _NEWEST_FIELD in done.stdout + done.stderr:
        done = ask(program, *_FIELDS)
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    gpus = [NvidiaGpu(*row) for row in rows if 0 <= len(row) - len(_FIELDS) <= 2]
    return done, () if done.returncode else tuple(gpus)


@functools.cache
def listed(path: str | None) -> tuple[NvidiaGpu, ...]:
    """All GPUs of this machine, by the driver's program in a search path; where that cannot tell, by their files."""
    if program := shutil.which("nvidia-smi", path=path):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if gpus := ask_all(program)[1]:
                return gpus
    files = glob.glob("/proc/driver/nvidia/gpus/*") or glob.glob("/dev/nvidia[0-9]*")
    return tuple(NvidiaGpu(str(number)) for number in range(len(files)))


def visible(environ: Mapping[str, str]) -> list[NvidiaGpu]:
    """The GPUs that one process has, in the order in which CUDA gives them: of MIG's parts, the first alone."""
    chosen = choose(environ.get(VARIABLE), listed(environ.get("PATH")))
    return [*chosen.values()][: 1 if any(name.startswith("MIG-") for name in chosen) else None]


def names(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may give to others, as its variable names them."""
    return [*choose(environ.get(VARIABLE), listed(environ.get("PATH")) or None)]


def choose(named: str | None, there: Sequence[NvidiaGpu] | None) -> dict[str, NvidiaGpu]:
    """The GPUs that CUDA takes by its variable, by their names in it; None for a machine of which nothing is known.

    It takes numbers, UUIDs, or what one UUID alone begins with, all of one kind, up to the first that names no GPU; and
    nothing at all where one is named twice.
    """
    if named is None:
        return {gpu.number: gpu for gpu in there or ()}
    chosen: dict[str, NvidiaGpu] = {}
    names = [name.strip() for name in named.split(",")]
    kind = names[0][:4] if names[0].startswith(("GPU-", "MIG-")) else ""
    for name in names:
        number = re.match(r"\+?\d+", name)  # CUDA reads no further
        if not (name.startswith(kind) if kind else number):
            break
        if there is None:
            fit = [NvidiaGpu(name)]
        elif number:
            fit = [*there[int(number[0]) :][:1]]
        elif kind == "MIG-" or not any(gpu.uuid for gpu in there):  # whose UUIDs are not listed
            fit = [gpu._replace(uuid=name) for gpu in there[:1]]
        else:
            fit = [gpu for gpu in there if gpu.uuid.startswith(name)]
        if len(fit) != 1:
            break
        if name in chosen or fit[0] in chosen.values():
            return {}
        chosen[name] = fit[0]
    return chosen
