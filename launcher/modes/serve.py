"""`--mode=predict` and `export`: a trained model at work, and as a SavedModel."""

from __future__ import annotations

import dataclasses
import os

from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE
from launcher.modes import ExportRequest, PredictRequest
from launcher.modes.plan import resolve
from launcher.serving import export, predict


def run(request: PredictRequest | ExportRequest) -> int:
    """Answers lines of text, or exports; on one device unless the flags name more."""
    if request.strategy is None and not request.tpu:
        request = dataclasses.replace(request, strategy="one_device")
    with gin_bindings.usage_errors():
        plan = resolve(request)
        if isinstance(request, PredictRequest):
            predict.run(plan, request.run_dir, input_path=request.input, output_path=request.output)
            return EXIT_DONE
        export_dir = request.export_dir or os.path.join(request.run_dir, "export")
        step = export.run(plan, request.run_dir, export_dir=export_dir)
    print(f"exported step {step} of {request.run_dir} to {export_dir}")
    return EXIT_DONE
