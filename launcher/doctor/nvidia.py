"""NVIDIA's GPUs: what their driver says of them, and whether this TensorFlow can use them."""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from launcher.doctor import packages
from launcher.doctor.check import Context, Finding, fail, ok, warn
from launcher.machine import accelerators, installation
from launcher.machine.accelerators import BFLOAT16_CAPABILITY, CUDA_WHEELS, FLOAT16_CAPABILITY
from launcher.machine.nvidia import DRIVER_SECONDS, VARIABLE, NvidiaGpu, ask, ask_all, choose

_FAULTS = (
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_event_reasons.hw_slowdown",  # by heat, or by what the power supply says
)
_NO_FAULT = re.compile(r"0|No|Not Active|\[?N/A\]?|\[Not Supported\]", re.IGNORECASE)
_UNTOLD = re.compile(r"\[.*(permission|deprecated|function not found|no data).*\]", re.IGNORECASE)
_OFF_THE_BUS = re.compile(r"\): 79\b")  # which only a restart of the machine mends
_CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


@functools.cache
def ask_driver(context: Context) -> tuple[tuple[NvidiaGpu, ...], Finding | None]:
    """The GPUs that NVIDIA's driver lists, and why it lists none, where there is a trace of one."""
    program = shutil.which("nvidia-smi", path=context.environ.get("PATH"))
    there = device_files(context)
    if program is None:
        untold = warn(f"{', '.join(there)}, and no nvidia-smi to ask", "put nvidia-smi on PATH")
        return (), untold if there else None
    try:
        answer, gpus = ask_all(program)
    except subprocess.TimeoutExpired:
        return (), fail(f"nvidia-smi does not answer within {DRIVER_SECONDS:.0f} s", "restart this machine")
    words = " ".join(" ".join(answer.unread).split())[:300]
    if answer.failed:
        return (), fail(f"nvidia-smi fails: {words}", "install the driver anew; in a container, run it with --gpus")
    if words:
        return gpus, fail(f"nvidia-smi says, and it is not read: {words}", "look at that GPU, reset it or its machine")
    return gpus, None if gpus else fail("nvidia-smi lists no GPU", "in a container, run it with --gpus all")


def device_files(context: Context) -> list[str]:
    """Names in /dev of NVIDIA's GPUs."""
    return sorted(path.name for path in (context.root / "dev").glob("nvidia[0-9]*"))


def count(context: Context) -> int:
    """Number of NVIDIA's GPUs that this process may use, by the driver, or its files, and CUDA_VISIBLE_DEVICES."""
    there = ask_driver(context)[0] or [NvidiaGpu(name) for name in device_files(context)]
    return len(choose(context.environ.get(VARIABLE), there))


def faults(context: Context) -> Iterator[Finding]:
    """Findings on memory errors that the driver counts since it started, and on its errors (XID) in the kernel's log.

    Drivers and GPUs that do not count them say so, or refuse to answer.
    """
    path = context.environ.get("PATH")
    if program := shutil.which("nvidia-smi", path=path):
        yield from _counted(program)
    if program := shutil.which("dmesg", path=path):
        log = subprocess.run([program], capture_output=True, text=True, errors="replace", check=False).stdout
        if told := re.findall(r"NVRM: Xid .*", log):
            gone = [line for line in told if _OFF_THE_BUS.search(line)]
            say = fail if gone else warn
            yield say(
                f"{len(told)} error(s) in the kernel's log, {(gone or told)[-1]}", "look it up in NVIDIA's list of XIDs"
            )


def _counted(program: str) -> Iterator[Finding]:
    try:
        answer = ask(program, "index", *_FAULTS)
    except subprocess.TimeoutExpired:
        yield fail(f"nvidia-smi does not answer on faults within {DRIVER_SECONDS:.0f} s", "restart this machine")
        return
    untold = [*answer.refused, *answer.unread]
    for gpu in answer.gpus:
        number = gpu.pop("index")
        told = {name: value for name, value in gpu.items() if not _NO_FAULT.fullmatch(value)}
        untold += [f"{name} of GPU {number} {value}" for name, value in told.items() if _UNTOLD.fullmatch(value)]
        if wrong := [f"{name} {value}" for name, value in told.items() if not _UNTOLD.fullmatch(value)]:
            yield fail(
                f"GPU {number}: {', '.join(wrong)}",
                "look at its cooling, reset it (nvidia-smi -r); if it comes back, replace it",
            )
    if untold:
        yield warn(f"not read of GPUs' faults: {', '.join(untold)}", "nvidia-smi -q -d ECC,PERFORMANCE,ROW_REMAPPER")


def too_old(driver: str, cuda: str, seen: str) -> Finding | None:
    """The finding that a driver is too old for a version of CUDA; None if it is not, or where either is not known."""
    major = re.match(r"\d+", cuda)
    oldest = accelerators.OLDEST_DRIVERS.get(int(major[0])) if major else None
    if not driver or oldest is None or not accelerators.older(driver, oldest):
        return None
    return fail(f"{seen}: the driver is too old for CUDA {cuda}", f"install a driver from {oldest} on")


