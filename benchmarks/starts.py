"""Seconds until a run trains, and until a job trains again after kill -9, beside Keras `fit` and torchrun. Prints JSON.

    python benchmarks/starts.py --rounds=5
    TORCH_PYTHON=/path/to/a/python/with/torch python benchmarks/starts.py --rounds=5

`imports`: TensorFlow and Keras imported as Python does it. `run`: ResNet-20 for 30 steps by `fit`, one at a time
(fit_run.py). `job`: two workers of an MLP by torchrun (torch_job.py), one of which is killed after step 60; left out
without PyTorch. With --standby, Launcher's job is left alone until its spare processes are ready. They take turns.
Ratios are the other's seconds divided by Launcher's: above 1, Launcher is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
from measuring import cpu_seconds, spread

HERE = Path(__file__).resolve().parent
_KILLED_AFTER, _JOB_STEPS = 60, 100_000
_PATIENCE = 40.0
_RUN = (
    "--gin_file=resnet_cpu.gin",
    "--mode=train",
    "--gin_param=train.steps = 30",
    "--gin_param=resnet.norm_group_size = None",
    "--gin_param=image_data.augmentation = 'none'",
    "--gin_param=train.log_every = 1",  # as fit_run.py notes every step
)
_JOB = (
    "--gin_file=mlp_fashion.gin",
    "--mode=train",
    "--gin_param=image_data.name = 'digits'",
    "--gin_param=mlp.units = 1024",
    "--gin_param=train.global_batch_size = 128",
    f"--gin_param=train.steps = {_JOB_STEPS}",
    "--gin_param=train.steps_per_loop = 1",
    "--gin_param=train.log_every = 1",
    "--gin_param=train.checkpoint_every = 50",
)
Measure = Callable[[Path], dict[str, float]]
"""Runs once in an empty folder; what it took, in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="2")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    kinds: dict[str, dict[str, Measure]] = {
        "imports": {"launcher": _import_by_launcher, "python": _import_by_python},
        "run": {"launcher": _launcher_run, "fit": _fit_run},
        "job": {"launcher": _launcher_job, "launcher, standby": lambda folder: _launcher_job(folder, "--standby")},
    }
    if torch_python := os.environ.get("TORCH_PYTHON"):
        kinds["job"]["torchrun"] = lambda folder: _torch_job(folder, torch_python)
    print(json.dumps({kind: compare(kind, peers, options.rounds) for kind, peers in kinds.items()}, indent=2))


