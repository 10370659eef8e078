"""What --deterministic costs: the same recipe with and without it, turn by turn; prints JSON.

python benchmarks/deterministic.py --gin_file=resnet_cpu.gin --pairs=3
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def train_seconds(gin_file: str, steps: int, *flags: str) -> float:
    """Seconds the run spent training, after the first step, as its own summary says."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "launcher.main", f"--gin_file={gin_file}", f"--gin_param=train.steps = {steps}",
             "--mode=train", f"--model_dir={folder}/run", *flags],
            check=True, capture_output=True,
        )  # fmt: skip
        seconds = json.loads(Path(folder, "run/summary.json").read_text())["seconds"]
        return seconds["train"] + seconds["input_wait"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gin_file", default="resnet_cpu.gin")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    pairs = []
    for _ in range(options.pairs):
        plain = train_seconds(options.gin_file, options.steps)
        pairs.append((plain, train_seconds(options.gin_file, options.steps, "--deterministic")))
    ratios = sorted(deterministic / plain for plain, deterministic in pairs)
    print(
        json.dumps(
            {
                "recipe": options.gin_file,
                "steps": options.steps,
                "seconds_plain": [round(plain, 2) for plain, _ in pairs],
                "seconds_deterministic": [round(deterministic, 2) for _, deterministic in pairs],
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