def can_be_used(context: Context, name: str, capability: list[int] | None) -> Finding:
    """Whether this TensorFlow can use a GPU that it lists, and what to install instead."""
    build, listed = context.says("build").values, ask_driver(context)[0]
    driver, cuda = listed[0].driver if listed else "", str(build.get("cuda_version", "unknown"))
    cudnn, unfit = _cudnn(context, build)
    seen = (
        f"{name}, compute capability {'.'.join(map(str, capability or ())) or 'not known'}, driver "
        f"{driver or 'not known'}: TensorFlow {_version(context)} (CUDA {cuda}, cuDNN {cudnn})"
    )
    if finding := too_old(driver, cuda, f"{seen} cannot use it"):
        return finding
    if unfit:
        return fail(f"{seen} cannot use it: {unfit}", _prebuilt())
    kernels = re.findall(r"(?:sm|compute)_\d+", str(build.get("cuda_compute_capabilities")))
    if capability is None or not kernels:
        return ok(f"{seen} may be able to use it; {_policy(capability)}")
    runs = accelerators.how_it_runs(kernels, (capability[0], capability[1]))
    if runs == accelerators.KERNELS:
        return ok(f"{seen} can use it; {_policy(capability)}")
    if runs == accelerators.PTX:
        return warn(
            f"{seen} has no kernels for it: the driver compiles them at the first start, for half an hour or longer, "
            "and users report that this fails with CUDA_ERROR_INVALID_PTX",
            _with_kernels(capability),
        )
    return fail(f"{seen} cannot use it: it is built for {', '.join(kernels)}", _with_kernels(capability))


def not_used(context: Context, *, quiet: bool) -> Iterator[Finding]:
    """Findings on why TensorFlow lists none of the GPUs that are there; none if `quiet` and no GPU is."""
    there, listed = device_files(context), ask_driver(context)[0]
    number = max(len(there), len(listed))
    if not number:
        if not quiet:
            yield ok("CPU only")
        return
    if not count(context):
        hidden = context.environ.get(VARIABLE)
        yield warn(f"{number} GPU(s) hidden by {VARIABLE}={hidden!r}", "unset it to use them")
        return
    words = [f"{gpu.name}, compute capability {gpu.capability or 'not known'}, driver {gpu.driver}" for gpu in listed]
    seen = "; ".join([f"{number} NVIDIA GPU(s)", *dict.fromkeys(words)])
    build = context.says("build").values
    if not build.get("is_cuda_build"):
        capability = listed[0].compute_capability if listed else None
        fix = _with_kernels(capability, before="pip uninstall -y tensorflow-cpu, then ")
        yield warn(f"{seen}; this TensorFlow {_version(context)} is built for CPUs only", fix)
        return
    missing = re.findall(r"Could not load dynamic library '([^']+)'", context.tensorflow.log)
    seen += "; TensorFlow can use none" + (f" ({', '.join(missing)} missing)" if missing else "")
    driver, cuda = listed[0].driver if listed else "", str(build.get("cuda_version", "unknown"))
    yield too_old(driver, cuda, seen) or fail(seen, _prebuilt())


def _with_kernels(capability: Sequence[int] | None, before: str = "") -> str:
    """Command that installs kernels for a GPU: the newest version, or else an older one."""
    if capability is None:
        return before + _prebuilt()
    gpu = (capability[0], capability[1])
    ways = {version: accelerators.how_it_runs(wheels.kernels, gpu) for version, wheels in CUDA_WHEELS.items()}
    fit = [version for version, way in ways.items() if way == accelerators.KERNELS]
    if list(CUDA_WHEELS)[-1] in fit:
        return before + _prebuilt()
    if fit:
        return f"{before}pip install 'tensorflow[and-cuda]=={fit[-1]}.*'"
    otherwise = "NVIDIA's container (docker/nvidia.Dockerfile) may" if gpu > (9, 0) else "take another GPU or the CPU"
    return f"no wheel of TensorFlow from {next(iter(CUDA_WHEELS))} on has kernels for it; {otherwise}"


def _prebuilt() -> str:
    return f"{installation.command('cuda')}, which brings the CUDA libraries that TensorFlow was built for"


def _cudnn(context: Context, build: Mapping[str, object]) -> tuple[str, str]:
    """The cuDNN that a package brings, and what is wrong with it; the build's own word where there is no package."""
    built = str(build.get("cudnn_version", "unknown"))
    version = next(filter(None, map(packages.installed().get, _CUDNN)), None)
    if version is None:
        return built, ""
    wheels = CUDA_WHEELS.get(_version(context).rpartition(".")[0])
    least = wheels.cudnn if wheels and wheels.cudnn.partition(".")[0] == built else built
    fits = version.partition(".")[0] == built and not accelerators.older(version, least)
    return version, "" if fits or not built.isdigit() else f"it is built for cuDNN {least}"


def _version(context: Context) -> str:
    answer = context.tensorflow.answers.get("import")
    return str(answer.values["tensorflow"]) if answer and not answer.problem else "(version not known)"


def _policy(capability: list[int] | None) -> str:
    if capability is None:
        return "float32"
    if tuple(capability) >= BFLOAT16_CAPABILITY:
        return "mixed_float16 or mixed_bfloat16; float32 as TF32"
    return "mixed_float16" if tuple(capability) >= FLOAT16_CAPABILITY else "float32: mixed_float16 pays from 7.0"