def compare(kind: str, peers: dict[str, Measure], rounds: int) -> dict[str, object]:
    """Medians and ranges of each figure, and ratios to Launcher's in the same round."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for number in range(rounds + 1):  # the first fills the page cache
        for name in sorted(peers, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as folder:
                figures = peers[name](Path(folder))
            shown = ", ".join(f"{what} {seconds:.2f}" for what, seconds in figures.items())
            print(f"{kind} {number}/{rounds}: {name}: {shown}", file=sys.stderr, flush=True)
            if number:
                taken[name].append(figures)
    ours = taken["launcher"]
    return {
        name: {
            what: {
                "seconds": spread([one[what] for one in rows]),
                "ratio": spread([one[what] / own[what] for one, own in zip(rows, ours, strict=True)]),
            }
            for what in rows[0]
        }
        for name, rows in taken.items()
    }


def _import_by_python(folder: Path) -> dict[str, float]:
    return _whole([sys.executable, "-c", "import keras, tensorflow"])


def _import_by_launcher(folder: Path) -> dict[str, float]:
    program = "from launcher.machine.tensorflow_import import import_tensorflow; import_tensorflow()"
    return _whole([sys.executable, "-c", program])


def _launcher_run(folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "launcher.main", *_RUN, f"--model_dir={folder / 'run'}"]
    return _to_steps(command, lambda: _launchers_times(folder))


def _fit_run(folder: Path) -> dict[str, float]:
    times = folder / "times.txt"
    return _to_steps([sys.executable, str(HERE / "fit_run.py"), str(times)], lambda: _times(times))


def _launcher_job(folder: Path, *flags: str) -> dict[str, float]:
    command = [sys.executable, "-m", "launcher.launch", "--workers=2", *flags, *_JOB, f"--model_dir={folder / 'run'}"]

    def victim() -> int:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, KeyError):
                words = process.cmdline()
                is_worker = f"--model_dir={folder / 'run'}" in words and "launcher.main" in words
                if is_worker and json.loads(process.environ()["TF_CONFIG"])["task"]["index"] == 1:
                    return process.pid
        raise RuntimeError("worker 1 is not there")

    seconds: dict[int, float] = {}

    def spares_wait() -> bool:
        """Whether the spare processes have used no processor time since the last look: they have imported all."""
        before = dict(seconds)
        seconds.clear()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "launcher.jobs.standby" in process.cmdline():
                    seconds[process.pid] = sum(process.cpu_times()[:2])
        time.sleep(0.5)
        return len(seconds) == 2 and seconds == before

    return _killed(command, lambda: _launchers_times(folder), victim, spares_wait if "--standby" in flags else None)


def _torch_job(folder: Path, python: str) -> dict[str, float]:
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    command += [str(HERE / "torch_job.py"), str(folder), str(_JOB_STEPS)]
    return _killed(command, lambda: _times(folder / "times.txt"), lambda: int((folder / "pid_1").read_text()))


def _whole(command: list[str]) -> dict[str, float]:
    """Seconds until a process ended, and of the processor."""
    before, begun = cpu_seconds(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(done.stdout)
    return {"end": time.time() - begun, "processor": cpu_seconds(resource.RUSAGE_CHILDREN) - before}


def _to_steps(command: list[str], times: Callable[[], list[tuple[int, float]]]) -> dict[str, float]:
    begun = time.time()
    figures = _whole(command)
    found = times()
    return {"first step": found[0][1] - begun, "last step": found[-1][1] - begun, **figures}


def _killed(
    command: list[str],
    times: Callable[[], list[tuple[int, float]]],
    victim: Callable[[], int],
    is_ready: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Seconds to the first step, and from a worker's death, once the job is ready for it, to the first step after."""
    begun = time.time()
    with tempfile.TemporaryFile() as log, _group(command, log) as job:
        _until(job, lambda: any(step >= _KILLED_AFTER for step, _ in times()))
        _until(job, is_ready or (lambda: True))
        pid, before = victim(), times()
        os.kill(pid, signal.SIGKILL)
        killed = time.time()

        def again() -> list[float]:
            """When steps ended that had been taken before; others may just have been under way."""
            return [at for step, at in times() if at > killed and step <= before[-1][0]]

        figures = {"first step": before[0][1] - begun, "training again": math.inf}
        with contextlib.suppress(TimeoutError):
            _until(job, lambda: bool(again()), _PATIENCE)
            figures["training again"] = again()[0] - killed
        return figures


@contextlib.contextmanager
def _group(command: list[str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    job = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield job
    except TimeoutError as error:
        log.seek(0)
        raise SystemExit(f"{log.read().decode(errors='replace')}\n{command}: {error}") from None
    finally:
        children = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        for process in [*children, psutil.Process(job.pid)] if job.poll() is None else []:
            with contextlib.suppress(psutil.Error):
                process.kill()
        job.wait()


def _until(job: subprocess.Popen[bytes], condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if job.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(
                f"ended with {job.returncode}" if job.poll() is not None else f"no progress in {seconds:.0f} s"
            )
        time.sleep(0.02)


def _launchers_times(folder: Path) -> list[tuple[int, float]]:
    path = folder / "run" / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [(row["step"], row["time"]) for row in rows if row["split"] == "train"]


def _times(path: Path) -> list[tuple[int, float]]:
    lines = path.read_text().splitlines() if path.exists() else ()
    return [(int(step), float(at)) for step, at in map(str.split, lines)]


if __name__ == "__main__":
    main()
