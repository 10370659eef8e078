"""A job with one random fault a minute, compared bit for bit with an undisturbed run; prints its goodput and JSON.

python benchmarks/hour_of_faults.py                                    # an hour, two workers, ResNet-8 on digits
python benchmarks/hour_of_faults.py --minutes=6 --seed=3 --json=faults.json
python benchmarks/hour_of_faults.py --minutes=60 --every=120

Faults are those of `launcher.launch --drill` that can be made from outside: a worker is killed, frozen or sent SIGTERM,
the whole job is preempted, or the newest checkpoint is damaged and a worker killed. Nobody tells the supervisor of
them. After SIGTERM, the same command is given again, as a scheduler would. The job trains until the minutes are over
and is preempted for the last time; then an undisturbed job trains as many steps. Linux.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from launcher.jobs.drill import files
from launcher.reporting.attempts import describe, reckon

ROOT = Path(__file__).resolve().parent.parent
KILL, FREEZE, TERMINATE, PREEMPT, CORRUPT = KINDS = ("kill", "freeze", "terminate", "preempt", "corrupt_checkpoint")
_SIGNALS = {KILL: signal.SIGKILL, FREEZE: signal.SIGSTOP, TERMINATE: signal.SIGTERM, CORRUPT: signal.SIGKILL}
_ASKED_TO_STOP = (42, 128 + signal.SIGTERM)  # the second before there was anything to save
_ENDLESS = 10_000_000
_DEADLINE_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: what, in which worker (None for the job), when (seconds since the beginning) and at which step."""

    kind: str
    worker: int | None
    at: float
    step: int


