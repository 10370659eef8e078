"""What the system lets this process have: memory, open files, processes, shared memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from launcher.doctor.context import Context
from launcher.doctor.finding import Finding, fail, ok, warn
from launcher.doctor.processor import control_groups

_GIB = 2**30
_MIB = 2**20
# The import of TensorFlow 2.21 and a first operation take 0.75 GiB (ru_maxrss), a small training about twice that.
_LEAST_MEMORY = _GIB
_LITTLE_MEMORY = 2 * _GIB
# Each worker holds connections to all others, and the files of a data set's shards: ImageNet has 1,024.
_FEW_FILES = 4096
# TensorFlow, NCCL and input pipelines start some threads for each core and for each device.
_FEW_PROCESSES = 1024
# As NVIDIA's containers ask for (NCCL's guide to troubleshooting, "Shared memory": --shm-size=1g).
_LITTLE_SHARED_MEMORY = _GIB


def memory(context: Context) -> Iterator[Finding]:
    """Memory that is available, within the container's limit and the shell's."""
    information = dict(_meminfo(context))
    total, available = information.get("MemTotal"), information.get("MemAvailable")
    if total is None or available is None:
        yield warn("memory", "/proc/meminfo does not say", "mount /proc in the container")
        return
    seen = f"{total / _GIB:.1f} GiB on this machine, {available / _GIB:.1f} available"
    usable = available
    for limit, used in _container_memory(context):
        if limit < total:
            usable = min(usable, limit - used)
            seen += f"; the container's limit is {limit / _GIB:.1f} GiB, {max(0, limit - used) / _GIB:.1f} of it free"
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        yield warn(
            "memory",
            f"ulimit -v is {address_space / _GIB:.1f} GiB of addresses, of which TensorFlow reserves many more than it "
            "uses",
            "ulimit -v unlimited",
        )
    if usable < _LEAST_MEMORY:
        yield fail("memory", seen, "TensorFlow alone takes 1 GiB: end other programs, or raise the container's limit")
    elif usable < _LITTLE_MEMORY:
        yield warn("memory", seen, "enough for the smallest recipes only: end other programs, or raise the limit")
    else:
        yield ok("memory", seen)


def _meminfo(context: Context) -> Iterator[tuple[str, int]]:
    for line in (context.read("proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        yield name, int(value.split()[0]) * 1024


def _container_memory(context: Context) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of the control group with the least room."""
    found = []
    for folder in control_groups(context, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = context.read(f"{folder}/{limit_file}"), context.read(f"{folder}/{used_file}")
            if limit and limit.isdigit():
                found.append((int(limit), int(used or 0) - _reclaimable(context, folder)))
    if found:
        yield min(found, key=lambda pair: pair[0] - pair[1])


def _reclaimable(context: Context, folder: str) -> int:
    """Bytes of files that the group has in memory and that make room as soon as it is needed."""
    lines = (context.read(f"{folder}/memory.stat") or "").splitlines()
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("total_inactive_file") or values.get("inactive_file") or 0)


def open_files(context: Context) -> Iterator[Finding]:
    """Files and connections that this process may have open, and processes and threads that this user may start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{_count(soft)} may be open at once (ulimit -n; {_count(hard)} at most)"
    few = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    higher = hard == resource.RLIM_INFINITY or hard >= _FEW_FILES
    raise_hard = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    yield warn("open_files", seen, "ulimit -n 65536" if higher else raise_hard) if few else ok("open_files", seen)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if processes != resource.RLIM_INFINITY and processes < _FEW_PROCESSES:
        yield warn(
            "open_files",
            f"{processes:,} processes and threads for this user (ulimit -u)",
            "TensorFlow starts hundreds of threads on large machines: ulimit -u 65536",
        )
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY:
        yield warn(
            "open_files",
            f"no file may become larger than {size / _MIB:,.0f} MiB (ulimit -f), a checkpoint neither",
            "ulimit -f unlimited",
        )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and (context.root / "dev/infiniband").is_dir():
        yield warn(
            "open_files",
            f"InfiniBand is there, and {locked / _MIB:,.1f} MiB may be locked in memory (ulimit -l)",
            "NCCL needs more for it: ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def shared_memory(context: Context) -> Iterator[Finding]:
    """/dev/shm, through which NCCL connects the GPUs of a machine that cannot reach each other directly."""
    gpus = len(list((context.root / "dev").glob("nvidia[0-9]*")))
    try:
        system = os.statvfs(context.root / "dev/shm")
    except OSError:
        yield warn("shared_memory", "there is no /dev/shm", "mount a tmpfs of 1 GiB there")
        return
    size, free = system.f_frsize * system.f_blocks, system.f_frsize * system.f_bavail
    seen = f"/dev/shm has {size / _MIB:,.0f} MiB, {free / _MIB:,.0f} free"
    if min(size, free) >= _LITTLE_SHARED_MEMORY:
        yield ok("shared_memory", seen)
    elif gpus > 1:
        yield warn(
            "shared_memory",
            f"{seen}, for NCCL between {gpus} GPUs",
            "docker run --shm-size=1g; on Kubernetes, an emptyDir with medium: Memory on /dev/shm",
        )
    else:
        yield ok("shared_memory", f"{seen}; only NCCL between several GPUs would need more")
