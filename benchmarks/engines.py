"""Fifty steps of recipes on both engines and several numbers of devices, compared with one replica of TensorFlow's.

    python benchmarks/engines.py OUTPUT_DIR [recipe ...]

Prints for each the largest relative difference of the losses, the relative difference of all weights (2-norm), examples
a second (the median), seconds until the training step was compiled, and the largest memory of the process, of worker 0
where there are two: on a machine that does nothing else. Dropout is off, as the engines draw other numbers.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from launcher.checkpoints import CheckpointStore

RECIPES = {
    "resnet_cpu": ("resnet.norm_group_size = 16",),
    "lm_cpu": ("language_model.dropout = 0.0",),
    "transformer_cpu": ("transformer.dropout = 0.0",),
    "lstm_cpu": ("lstm_language_model.dropout = 0.0",),
    "program": (),
}
SHARD = "--gin_param=train.shard = '{}'"
TOPOLOGIES = {
    "tensorflow 1": ("main", "--replicas=1"),
    "tensorflow 2": ("main", "--replicas=2"),
    **{f"pjrt {count}": ("main", "--engine=pjrt", f"--replicas={count}") for count in (1, 4, 8)},
    "pjrt 8 optimizer": ("main", "--engine=pjrt", "--replicas=8", SHARD.format("optimizer")),
    "pjrt 8 all": ("main", "--engine=pjrt", "--replicas=8", SHARD.format("all")),
    "pjrt 2x4 all": ("launch", "--workers=2", "--engine=pjrt", "--replicas=4", SHARD.format("all")),
}
PROGRAM = """
import keras, numpy as np, launcher

def build():
    convolutions = [keras.layers.Conv2D(16, 3, activation="gelu"), keras.layers.BatchNormalization(),
                    keras.layers.Conv2D(32, 3, strides=2, activation="gelu"), keras.layers.GlobalAveragePooling2D()]
    dense = [keras.layers.Dense(64, activation="gelu"), keras.layers.Dense(10, activation="softmax")]
    model = keras.Sequential([keras.Input((16, 16, 3)), *convolutions, *dense])
    model.compile(keras.optimizers.Adam(0.001), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

x = np.random.default_rng(0).normal(size=(3200, 16, 16, 3)).astype(np.float32)
y = (np.abs(x[:, :, :, 0].mean((1, 2))) * 200).astype(int) % 10
launcher.fit(build, (x, y), epochs=1, batch_size=64)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("recipes", nargs="*", help=", ".join(RECIPES))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    program = args.output / "program.py"
    program.write_text(PROGRAM)
    for recipe in args.recipes or RECIPES:
        given = [f"--gin_file={program}"]
        if recipe != "program":
            bindings = ("train.steps = 50", "train.epochs = None", *RECIPES[recipe])
            given = [f"--gin_file={recipe}.gin", *(f"--gin_param={text}" for text in bindings)]
        first: tuple[np.ndarray, np.ndarray] | None = None
        for name, (module, *flags) in TOPOLOGIES.items():
            folder = args.output / recipe / name.replace(" ", "_")
            memory = run(module, [*given, *flags], folder)
            losses, weights = found = measured(folder)
            first = first or found
            summary = json.loads((folder / "summary.json").read_text())
            print(
                f"{recipe:16} {name:17} losses {np.max(np.abs(losses / first[0] - 1)):.1e}"
                f"  weights {np.linalg.norm(weights - first[1]) / np.linalg.norm(first[1]):.1e}"
                f"  {np.median([event['examples_per_second'] for event in logged(folder)[5:]]):6.0f} examples/s"
                f"  compiled after {summary['seconds']['startup'] + summary['seconds']['compile']:4.1f} s"
                f"  {memory:.2f} GiB",
                flush=True,
            )


def run(module: str, flags: list[str], folder: Path) -> float:
    """GiB of the largest process."""
    every = ["--mode=train", f"--model_dir={folder}", "--gin_param=train.log_every = 1"]
    command = [
        sys.executable,
        "-m",
        f"launcher.{module}",
        *flags,
        *every,
        "--gin_param=Checkpoints.save_model = 'none'",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=os.environ)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return usage.ru_maxrss / 2**20


def logged(folder: Path) -> list[Mapping[str, float]]:
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["split"] == "train"]


def measured(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each step, and all weights at the end, float64."""
    store = CheckpointStore(str(folder / "checkpoints"))
    last = store.read(store.latest() or 0, lambda name: name.startswith("model/"))
    weights = np.concatenate([array.astype(np.float64).ravel() for array in last.values()])
    return np.array([event["loss"] for event in logged(folder)]), weights


if __name__ == "__main__":
    main()
