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
_NAME = "name"  # the one field that may hold a comma
_FIELDS = ("index", _NAME, "driver_version", "memory.used", "memory.total", "compute_cap", "uuid")
_OLDER = {"clocks_event_reasons.hw_slowdown": "clocks_throttle_reasons.hw_slowdown"}  # by their names from 535 on
_REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')  # old drivers know fewer, and new ones drop some


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


class Answer(NamedTuple):
    """nvidia-smi's answer.

    Attributes:
      gpus: the values of each GPU, by field.
      refused: fields that this driver does not know.
      unread: lines that are no row of such values, such as that a GPU is lost; of a failure all that it said.
      failed: whether it failed, and lists nothing.
    """

    gpus: list[dict[str, str]]
    refused: list[str]
    unread: list[str]
    failed: bool


def ask(program: str, *fields: str) -> Answer:
    """Asks nvidia-smi for some fields of all GPUs, the index first, and once more without each that it refuses.

    Where an older name of a field is known, that is asked for.
    """
    asked, refused = [*fields], list[str]()
    while True:
        command = [program, f"--query-gpu={','.join(asked)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=False)
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        unknown = _REFUSED.search("\n".join(said)) if done.returncode else None
        if unknown is None or unknown[1] not in asked[1:]:
            break
        older = _OLDER.get(unknown[1])
        place = asked.index(unknown[1])
        asked[place : place + 1] = [older] if older else []
        refused += [] if older else [unknown[1]]
    if done.returncode:
        return Answer([], refused, said, True)
    rows, unread = list[dict[str, str]](), list[str]()
    for line in filter(str.strip, done.stdout.splitlines()):
        values = [value.strip() for value in line.split(",")]
        if _NAME in asked and (more := len(values) - len(asked)) > 0:
            at = asked.index(_NAME)
            values[at : at + more + 1] = [", ".join(values[at : at + more + 1])]
        if len(values) == len(asked) and values[0].isdecimal():
            rows.append(dict(zip(asked, values, strict=True)))
        else:
            unread.append(line.strip())
    return Answer(rows, refused, unread, False)


def ask_all(program: str) -> tuple[Answer, tuple[NvidiaGpu, ...]]:
    """nvidia-smi's answer, and the GPUs that it lists."""
    answer = ask(program, *_FIELDS)
    return answer, tuple(NvidiaGpu(*(gpu.get(field, "") for field in _FIELDS)) for gpu in answer.gpus)


@functools.cache
def listed(path: str | None) -> tuple[NvidiaGpu, ...]:
    """All GPUs of this machine, by the driver's program in a search path; where that cannot tell, by their files."""
    if program := shutil.which("nvidia-smi", path=path):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            answer, gpus = ask_all(program)
            if gpus and not answer.unread:  # a GPU that it cannot tell of has a number all the same
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
