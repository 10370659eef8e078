"""`--mode=export_step`: the training step as a program that runs without TensorFlow."""

from __future__ import annotations

import dataclasses
import os

from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE
from launcher.modes import ExportStepRequest, dry_run
from launcher.modes.plan import resolve
from launcher.step_program import export_step, lowering


def run(request: ExportStepRequest) -> int:
    """Exports the step of --replicas replicas, which this machine need not have."""
    num_replicas = request.replicas or 1
    request = dataclasses.replace(request, strategy="one_device", replicas=None)
    with gin_bindings.usage_errors():
        plan = resolve(request, connect=False)
        if request.dry_run:
            return dry_run.show(lowering.for_replicas(plan, num_replicas), request)
        export_dir = request.export_dir or os.path.join(request.run_dir, "export_step")
        done = export_step.run(plan, model_dir=request.run_dir, export_dir=export_dir, num_replicas=num_replicas)
    print(f"exported the step after step {done.step} for {num_replicas} replicas to {export_dir}")
    for note in done.notes:
        print(f"note: {note}")
    if done.no_batches is not None:
        print(f"without a batch: {done.no_batches}")
    print(f"run it with JAX: python {os.path.join(export_dir, 'run.py')} --steps 10")
    return EXIT_DONE
