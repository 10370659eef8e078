"""Checks of the host: CPU cores, memory, limits of the process, NVIDIA's driver, the folder of --model_dir."""

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import PurePosixPath

from launcher.doctor import nvidia
from launcher.doctor.check import Context, Finding, Skip, check, fail, ok, warn
from launcher.errors import EXIT_RETRY, UsageError
from launcher.model_dir import check_model_dir

_THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")

_GIB = 2**30
_MIB = 2**20
# The import of TensorFlow 2.21 and a first operation take 0.75 GiB (ru_maxrss), a small training about twice that.
_LEAST_MEMORY = _GIB
_LITTLE_MEMORY = 2 * _GIB
# Each worker holds connections to all others, and the files of a data set's shards: ImageNet has 1,024.
_FEW_FILES = 4096
# As NVIDIA's containers ask for (NCCL's guide to troubleshooting, "Shared memory": --shm-size=1g).
_LITTLE_SHARED_MEMORY = _GIB

_MUCH_OF_A_GPU = 0.1
# A checkpoint of ResNet-50 with momentum is 200 MB.
_LEAST_SPACE = 2**28
_LITTLE_SPACE = 2 * _GIB


@check("threads against cores and the container's quota")
def cores(context: Context) -> Iterator[Finding]:
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
        yield warn(f"{seen}; {too_many[0]} is more than there are", f"unset it, or make it {whole}")
    elif usable < allowed and not context.environ.get("TF_NUM_INTRAOP_THREADS"):
        yield warn(
            f"{seen}: TensorFlow does not look at the quota, starts {allowed} threads and is throttled",
            f"export TF_NUM_INTRAOP_THREADS={whole} TF_NUM_INTEROP_THREADS={whole}, or raise the container's CPU limit",
        )
    elif usable < 2:
        yield warn(f"{seen}: input and training share one core", "give this process two cores or more")
    else:
        yield ok(seen)


def cpu_quota(context: Context) -> float | None:
    """Cores' worth of time that the control group may use, of this process or of any above it; None without a limit."""
    limits = [(context.read(f"{folder}/cpu.max") or "max 1").split() for folder in control_groups(context)]
    return min((int(quota) / int(period) for quota, period in limits if quota != "max"), default=None)


def control_groups(context: Context) -> list[str]:
    """Folders of this process's control groups, from its own up to the root; of version 2, which all systems have now.

    A container often sees its own group as the root of a path that it does not know.
    """
    lines = (context.read("proc/self/cgroup") or "").splitlines()
    own = [PurePosixPath(line[3:]) for line in lines if line.startswith("0::")]
    return [f"sys/fs/cgroup{above}".rstrip("/") for path in own for above in (path, *path.parents)]


@check("memory that is free within the container's limit")
def memory(context: Context) -> Iterator[Finding]:
    import psutil  # where it is missing, the other checks go on

    total, available = psutil.virtual_memory()[:2]
    seen = f"{total / _GIB:.1f} GiB on this machine, {available / _GIB:.1f} available"
    usable = available
    # Of the control group with the least room.
    free, limit = min(
        filter(None, (_room_in(context, folder) for folder in control_groups(context))), default=(0, total)
    )
    if limit < total:
        usable = min(available, free)
        seen += f"; the container's limit is {limit / _GIB:.1f} GiB, {max(0, free) / _GIB:.1f} of it free"
    if usable < _LEAST_MEMORY:
        yield fail(seen, "TensorFlow alone takes 1 GiB: end other programs, or raise the container's limit")
    elif usable < _LITTLE_MEMORY:
        yield warn(seen, "enough for the smallest recipes only: end other programs, or raise the limit")
    else:
        yield ok(seen)


def _room_in(context: Context, folder: str) -> tuple[int, int] | None:
    """Bytes that are free in a control group and its limit; files in memory make room as soon as it is needed."""
    limit, used, stat = (context.read(f"{folder}/memory.{name}") or "" for name in ("max", "current", "stat"))
    if not limit.isdigit():
        return None
    files = dict(line.split() for line in stat.splitlines()).get("inactive_file", 0)
    return int(limit) - int(used or 0) + int(files), int(limit)


