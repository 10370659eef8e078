"""The model_dir, the folder of a run: what is in it, its default and whether it can be one. Imports no TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Sequence

from launcher.errors import UsageError

# What each file or folder of a run holds. K, I and N are numbers.
CONTENTS = {
    "report.html": "The report, also while the run trains: curves, attempts, samples, results of other modes.",
    "summary.json": "How the run ended, also after a failure: status, exit code, last metrics, where the time went.",
    "metrics.jsonl": "One JSON object for each log event: step, split, loss, metrics, speed.",
    "run.json": "What the run is: recipe, command line, plan, versions.",
    "config.gin": "The bindings that were used; a recipe itself.",
    "attempts.jsonl": "How far each attempt came and how it ended, for the goodput.",
    "checkpoints/step_N/": "A checkpoint: weights, optimizer, loss scale, counters, and checksums in `manifest.json`.",
    "checkpoints/best.json": "Which checkpoint is the best by `train.best_metric`.",
    "model.keras": "The trained model, which Keras opens. Written when training ends.",
    "model.weights.h5": "Its weights alone, where Keras cannot save the model.",
    "assets/": "What belongs to the weights, such as a vocabulary.",
    "samples.json": "What the model answered to some examples at the last evaluation.",
    "started_from.txt": "Which weights came from `StartFrom.path`.",
    "tensorboard/": "Events for TensorBoard, and the traces of `--profile_steps`.",
    "lease.json": "Who writes to this folder now. Removed at the end.",
    "logs/attempt_K/worker_I.log": "What a worker printed, under `launcher.launch`.",
    "logs/attempt_K/worker_I.error.json": "The error of one worker.",
    "error.json": "Which worker failed first, and why.",
    "drill.json": "The verdict of a drill.",
    "verify.json": "The result of `--mode=verify`.",
    "precision.json": "The result of `--mode=precision_report`.",
    "preflight.json": "The result of `--mode=preflight`.",
    "doctor.json": "The result of `--mode=doctor`.",
    "export/": "What `--mode=export` wrote, unless `--export_dir` says where.",
    "export_step/": "What `--mode=export_step` wrote, unless `--export_dir` says where.",
    "compare.html": "What `--mode=compare` wrote.",
    "program/": "A call of `launcher.fit(..., workers=N)`: the program that its workers ran, and their history.",
    "fit_N/": "The run of the second, third, … call of `launcher.fit` in one program.",
}


def default_model_dir(gin_files: Sequence[str]) -> str:
    """`runs/RECIPE`, named after the last gin file."""
    return os.path.join("runs", os.path.splitext(os.path.basename(gin_files[-1]))[0])


def check_model_dir(model_dir: str) -> str:
    """Returns `model_dir`, making nothing; UsageError where it cannot be made or written to."""
    if "://" in model_dir:
        return model_dir
    existing = os.path.abspath(model_dir)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise UsageError(f"--model_dir={model_dir}: {existing} is not a folder; choose another --model_dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(
            f"--model_dir={model_dir}: {existing} is not writable for this user; choose another --model_dir"
        )
    return model_dir
