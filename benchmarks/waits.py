"""What holds up a training step: the input, and a checkpoint written beside it. Prints JSON.

    python benchmarks/waits.py --gin_file=resnet_cpu.gin --gin_file=lstm_cpu.gin

Each recipe trains by `launcher.main`, and its summary.json says for how much of the training the loop waited for
batches. Then, in one process and turn by turn: a save by itself, --steps steps without one, and as many with one at
their beginning, which is on the disk at their end. The ratio of the last two is what a save costs beside steps. Other
work on the machine moves it more than a save does; the share, a save's time divided by that of the steps, says how much
it could cost at most.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from measuring import cpu_seconds, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gin_file", action="append", help="may repeat; default: resnet_cpu.gin")
    parser.add_argument("--gin_param", action="append", default=[])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    rows = [
        {"recipe": recipe, **input_wait(recipe, options), **save_cost(recipe, options)}
        for recipe in options.gin_file or ["resnet_cpu.gin"]
    ]
    print(json.dumps({"steps": options.steps, "rounds": options.rounds, "rows": rows}, indent=2))


def input_wait(recipe: str, options: argparse.Namespace) -> dict[str, float]:
    """Of a whole run, without what it takes to begin: the share of the loop's seconds."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--gin_file={recipe}", f"--model_dir={folder}", "--mode=train"]
        bindings = [*options.gin_param, f"train.steps = {2 * options.steps}"]
        flags += [f"--gin_param={binding}" for binding in bindings]
        command = [sys.executable, "-m", "launcher.main", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = json.loads(pathlib.Path(folder, "summary.json").read_text())["seconds"]
    return {"input_wait": round(seconds["input_wait"] / (seconds["input_wait"] + seconds["train"]), 5)}


def save_cost(recipe: str, options: argparse.Namespace) -> dict[str, object]:
    """Of steps with and without a save."""
    import in_process

    from launcher.checkpoints import CheckpointStore, Saver

    session = in_process.build(recipe, options.gin_param)
    trainer, batches = session.trainer, session.trainer.batches(session.plan.data)
    trainer.train(batches, 10)
    megabytes = sum(array.nbytes for array in trainer.state.snapshot().values()) / 1e6
    wall: dict[str, list[float]] = {"alone": [], "without": [], "with": []}
    cpu: dict[str, list[float]] = {name: [] for name in wall}
    held = []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(CheckpointStore(folder))
        saver.save(0, trainer.state.snapshot)
        saver.finish()  # the first one imports what it needs
        for number in range(options.rounds):
            for name in list(wall) if number % 2 else reversed(wall):
                begun, used = time.perf_counter(), cpu_seconds()
                if name != "without":
                    saver.save(trainer.step, trainer.state.snapshot)
                    held.append(time.perf_counter() - begun)
                for _ in range(0 if name == "alone" else options.steps // 10):
                    trainer.train(batches, 10)
                saver.finish()
                wall[name].append(time.perf_counter() - begun)
                cpu[name].append(cpu_seconds() - used)
    return {
        "state_mb": round(megabytes, 2),
        "milliseconds_a_step": spread([1000 * each / options.steps for each in wall["without"]]),
        "held_milliseconds": spread([1000 * each for each in held]),
        "alone_milliseconds": spread([1000 * each for each in wall["alone"]]),
        "share": spread(_divided(wall["alone"], wall["without"])),
        "cpu_share": spread(_divided(cpu["alone"], cpu["without"])),
        "ratio": spread(_divided(wall["with"], wall["without"])),
    }


def _divided(some: list[float], others: list[float]) -> list[float]:
    return [one / other for one, other in zip(some, others, strict=True)]


if __name__ == "__main__":
    main()
