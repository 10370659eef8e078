"""The CPU: cores and the share of them that a container may use, threads, and what its instructions are good for."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import PurePosixPath

from launcher.doctor.context import Context
from launcher.doctor.finding import Finding, fail, ok, warn

_THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
_BFLOAT16 = ("amx_bf16", "avx512_bf16")


def processor(context: Context) -> Iterator[Finding]:
    """What TensorFlow's wheels need of the CPU, and the dtype policy that suits it."""
    flags = _flags(context)
    model = _cpuinfo(context, "model name") or platform.machine()
    if flags and platform.machine() == "x86_64" and "avx" not in flags:
        yield fail("processor", f"{model} has no AVX", "TensorFlow's wheels need AVX: use a newer machine, or build it")
        return
    bfloat16 = [flag for flag in _BFLOAT16 if flag in flags]
    if bfloat16:
        policy = f"multiplies bfloat16 ({', '.join(bfloat16)}): mixed_bfloat16 may be faster than float32 (measure)"
    else:
        policy = "no bfloat16 instructions: float32 is the policy for it"
    yield ok("processor", f"{model}, {policy}")


def cores(context: Context) -> Iterator[Finding]:
    """Cores that this process may use against the threads that TensorFlow will start."""
    there, quota = os.cpu_count() or 1, cpu_quota(context)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    usable = allowed if quota is None else min(float(allowed), quota)
    seen = f"{there} on this machine, {allowed} for this process"
    if quota is not None:
        seen += f", {quota:g} by the container's quota"
    whole = max(1, int(usable))
    too_many = [
        f"{name}={value}"
        for name in _THREADS
        if (value := context.environ.get(name, "")).isdigit() and int(value) > whole
    ]
    if too_many:
        yield warn("cores", f"{seen}; {too_many[0]} is more than there are", f"unset it, or make it {whole}")
    elif usable < allowed and not context.environ.get("TF_NUM_INTRAOP_THREADS"):
        yield warn(
            "cores",
            f"{seen}: TensorFlow does not look at the quota, starts {allowed} threads and is throttled",
            f"export TF_NUM_INTRAOP_THREADS={whole} TF_NUM_INTEROP_THREADS={whole}, or raise the container's CPU limit",
        )
    elif usable < 2:
        yield warn("cores", f"{seen}: input and training share one core", "give this process two cores or more")
    else:
        yield ok("cores", seen)


def cpu_quota(context: Context) -> float | None:
    """Cores' worth of time that the control group may use, of this process or of any above it; None without a limit."""
    quotas = []
    for folder in control_groups(context, "cpu"):
        quota = _quota_of(context, folder)
        if quota is not None:
            quotas.append(quota)
    return min(quotas, default=None)


def _quota_of(context: Context, folder: str) -> float | None:
    both = context.read(f"{folder}/cpu.max")  # version 2: "150000 100000", or "max 100000"
    if both is None:
        quota, period = context.read(f"{folder}/cpu.cfs_quota_us"), context.read(f"{folder}/cpu.cfs_period_us")
        both = f"{quota} {period}"
    parts = both.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) == 0:
        return None
    return int(parts[0]) / int(parts[1])


def control_groups(context: Context, controller: str) -> list[str]:
    """Folders of this process's control groups, from its own up to the root, of version 2 or of one controller."""
    folders = []
    for line in (context.read("proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            bases = [f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}"]
        else:
            continue
        own = PurePosixPath("/", path)
        # A container often sees its own group as the root of a path that it does not know.
        folders += [f"{base}{above}".rstrip("/") for base in bases for above in (own, *own.parents)]
    return list(dict.fromkeys(folders))


def _flags(context: Context) -> set[str]:
    return set((_cpuinfo(context, "flags") or "").split())


def _cpuinfo(context: Context, field: str) -> str | None:
    for line in (context.read("proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None
