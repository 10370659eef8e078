"""What holds up a training step: the input, and a checkpoint written beside it. Prints JSON.

    python benchmarks/waits.py --gin_file=resnet_cpu.gin --gin_file=lstm_cpu.gin

Each recipe trains by `launcher.main`, and its summary.json says for how much of the training the loop waited for
batches. Then, in one process and turn by turn, --steps steps without a save and as many with one at their beginning,
which is on the disk at their end: the ratio of the two is what a save costs, with the processor time that the writing
thread takes from the step.
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
        bindings = [*options.gin_param, f"train.steps = {2 * options.steps}", "train.eval_every = 0"]
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
    megabytes = sum(array.nbytes for array in trainer.snapshot().values()) / 1e6
    wall: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    held = []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(CheckpointStore(folder))
        saver.save(0, trainer.snapshot)
        saver.finish()  # the first one imports what it needs
        for number in range(options.rounds):
            for saves in (False, True) if number % 2 else (True, False):
                begun, used = time.perf_counter(), cpu_seconds()
                if saves:
                    saver.save(trainer.step, trainer.snapshot)
                    held.append(time.perf_counter() - begun)
                for _ in range(options.steps // 10):
                    trainer.train(batches, 10)
                saver.finish()
                wall[saves].append(time.perf_counter() - begun)
                cpu[saves].append(cpu_seconds() - used)
    return {
        "state_mb": round(megabytes, 2),
        "milliseconds_a_step": spread([1000 * each / options.steps for each in wall[False]]),
        "held_milliseconds": spread([1000 * each for each in held]),
        "ratio": spread([with_it / without for with_it, without in zip(wall[True], wall[False], strict=True)]),
        "cpu_ratio": spread([with_it / without for with_it, without in zip(cpu[True], cpu[False], strict=True)]),
    }


if __name__ == "__main__":
    main()
