"""`--mode=preflight`: a recipe's step compiled for TPUs and GPUs that nobody has rented yet."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from launcher.config import gin_bindings
from launcher.data import tfds
from launcher.errors import UsageError
from launcher.machine.tensorflow_import import require_tensorflow
from launcher.modes import PreflightRequest
from launcher.preflight import inputs, kept_reports
from launcher.preflight.compiler import default_cache_dir
from launcher.preflight.kept_reports import KeptReports, Recorder

# Of the flags, those that say where to and how, not what.
_INDIFFERENT = ("model_dir", "preflight_cache", "preflight_timeout", "preflight_fresh", "dry_run")


def run(request: PreflightRequest) -> int:
    """Compiles for every target and batch size that the flags name; see `preflight.command`.

    Raises:
      UsageError: no target is named, or a number is none.
    """
    tpu_types, gpu_types = _names(request.tpu_type), _names(request.gpu_type)
    if not tpu_types and not gpu_types:
        raise UsageError(
            "--mode=preflight: say what to compile for, such as --tpu_type=v5litepod-256 or --gpu_type=h100:8"
        )
    if not request.preflight_timeout > 0:
        raise UsageError(f"--preflight_timeout={request.preflight_timeout:g}: must be more than 0 seconds")
    if request.largest_batch and (request.preflight_batch_sizes or request.preflight_search):
        other = "--preflight_batch_sizes" if request.preflight_batch_sizes else "--preflight_search"
        raise UsageError(
            f"--largest_batch looks for a batch size by itself, {other} is of no use with it; leave one out"
        )
    cache_dir = request.preflight_cache or default_cache_dir(os.environ)
    reports = KeptReports(cache_dir=cache_dir, key=_key(request))
    kept = None if request.preflight_fresh else reports.find()
    if kept is not None:
        return kept_reports.show(kept, request.model_dir)
    with reports.making(request.model_dir) as recorder:
        return _examine(request, tpu_types, gpu_types, cache_dir, recorder)


def _key(request: PreflightRequest) -> str | None:
    """Of a report that may be kept; what a Python program in the place of a gin file does is not known."""
    if request.dry_run or any(name.endswith(".py") for name in request.gin_file):
        return None
    flags = {name: value for name, value in dataclasses.asdict(request).items() if name not in _INDIFFERENT}
    return inputs.key(flags, tfds.data_dir())


def _examine(
    request: PreflightRequest,
    tpu_types: tuple[str, ...],
    gpu_types: tuple[str, ...],
    cache_dir: str,
    recorder: Recorder,
) -> int:
    require_tensorflow()
    from launcher.preflight import command  # late: it imports TensorFlow

    asked = command.CompileRequest(
        gin_files=request.gin_file,
        gin_params=request.gin_param,
        seed=request.seed,
        deterministic=request.deterministic,
        tpu_types=tpu_types,
        gpu_types=gpu_types,
        batch_sizes=tuple(dict.fromkeys(map(_batch_size, request.preflight_batch_sizes))),
        largest_batch=request.largest_batch,
        search=request.preflight_search,
        model_dir=request.model_dir,
        cache_dir=cache_dir,
        timeout_seconds=request.preflight_timeout,
    )
    with gin_bindings.usage_errors():
        return command.run(asked, recorder, dry_run=request.dry_run)


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
