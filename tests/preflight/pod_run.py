"""Takes every exported step once and writes down what came out, in a process that TensorFlow is kept out of.

python pod_run.py EXPORT OUT.npz
"""

from __future__ import annotations

import sys

# Whatever needs it fails where it is imported.
sys.modules["tensorflow"] = None
sys.modules["keras"] = None

import numpy as np

from launcher.preflight.runner import Runner


def main(directory: str, out: str) -> None:
    runner = Runner(directory, platform="cpu")
    reports = [runner.step(runner.placed(batch)) for batch in runner.batches()]
    found = {f"report/{name}": np.array([report[name] for report in reports]) for name in reports[0]}
    for replica in range(runner.num_replicas):
        found |= {f"state/{replica}/{name}": value for name, value in runner.state(replica).items()}
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
