"""Final test accuracy under each dtype policy over several seeds: does 16-bit training cost accuracy? Prints JSON.

    python benchmarks/policies.py --gin_file=resnet_cpu.gin --seeds=5
    python benchmarks/policies.py --gin_file=resnet_fashion.gin --seeds=5 \
        --gin_param='train.epochs = 2' --gin_param="tfds_images.train_split = 'train[:10000]'"

mixed_float16 runs as everywhere: dynamic loss scale, float16 on the wire, here over --replicas of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def accuracy(gin_file: str, policy: str, seed: int, flags: list[str]) -> float:
    """Accuracy on the evaluation examples after the recipe's whole training."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "launcher.main", f"--gin_file={gin_file}", f"--seed={seed}",
             f"--gin_param=train.precision = {policy!r}", f"--model_dir={folder}/run", *flags],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        summary = json.loads(Path(folder, "run/summary.json").read_text())
    print(f"{policy} seed {seed}: {summary['metrics']['eval']['accuracy']:.4f}", file=sys.stderr, flush=True)
    return summary["metrics"]["eval"]["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gin_file", default="resnet_cpu.gin")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gin_param", action="append", default=[])
    options = parser.parse_args()
    flags = [f"--replicas={options.replicas}", *(f"--gin_param={param}" for param in options.gin_param)]
    result: dict[str, object] = {"recipe": options.gin_file, "bindings": options.gin_param, "seeds": options.seeds}
    for policy in POLICIES:
        found = [accuracy(options.gin_file, policy, seed, flags) for seed in range(options.seeds)]
        result[policy] = {
            "accuracies": [round(value, 4) for value in found],
            "mean": round(statistics.mean(found), 4),
            "standard_deviation": round(statistics.stdev(found), 4) if len(found) > 1 else None,
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
