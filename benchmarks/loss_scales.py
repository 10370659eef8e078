"""Accuracy with and without loss scaling, over several seeds: what 16 bits lose, and what gets it back. Prints JSON.

    python benchmarks/loss_scales.py --gin_file=experiment_underflow.gin --seeds=5

All runs are on one replica of one process; the gradients pass through the wire's dtype all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys

# Policy and loss scale by the name of the run.
RUNS = {
    "float32": ("train.precision = 'float32'",),
    "mixed_bfloat16": ("train.precision = 'mixed_bfloat16'",),
    "mixed_float16, dynamic scale": ("train.precision = 'mixed_float16'",),
    "mixed_float16, scale 2^15": (
        "train.precision = 'mixed_float16'",
        "train.loss_scale = @FixedLossScale()",
        "FixedLossScale.scale = 32768.0",
    ),
    "mixed_float16, scale 1": ("train.precision = 'mixed_float16'", "train.loss_scale = 'none'"),
}


def run(gin_file: str, bindings: list[str], seed: int) -> dict[str, float]:
    """Trains the recipe to its end.

    Returns:
      accuracy on the evaluation examples, loss (mean over the last step's batch), skipped_steps, and loss_scale after
      the last step.
    """
    import in_process

    made = in_process.build(gin_file, bindings, seed)
    records = made.trainer.train(made.trainer.batches(made.plan.data), made.plan.total_steps)
    return {
        "accuracy": made.evaluator.evaluate()["accuracy"],
        "loss": float(records.loss[-1] / records.weight[-1]),
        "skipped_steps": made.trainer.skipped_steps,
        "loss_scale": made.trainer.loss_scale,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gin_file", default="experiment_underflow.gin")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--run", action="append", choices=list(RUNS), help="may repeat; default: all")
    parser.add_argument("--gin_param", action="append", default=[])
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    result: dict[str, object] = {"recipe": options.gin_file, "bindings": options.gin_param, "seeds": options.seeds}
    for name in options.run or RUNS:
        found = []
        for seed in range(options.seeds):
            found.append(run(options.gin_file, [*options.gin_param, *RUNS[name]], seed))
            print(f"{name}, seed {seed}: {found[-1]}", file=sys.stderr, flush=True)
        accuracies = [one["accuracy"] for one in found]
        result[name] = {
            "accuracies": [round(value, 4) for value in accuracies],
            "mean": round(statistics.mean(accuracies), 4),
            "standard_deviation": round(statistics.stdev(accuracies), 4) if len(accuracies) > 1 else None,
            "last_losses": [round(one["loss"], 4) for one in found],
            "skipped_steps": [one["skipped_steps"] for one in found],
            "loss_scales": [one["loss_scale"] for one in found],
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