@check("limits on files and locked memory")
def open_files(context: Context) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{_count(soft)} may be open at once (ulimit -n; {_count(hard)} at most)"
    few = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    higher = hard == resource.RLIM_INFINITY or hard >= _FEW_FILES
    raise_hard = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    yield warn(seen, "ulimit -n 65536" if higher else raise_hard) if few else ok(seen)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and (context.root / "dev/infiniband").is_dir():
        yield warn(
            f"InfiniBand is there, and {locked / _MIB:,.1f} MiB may be locked in memory (ulimit -l)",
            "NCCL needs more for it: ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


@check("/dev/shm, for NCCL")
def shared_memory(context: Context) -> Iterator[Finding]:
    if platform.system() != "Linux":
        raise Skip("NCCL is for Linux")
    gpus = len(nvidia.device_files(context))
    try:
        system = os.statvfs(context.root / "dev/shm")
    except OSError:
        yield warn("there is no /dev/shm", "mount a tmpfs of 1 GiB there")
        return
    size, free = system.f_frsize * system.f_blocks, system.f_frsize * system.f_bavail
    seen = f"/dev/shm has {size / _MIB:,.0f} MiB, {free / _MIB:,.0f} free"
    if min(size, free) >= _LITTLE_SHARED_MEMORY:
        yield ok(seen)
    elif gpus > 1:
        yield warn(
            f"{seen}, for NCCL between {gpus} GPUs",
            "docker run --shm-size=1g; on Kubernetes, an emptyDir with medium: Memory on /dev/shm",
        )
    else:
        yield ok(f"{seen}; only NCCL between several GPUs would need more")


@check("NVIDIA's driver, its errors, and GPU memory that others hold")
def driver(context: Context) -> Iterator[Finding]:
    gpus, refusal = nvidia.ask_driver(context)
    if refusal is not None:
        yield refusal
    if not gpus:
        if refusal is None:
            raise Skip("no NVIDIA GPU")
        return
    seen = f"NVIDIA {gpus[0].driver} with {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
    yield nvidia.too_old(gpus[0].driver, "12", seen) or ok(seen)
    for gpu in gpus:
        used, total = gpu.used, gpu.total
        if used.isdigit() and total.isdigit() and int(used) > _MUCH_OF_A_GPU * int(total):
            yield warn(
                f"GPU {gpu.number} ({gpu.name}): {int(used):,} of {int(total):,} MiB are taken by other programs",
                "nvidia-smi lists them: end them, or choose other GPUs with CUDA_VISIBLE_DEVICES",
            )
    yield from nvidia.faults(context)


@check("whether --model_dir can be written, and its room")
def model_dir(context: Context) -> Iterator[Finding]:
    if not (context.request.model_dir or context.request.gin_file):
        raise Skip("neither --model_dir nor --gin_file is given")
    name = context.request.run_dir
    if "://" in name:  # which only TensorFlow can reach
        fix = "check the name and the rights of this machine's account; a bucket may be mounted instead, with gcsfuse"
        problem = context.says("model_dir").problem
        yield fail(f"{name}: {problem}", fix) if problem else ok(f"{name}: can be written")
        return
    try:
        check_model_dir(name)
    except UsageError as error:
        seen = str(error).partition("; choose")[0]
        yield fail(seen, "choose another --model_dir, or mend the rights of that folder")
        return
    folder = os.path.abspath(name)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".doctor-"):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        yield fail(f"{name} in {folder}: {error.strerror or error}", "choose another --model_dir")
        return
    seen = f"{name}: {free / 1e9:,.1f} GB free in {folder}"
    if free < _LEAST_SPACE:
        yield fail(seen, "make room there, or choose another --model_dir", exit_code=EXIT_RETRY)
    elif free < _LITTLE_SPACE:
        yield warn(seen, "make room, or Checkpoints.keep = 2")
    else:
        yield ok(seen)
