"""What importing TensorFlow and Keras costs, as Python does it and as Launcher does it, turn by turn; prints JSON.

python benchmarks/start_up.py --pairs=5
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys

PLAIN = "import keras, tensorflow"
LAUNCHER = "from launcher.machine.tensorflow_import import import_tensorflow; import_tensorflow()"


def cpu_seconds(program: str) -> float:
    """Seconds of processor time of one fresh interpreter that runs the program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    cpu_seconds(PLAIN)  # fills the page cache
    pairs = [(cpu_seconds(PLAIN), cpu_seconds(LAUNCHER)) for _ in range(options.pairs)]
    ratios = sorted(ours / plain for plain, ours in pairs)
    print(
        json.dumps(
            {
                "cpu_seconds_plain": round(statistics.median(plain for plain, _ in pairs), 2),
                "cpu_seconds_launcher": round(statistics.median(ours for _, ours in pairs), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
            }
        )
    )


if __name__ == "__main__":
    main()
