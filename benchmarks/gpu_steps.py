"""An exported step on GPUs that are there, beside what preflight said of it without them; prints JSON.

On any machine:

    python -m launcher.main --mode=export_step --replicas=8 --gin_file=resnet_gpu.gin --export_dir=step
    python -m launcher.main --mode=preflight --gpu_type=h100:8 --gin_file=resnet_gpu.gin --model_dir=said

On the one with the GPUs, which needs jax[cuda12] of the same version, and this checkout, but no TensorFlow:

    python -m benchmarks.gpu_steps step --preflight=said/preflight.json --steps=50

No figures of it are published: it has run on CPUs only, where memory is not told. Set
XLA_PYTHON_CLIENT_PREALLOCATE=false, else JAX takes three quarters of the memory before it needs any.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.step_program.runner import Runner, timed_steps


def said(path: str | None, num_replicas: int) -> dict[str, Any] | None:
    """Preflight's figures of the first case for so many GPUs; None without a file."""
    if path is None:
        return None
    cases = json.loads(Path(path).read_text("utf-8"))["cases"]
    found = [one for one in cases if one["replicas"] == num_replicas and "hbm" in one and one["roofline"]]
    if not found:
        raise SystemExit(f"{path} has no case of {num_replicas} replicas that fits")
    case = found[0]
    return {
        "where": case["accelerator_type"],
        "program_bytes": case["hbm"]["needed"] - sum(case["hbm"]["reserved"].values()),
        "allowed_bytes": sum(case["hbm"]["reserved"].values()),
        "flops": case["costs"]["flops"],
        "step_seconds_at_least": case["roofline"]["step_seconds"],
        "bound_by": case["roofline"]["bound_by"],
    }


def measured(runner: Runner, steps: int) -> dict[str, Any]:
    """Step time, and the most memory that a GPU took; None where the device does not tell."""
    seconds = [taken for _, taken in timed_steps(runner, steps)][1:]
    return {
        "devices": runner.devices,
        "step_seconds": statistics.median(seconds),
        "step_seconds_spread": [min(seconds), max(seconds)],
        "peak_bytes": runner.peak_bytes,
    }


def compared(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float | None]:
    """Measured quantities as multiples of what was said; FLOP/s of one GPU."""
    return {
        "step_seconds_to_bound": found["step_seconds"] / expected["step_seconds_at_least"],
        "peak_bytes_to_program": None
        if found["peak_bytes"] is None
        else found["peak_bytes"] / expected["program_bytes"],
        "flops_per_second": expected["flops"] / found["step_seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="what --mode=export_step wrote")
    parser.add_argument("--preflight", help="preflight.json of the same recipe on such GPUs")
    parser.add_argument("--steps", type=int, default=20, help="steps to time; the first is left out (default: 20)")
    parser.add_argument("--platform", default="gpu", help="cpu tries the program out (default: gpu)")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps={options.steps}: must be 2 or more")
    runner = Runner(options.directory, platform=options.platform)
    expected = said(options.preflight, runner.num_replicas)
    found = measured(runner, options.steps)
    ratios = None if expected is None else compared(found, expected)
    print(json.dumps({"measured": found, "preflight": expected, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