class Job:
    """A job in a folder; `start` gives its command, also again."""

    def __init__(self, folder: Path, workers: int, steps: int):
        self.model_dir, self.output = folder / "run", folder / "output.txt"
        self._workers = workers
        self._argv = [
            sys.executable, "-m", "launcher.launch", f"--workers={workers}", "--gin_file=resnet_cpu.gin",
            f"--gin_param=train.steps = {steps}", "--gin_param=train.global_batch_size = 64",
            "--gin_param=train.evaluate_every = 0", "--gin_param=train.checkpoint_every = 25",
            "--gin_param=Checkpoints.keep = 3", "--gin_param=train.log_every = 5",
            "--gin_param=train.steps_per_loop = 5", "--gin_param=resnet.depth = 8",
            "--gin_param=Checkpoints.save_model = 'none'",
            "--gin_param=cosine.decay_steps = 100000",  # the schedule is the same, however many steps there are
            "--mode=train", f"--model_dir={self.model_dir}",
        ]  # fmt: skip
        folder.mkdir(parents=True)

    def start(self) -> None:
        environ = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **os.environ, "PYTHONPATH": str(ROOT)}
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ,
                start_new_session=True,
            )  # fmt: skip

    def go_on(self) -> None:
        """Gives the command again if the job was asked to stop and has, as a scheduler would."""
        code = self.process.poll()
        if code is None:
            return
        if code not in _ASKED_TO_STOP:
            raise SystemExit(f"the job ended with exit code {code}: see {self.output}")
        self.start()

    def stop(self) -> None:
        """Has it save and end; a job that was still starting has nothing new to save."""
        self.go_on()
        while self.process.poll() is None and not self.pids():
            time.sleep(0.1)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(_DEADLINE_SECONDS)

    def close(self) -> None:
        """Ends it at once; its guard ends the workers."""
        self.process.kill()
        self.process.wait()

    def pids(self) -> dict[int, psutil.Process]:
        """The running workers by rank; none while some of them are missing."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, KeyError, ValueError):
                if "launcher.main" in process.cmdline():
                    found[json.loads(process.environ()["TF_CONFIG"])["task"]["index"]] = process
        return found if len(found) == self._workers else {}

    def step(self) -> int:
        """The last step that attempts.jsonl tells of."""
        attempts = reckon(str(self.model_dir))["attempts"]
        return attempts[-1]["to_step"] if attempts else 0


def strike(job: Job, kind: str, worker: int) -> int | None:
    """Makes one fault now; returns the step, or None when workers are just being started and there is none to hit."""
    step, processes = job.step(), job.pids()
    if worker not in processes:
        return None
    if kind == PREEMPT:
        job.process.send_signal(signal.SIGTERM)
        return step
    if kind == CORRUPT:
        # Stopped, nobody writes or retires checkpoints; the next attempt is what finds the damage.
        for process in processes.values():
            process.suspend()
        steps = files.all_steps(job.model_dir)
        if len(steps) > 1:  # one to go on from
            files.damage(job.model_dir, steps[-1])
    with contextlib.suppress(psutil.Error):
        processes[worker].send_signal(_SIGNALS[kind])
    if kind == CORRUPT:
        for process in processes.values():
            with contextlib.suppress(psutil.Error):
                process.resume()
    return step


def disturb(job: Job, dice: random.Random, *, minutes: float, every: float, workers: int) -> list[Fault]:
    """Runs the job for that long, with a fault at a random moment of every `every` seconds, and returns the faults."""
    began, faults = time.monotonic(), []
    job.start()
    moments = [every * (turn + dice.random()) for turn in range(round(minutes * 60 / every))]
    planned = [(moment, dice.choice(KINDS), dice.randrange(workers)) for moment in moments]
    while (now := time.monotonic() - began) < 60 * minutes:
        job.go_on()
        if planned and now >= planned[0][0] and (step := strike(job, *planned[0][1:])) is not None:
            _, kind, worker = planned.pop(0)
            faults.append(Fault(kind, None if kind == PREEMPT else worker, now, step))
            print(f"{now:6.0f} s: {kind}, worker {worker}, after step {step}", file=sys.stderr, flush=True)
        time.sleep(0.1)
    return faults


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The disturbed job, the undisturbed one, and what distinguishes them."""
    job = Job(folder / "disturbed", options.workers, _ENDLESS)
    try:
        faults = disturb(
            job, random.Random(options.seed), minutes=options.minutes, every=options.every, workers=options.workers
        )
        job.stop()
    finally:
        job.close()
    found = reckon(str(job.model_dir))
    steps = found["attempts"][-1]["to_step"]  # there may be a later checkpoint, which was damaged
    print(f"{steps} steps; now as many that nobody disturbs", file=sys.stderr, flush=True)
    undisturbed = Job(folder / "undisturbed", options.workers, steps or 1)
    try:
        undisturbed.start()
        if code := undisturbed.process.wait():
            raise SystemExit(f"the undisturbed job ended with exit code {code}: see {undisturbed.output}")
    finally:
        undisturbed.close()
    return {
        "minutes": options.minutes,
        "seed": options.seed,
        "faults": [dataclasses.asdict(fault) for fault in faults],
        "kinds": dict(collections.Counter(fault.kind for fault in faults)),
        "steps": steps,
        "difference": files.difference(job.model_dir, undisturbed.model_dir),
        "goodput_undisturbed": reckon(str(undisturbed.model_dir))["goodput_share"],
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="of the disturbed job; default: %(default)s")
    parser.add_argument("--every", type=float, default=60, help="seconds for one fault; default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the faults; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="a new folder for both jobs; default: a temporary one, removed")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hour-of-faults-") as temporary:
        result = measure(options.folder or Path(temporary), options)
    content = json.dumps(result, indent=2) + "\n"
    print(content, end="")
    if options.json:
        options.json.write_text(content)
    print(f"{len(result['faults'])} faults: {result['kinds']}")
    print(describe(result))
    print(f"the last checkpoint, of step {result['steps']}: {result['difference'] or 'equal bit for bit'}")
    sys.exit(1 if result["difference"] else 0)


if __name__ == "__main__":
    main()
