"""`--mode=preflight`: a recipe's step compiled for TPUs and GPUs that nobody has rented yet."""

import os
from collections.abc import Sequence

from launcher.config import gin_bindings
from launcher.errors import UsageError
from launcher.modes import PreflightRequest
from launcher.preflight import gpus, slices
from launcher.preflight.command import Preflight
from launcher.preflight.compiler import Compiler, default_cache_dir
from launcher.preflight.slice_finding import Case, Examiner
from launcher.reporting.console import make_console


def run(request: PreflightRequest) -> int:
    """Compiles for every target and batch size that the flags name; see `Preflight`."""
    tpu_types, gpu_types = _names(request.tpu_type), _names(request.gpu_type)
    if not tpu_types and not gpu_types:
        raise UsageError("--mode=preflight: add what to compile for, as --tpu_type=v5litepod-256 or --gpu_type=h100:8")
    if not request.preflight_timeout > 0:
        raise UsageError(f"--preflight_timeout={request.preflight_timeout:g}: must be more than 0 seconds")
    if request.largest_batch and (request.preflight_batch_sizes or request.preflight_search):
        other = "--preflight_batch_sizes" if request.preflight_batch_sizes else "--preflight_search"
        raise UsageError(f"--largest_batch looks for a batch size by itself: leave it or {other} out")
    sizes = dict.fromkeys(map(_batch_size, request.preflight_batch_sizes))
    changes: list[tuple[str, ...]] = [(f"train.global_batch_size = {size}",) for size in sizes] or [()]
    targets = [*map(slices.find, tpu_types), *(gpus.find(name, request.runtime) for name in gpu_types)]
    with gin_bindings.usage_errors():
        examiner = Examiner(
            gin_files=request.gin_file,
            gin_params=request.gin_param,
            seed=request.seed,
            deterministic=request.deterministic,
            compiler=Compiler(
                cache_dir=request.preflight_cache or default_cache_dir(os.environ),
                timeout_seconds=request.preflight_timeout,
            ),
            console=make_console(total_steps=1),
        )
        preflight = Preflight(
            examiner=examiner,
            cases=[Case(where=where, changes=change) for where in targets for change in changes],
            largest_batch=request.largest_batch,
            search=request.preflight_search,
            model_dir=request.model_dir,
        )
        return preflight.run(dry_run=request.dry_run)


def _names(given: Sequence[str]) -> tuple[str, ...]:
    names = [name.strip() for text in given for name in text.split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def _batch_size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise UsageError(f"--preflight_batch_sizes: {text!r} is no whole number above 0; write such as 2048,4096")
    return size
