"""`--mode=predict` and `export`: a trained model at work, and as a file for others to use."""

import dataclasses
import os

from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE, UsageError
from launcher.machine import cluster as cluster_lib
from launcher.modes import ExportRequest, PredictRequest
from launcher.modes.plan import resolve
from launcher.serving import export, predict


def run(request: PredictRequest | ExportRequest) -> int:
    """Answers records on all local devices, or exports from one."""
    # Said before it would wait for the others.
    workers = cluster_lib.resolve(os.environ).num_workers
    if workers > 1:
        raise UsageError(
            f"--mode={request.mode} runs in one process, and here are {workers}; start it apart from a job"
        )
    if request.strategy is None and not request.tpu and not request.runtime.has_devices:
        # Whatever strategy the recipe trains with.
        strategy = "auto" if isinstance(request, PredictRequest) else "one_device"
        request = dataclasses.replace(request, strategy=strategy)
    with gin_bindings.usage_errors():
        plan = resolve(request)
        if isinstance(request, PredictRequest):
            predict.run(plan, request.run_dir, input_path=request.input, output_path=request.output)
            return EXIT_DONE
        export_dir = request.export_dir or os.path.join(request.run_dir, "export")
        step = export.run(plan, request.run_dir, export_dir=export_dir, export_format=request.export_format)
    print(f"exported step {step} of {request.run_dir} to {export_dir}")
    return EXIT_DONE
