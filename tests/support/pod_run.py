"""Takes every exported step once with the runner of the export itself, and writes down what came out.

python pod_run.py EXPORT OUT.npz
"""

from __future__ import annotations

import sys

import numpy as np


def main(directory: str, out: str) -> None:
    sys.path.insert(0, directory)
    import run

    runner = run.Runner(directory, platform="cpu")
    reports = [runner.step(runner.placed(batch)) for batch in runner.batches()]
    found = {f"report/{name}": np.array([report[name] for report in reports]) for name in reports[0]}
    for replica in range(runner.num_replicas):
        found |= {f"state/{replica}/{name}": value for name, value in runner.state(replica).items()}
    np.savez(out, **found)
    brought = {name.split(".")[0] for name in sys.modules} & {"tensorflow", "keras", "launcher"}
    assert not brought, brought


if __name__ == "__main__":
    main(*sys.argv[1:])
