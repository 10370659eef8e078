"""XLA's compilers in a process of their own, with a time limit and a cache, and the versions of them that will do."""

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import launcher
from launcher.errors import LauncherError, TrainingError, UsageError
from launcher.machine import accelerators, child_process, installation
from launcher.preflight.compile_child import OUTCOME
from launcher.preflight.compiled import Compilation
from launcher.preflight.targets import Target

# The oldest that were tried; what is private in them is in `compile_child`.
MINIMUM = {"jax": "0.10.2", "libtpu": "0.0.51", "jax-cuda12-pjrt": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
# Beside jax and jaxlib, the package that has the compiler for an accelerator, and the extra that brings it.
_COMPILERS = {"tpu": ("libtpu", "preflight"), "gpu": ("jax-cuda12-pjrt", "gpu_preflight")}
_OF_CUDA_13 = "jax-cuda13-pjrt"  # which compiles as well
CHILD = (sys.executable, "-m", "launcher.preflight.compile_child")

_KEPT = "HloProto"  # what the cache keeps, which older versions of it did not
_DECIDING = "LIBTPU_INIT_ARGS"  # of the environment, what changes a compilation
_SYMBOL = re.compile(r"@[\w.$-]+")
# Leans on XLA: StableHLO's text writes private functions so. Noticed by tests/preflight/test_compiler.py. Then: change
# the pattern; only the key of the compile cache is affected.
_PRIVATE_FUNCTION = re.compile(r"func\.func private (@[\w.$-]+)")


def default_cache_dir(environ: Mapping[str, str]) -> str:
    """`launcher/preflight` in the user's cache: $XDG_CACHE_HOME, else ~/.cache."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "launcher", "preflight")


def require_versions(accelerator: str = "tpu") -> dict[str, str]:
    """Versions of jax, jaxlib and the compiler for an accelerator, "tpu" or "gpu"; imports none of them.

    Raises:
      UsageError: one is missing, older than what was tried, or does not go with the others.
    """
    found = {}
    compiler = _COMPILERS[accelerator][0]
    if accelerator == "gpu" and any(importlib.metadata.distributions(name=_OF_CUDA_13)):
        compiler = _OF_CUDA_13
    for name in ("jax", "jaxlib", compiler):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise UsageError(
                f"--mode=preflight needs the {accelerator.upper()} compiler, and {name} is not installed (no "
                f"{accelerator.upper()} is needed): {_remedy(accelerator)}"
            ) from None
    for name, minimum in MINIMUM.items():
        if name in found and accelerators.older(found[name], minimum):
            raise UsageError(f"--mode=preflight: {name} {found[name]} is older than {minimum}: {_remedy(accelerator)}")
    if accelerator == "gpu" and found[compiler] != found["jaxlib"]:
        raise UsageError(
            f"--mode=preflight: {compiler} {found[compiler]} does not go with jaxlib {found['jaxlib']}, the versions "
            f"must be the same: pip install {compiler}=={found['jaxlib']}"
        )
    return found


def _remedy(accelerator: str) -> str:
    compiler, extra = _COMPILERS[accelerator]
    machines = ("x86_64",) if accelerator == "tpu" else ("x86_64", "aarch64")
    if platform.system() != "Linux" or platform.machine() not in machines:
        here = f"{platform.system()} on {platform.machine()}"
        return f"{compiler} has wheels for Linux on {' and '.join(machines)}, and this is {here}"
    return installation.jax_command(extra)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """Compiles programs for devices that need not be there, and keeps the results in a folder, made when needed.

    Args:
      timeout_seconds: for one compilation.
      child: command that starts the compiling process; for tests.
    """

    cache_dir: str
    timeout_seconds: float
    child: Sequence[str] = CHILD

    def compile(self, stablehlo: str, where: Target) -> Compilation:
        """Compiles MLIR text for all replicas of a target, or finds what came of it before.

        Raises:
          TrainingError: this machine has too little memory for the compiler: running it again here will not help.
          LauncherError: the compiler died.
          UsageError: no answer within the time, the compiler is not installed or its version does not fit, or the cache
            cannot be written.
        """
        request, versions = where.compile_request(), require_versions(where.accelerator)
        folder = Path(self.cache_dir).expanduser()
        entry = folder / f"{_key(stablehlo, [*where.xla_flags, request, versions])}.json.gz"
        kept = _read(entry)
        if kept is not None:
            return Compilation(**kept, cached=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            asked = {"stablehlo": stablehlo, "xla_flags": where.xla_flags, **request}
            with child_process.asked(self.child, asked, environ=_environment(), seconds=self.timeout_seconds) as (
                compiling,
                code,
                lines,
            ):
                if code is None:
                    raise UsageError(
                        f"--preflight_timeout={self.timeout_seconds:g} was too short for {where.name}; give it more"
                    )
                if code:
                    raise _death(code, lines, where)
                outcome = _read(compiling / OUTCOME)
                if outcome is None:
                    raise LauncherError(f"{_compiler_for(where)} left no result for {where.name}")
                if unsupported := outcome.pop("unsupported"):
                    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
                    tried = " and ".join(f"{name} {version}" for name, version in MINIMUM.items() if name in versions)
                    raise UsageError(
                        f"--mode=preflight: {_compiler_for(where)} of these versions cannot be used ({installed}: "
                        f"{unsupported}); it was tried with {tried}"
                    )
                partial = entry.with_suffix(f".{os.getpid()}")
                with gzip.open(partial, "wt", encoding="utf-8") as file:
                    json.dump(outcome, file)
                partial.replace(entry)
        except OSError as error:
            raise UsageError(f"--preflight_cache={folder}: {error.strerror}; choose another") from None
        return Compilation(**outcome, cached=False)


def _key(stablehlo: str, target: list[Any]) -> str:
    deciding = [_KEPT, *target, {_DECIDING: os.environ.get(_DECIDING, "")}]
    parts = [_named_by_order(stablehlo), json.dumps(deciding, sort_keys=True)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _named_by_order(stablehlo: str) -> str:
    """The program with its functions named by their order: TensorFlow numbers some of them through a whole process."""
    numbers: dict[str, str] = {}
    for name in _PRIVATE_FUNCTION.findall(stablehlo):
        numbers.setdefault(name, f"@{len(numbers)}")
    return _SYMBOL.sub(lambda found: numbers.get(found[0], found[0]), stablehlo)


def _compiler_for(where: Target) -> str:
    return f"the {where.accelerator.upper()} compiler"


def _environment() -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    root = str(Path(launcher.__file__).parent.parent)  # this very launcher, wherever the working directory is
    return environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH")))),
        # Leans on libtpu: these variables keep it from looking for a TPU, a metadata server and other processes.
        # Noticed by tests/preflight/test_preflight.py. Then: look for their successors in the log of a compilation that
        # hangs.
        "JAX_PLATFORMS": "cpu",  # JAX itself must not look for the devices that it compiles for
        "TPU_SKIP_MDS_QUERY": "1",  # nor ask a cloud's metadata server, which is not there
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process at a time aborts on a lock file
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _death(code: int, lines: Sequence[str], where: Target) -> LauncherError:
    if code == -signal.SIGKILL or any("bad_alloc" in line or "MemoryError" in line for line in lines):
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return TrainingError(
            f"{_compiler_for(where)} was killed while compiling for {where.name}: this machine's memory "
            f"({gib:.1f} GiB) is most likely too small for it. Run on a machine with more, end other programs, or "
            "try a smaller model"
        )
    return LauncherError(
        f"{_compiler_for(where)}, compiling for {where.name}, {child_process.describe_end(code, lines)}"
    )


def _read(path: Path) -> dict[str, Any] | None:
    """Content of a file; None when there is nothing, or nothing whole."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, EOFError, ValueError):
        return None
    return found if isinstance(found, dict) else None
