"""What a job of two workers loses to the faults that no `--drill` makes, and how long; prints a table and JSON.

python benchmarks/faults.py                          # all rows; about five minutes on two cores
python benchmarks/faults.py --rows=never_starts,kill_in_write
python benchmarks/faults.py --json=faults.json --table=table.md

The other faults of docs/recovery.md are measured by `python -m launcher.launch --drill=KIND --drill_reference=DIR`.

Real processes train ResNet-8 on digits for 60 steps, with a checkpoint every 5. All numbers come from the runs' files
and from the processes of this machine. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from launcher.jobs.drill.files import difference

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
STEPS = 60
FLAGS = (
    f"--workers={WORKERS}",
    "--gin_file=resnet_cpu.gin",
    f"--gin_param=train.steps = {STEPS}",
    "--gin_param=train.global_batch_size = 64",
    "--gin_param=train.steps_per_loop = 1",
    "--gin_param=train.log_every = 1",
    "--gin_param=train.evaluate_every = 0",
    "--gin_param=train.checkpoint_every = 5",
    "--gin_param=resnet.depth = 8",
)
_DEADLINE_SECONDS = 900.0
_STEP = re.compile(r"^step (\d+)/", re.MULTILINE)
_RESTORED = re.compile(r"^restored step (\d+) ", re.MULTILINE)
_FAULT_STEP = 12
_START_SECONDS = 20
_NEVER_STARTS = """
import json, os, pathlib, threading
if json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"] == 1:
    marker = pathlib.Path(os.environ["FAULT_MARKER"])
    if not marker.exists():
        import time
        marker.write_text(repr(time.time()))
        threading.Event().wait()
"""


@dataclasses.dataclass
class Row:
    """What one fault came to; None where it has no meaning.

    Attributes:
      fault: in words.
      seconds_to_detection: from the fault until error.json named its cause, or as the note says.
      seconds_to_training: from the fault until the first step after it was logged.
      steps_repeated: steps the chief had logged and logged again.
      named: what error.json says of the cause.
      named_correctly: whether it is the worker and the fault that were meant.
      orphans: processes left at the end.
      bitwise_equal: final arrays against an undisturbed run's.
      restarts: attempts after the first.
      note: what a reader should know.
    """

    fault: str
    seconds_to_detection: float | None = None
    seconds_to_training: float | None = None
    steps_repeated: int | None = None
    named: str = ""
    named_correctly: bool | None = None
    orphans: int | None = None
    bitwise_equal: bool | None = None
    restarts: int = 0
    note: str = ""

    def cells(self) -> list[str]:
        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.1f}"

        def word(value: object) -> str:
            return {None: "-", True: "yes", False: "NO"}.get(value, str(value))  # type: ignore[call-overload]

        return [
            self.fault, seconds(self.seconds_to_detection), seconds(self.seconds_to_training),
            "-" if self.steps_repeated is None else str(self.steps_repeated), word(self.named_correctly),
            "-" if self.orphans is None else str(self.orphans), word(self.bitwise_equal), self.note,
        ]  # fmt: skip


HEADINGS = [
    "fault", "detected (s)", "training again (s)", "steps repeated", "named correctly", "orphans", "bitwise equal",
    "note",
]  # fmt: skip


class Run:
    """A job in a folder of its own; the same command may be given again."""

    def __init__(self, folder: Path, *flags: str, environ: dict[str, str] | None = None):
        self.folder, self.model_dir = folder, folder / "run"
        self._flags = (*FLAGS, *flags, f"--model_dir={self.model_dir}")
        settings = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
        self._environ = {**settings, **os.environ, "PYTHONPATH": str(ROOT), **(environ or {})}
        self._marks: set[str] = set()
        self.output = folder / "output.txt"
        folder.mkdir(parents=True)

    def prepend_path(self, folder: Path) -> None:
        """Lets the job's processes import what is in `folder` first."""
        self._environ["PYTHONPATH"] = os.pathsep.join([str(folder), self._environ["PYTHONPATH"]])

    def start(self) -> subprocess.Popen[bytes]:
        """The supervisor, in a session of its own."""
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launcher.launch", *self._flags],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=self._environ, cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        return self.process

    def wait(self) -> int:
        """Its exit code."""
        self.until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def until(self, condition: Callable[[], object], *, every: float = 0.005) -> bool:
        """Waits for a condition; False if the supervisor ended first."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not condition():
            if self.process.poll() is not None:
                return bool(condition())
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder.name}: nothing after {_DEADLINE_SECONDS:.0f} s, see {self.output}")
            time.sleep(every)
        return True

    # --------------------------------------------------------------------------------------------------------- files

    def log(self, attempt: int, rank: int = 0) -> str:
        path = self.model_dir / "logs" / f"attempt_{attempt}" / f"worker_{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def step(self, attempt: int) -> int:
        """The last step that the chief logged in an attempt; 0 before the first."""
        return max(map(int, _STEP.findall(self.log(attempt))), default=0)

    def restored(self, attempt: int) -> int:
        """The step that an attempt went on from; 0 for a new start."""
        return max(map(int, _RESTORED.findall(self.log(attempt))), default=0)

    def attempts(self) -> int:
        return len(list((self.model_dir / "logs").glob("attempt_*")))

    def error(self, attempt: int) -> dict[str, Any]:
        """What error.json says of an attempt; empty without one."""
        path = self.model_dir / "logs" / f"attempt_{attempt}" / "error.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def first_event(self, *, since: float) -> float | None:
        """When the first training step after `since` was logged; both in Unix seconds."""
        with contextlib.suppress(OSError):
            for line in (self.model_dir / "metrics.jsonl").read_text().splitlines():
                event = json.loads(line)
                if event["split"] == "train" and event["time"] > since:
                    return event["time"]
        return None

    # ----------------------------------------------------------------------------------------------------- processes

    def workers(self) -> dict[int, psutil.Process]:
        """The running workers by rank."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, KeyError, ValueError):
                if f"--model_dir={self.model_dir}" in process.cmdline() and "launcher.main" in process.cmdline():
                    environ = process.environ()
                    self._marks.add(environ["LAUNCHER_JOB"])
                    found[json.loads(environ["TF_CONFIG"])["task"]["index"]] = process
        return found

    def attempt_of(self, worker: psutil.Process) -> int:
        """The attempt that a worker belongs to."""
        return int(re.search(r"attempt_(\d+)_", worker.environ()["LAUNCHER_PROGRESS_FILE"])[1])

    def orphans(self) -> int:
        """Processes that carry the mark of a job that `workers` has seen, or the folder in their command line."""
        count = 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("LAUNCHER_JOB") in self._marks or any(
                    str(self.folder) in word for word in process.cmdline()
                )
                count += mine and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
        return count


def restarted(run: Run, row: Row, at: float, rank: int, words: str) -> Row:
    """Waits for the end of a job that heals itself after a fault at Unix time `at` in worker `rank`."""
    run.until(lambda: run.error(1))
    code = run.wait()
    error = run.error(1)
    fill(run, row, at, error.get("time"), code)
    row.named = f"worker {error.get('worker')} {error.get('what')}"
    row.named_correctly = error.get("worker") == rank and words in f"{error.get('what')} {error.get('error')}"
    return row


def fill(run: Run, row: Row, at: float, detected: float | None, code: int) -> None:
    """What all rows have, after the job's end."""
    row.seconds_to_detection = detected - at if detected else None
    again = run.first_event(since=detected or at)
    row.seconds_to_training = again - at if again else None
    row.restarts = run.attempts() - 1
    row.steps_repeated = max(0, run.step(1) - run.restored(2)) if row.restarts else None
    row.orphans = run.orphans()
    if code:
        row.note = f"{row.note}; ended with exit code {code}".strip("; ")


def at_step(run: Run, step: int = _FAULT_STEP) -> None:
    """Waits until the first attempt has logged `step`, and looks at its processes."""
    run.until(lambda: run.step(1) >= step)
    run.workers()


# ------------------------------------------------------------------------------------------------------------- rows


def never_starts(folder: Path) -> Row:
    marker = folder / "marker"
    environ = {"FAULT_MARKER": str(marker)}
    run = Run(folder, f"--start_timeout={_START_SECONDS}", environ=environ)
    (folder / "sitecustomize.py").write_text(_NEVER_STARTS)
    run.prepend_path(folder)
    run.start()
    run.until(marker.exists)
    run.until(lambda: len(run.workers()) == WORKERS)
    row = Row("worker 1 never starts", note=f"--start_timeout={_START_SECONDS}")
    row = restarted(run, row, float(marker.read_text()), 1, "did not start")
    row.steps_repeated = 0 if run.step(1) == 0 else row.steps_repeated
    return row


def kill_in_write(folder: Path) -> Row:
    run = Run(folder)
    run.start()
    at_step(run, 1)
    chief = run.workers()[0]
    checkpoints = run.model_dir / "checkpoints"
    run.until(lambda: run.step(1) >= _FAULT_STEP)
    run.until(lambda: list(checkpoints.glob(".writing-*")), every=0.0002)
    at = time.time()
    chief.kill()
    chief.wait()
    half = [path.name for path in checkpoints.glob(".writing-*")]
    row = restarted(run, Row("SIGKILL of the chief while it writes a checkpoint"), at, 0, "killed by SIGKILL")
    row.note = "left half written" if half else "it had just been committed"
    return row


def kill_supervisor(folder: Path) -> Row:
    run = Run(folder)
    run.start()
    at_step(run)
    at = time.time()
    run.process.kill()
    run.process.wait()
    while run.workers():
        time.sleep(0.01)
    gone = time.time()
    orphans = run.orphans()
    run.start()
    row = Row("SIGKILL of the supervisor, same command again", note="detected: until the guard had ended all workers")
    fill(run, row, at, gone, run.wait())
    row.orphans = max(orphans, row.orphans or 0)
    return row


def random_kills(folder: Path, kills: int = 20) -> Row:
    """kill -9 of a random worker at random moments, every other one while the job trains."""
    dice = random.Random(4)
    seconds = json.loads((reference_of(folder) / "summary.json").read_text())["seconds"]
    training = seconds["train"] + seconds["input_wait"] + seconds["checkpoint"]
    runs: list[Run] = []
    found: list[tuple[float, bool]] = []
    repeated: list[int] = []
    orphans, differing = 0, []
    while len(found) < kills:
        run = Run(folder / str(len(runs) + 1), "--max_restarts=100")
        runs.append(run)
        run.start()
        while len(found) < kills and run.process.poll() is None:
            if len(found) % 2:
                seen = random_kill(run, dice, lambda: True, seconds["total"] - training)
            else:
                seen = random_kill(run, dice, lambda: is_training(run), training)  # noqa: B023 - at once
            if seen:
                found.append(seen)
        code = run.wait()
        repeated += repeated_steps(run)
        orphans += run.orphans()
        differing.append(f"exit code {code}" if code else difference(run.model_dir, reference_of(folder)))
    named = sum(right for _, right in found)
    return Row(
        f"SIGKILL of a worker at {len(found)} random moments",
        seconds_to_detection=max(seconds for seconds, _ in found),
        steps_repeated=max(repeated, default=0), orphans=orphans,
        named=f"{named} of {len(found)}", named_correctly=named == len(found), bitwise_equal=not any(differing),
        restarts=sum(run.attempts() - 1 for run in runs),
        note=f"{len(repeated)} of them while it trained; {len(runs)} job(s); the worst of all kills",
    )  # fmt: skip


def repeated_steps(run: Run) -> list[int]:
    """Steps done again after each attempt that had trained, by the next one that did: some are killed before."""
    trained = [attempt for attempt in range(1, run.attempts() + 1) if run.step(attempt)]
    return [max(0, run.step(one) - run.restored(other)) for one, other in itertools.pairwise(trained)]


def is_training(run: Run) -> bool:
    """Whether the attempt under way has logged a step."""
    attempt = run.attempts()
    return run.step(attempt) > 0 and not run.error(attempt)


def random_kill(run: Run, dice: random.Random, begins: Callable[[], bool], length: float) -> tuple[float, bool] | None:
    """Kills a worker at a moment within `length` seconds after `begins`.

    Returns:
      Seconds to detection, and whether the right one was named; None when there was nobody to kill at that moment.
    """
    run.until(begins)
    moment = time.monotonic() + dice.uniform(0, length)
    run.until(lambda: time.monotonic() > moment)
    workers = run.workers()
    if not workers:
        return None
    rank = dice.choice(sorted(workers))
    try:
        attempt = run.attempt_of(workers[rank])
        if run.error(attempt):
            return None  # about to be ended by the kill before
        at = time.time()
        workers[rank].kill()
    except psutil.Error:
        return None
    if not run.until(lambda: run.error(attempt), every=0.02):
        return None
    return run.error(attempt)["time"] - at, run.error(attempt)["worker"] == rank


ROWS: dict[str, Callable[[Path], Row]] = {
    function.__name__: function for function in (never_starts, kill_in_write, kill_supervisor, random_kills)
}


def reference_of(folder: Path) -> Path:
    """The undisturbed run's model_dir."""
    return folder.parent / "reference" / "run"


def table(rows: list[Row]) -> str:
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated; default: %(default)s")
    parser.add_argument("--kills", type=int, default=20, help="of random_kills; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    parser.add_argument("--table", type=Path, help="write the table here, too")
    options = parser.parse_args()
    names = options.rows.split(",")
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"--rows={unknown[0]}: expected some of {', '.join(ROWS)}")
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    rows: list[Row] = []
    try:
        reference = Run(folder / "reference")
        reference.start()
        if reference.wait():
            sys.exit(f"the undisturbed run failed, see {reference.output}")
        for name in names:
            function = ROWS[name]
            try:
                row = function(folder / name, options.kills) if function is random_kills else function(folder / name)
            except Exception as error:  # a row that cannot be made is a finding, and the others still count
                row = Row(name, note=f"FAILED: {type(error).__name__}: {error}")
            if row.bitwise_equal is None and row.orphans is not None:
                row.bitwise_equal = not difference(folder / name / "run", reference.model_dir)
            rows.append(row)
            print(f"{name}: {json.dumps(dataclasses.asdict(row), ensure_ascii=False)}", file=sys.stderr, flush=True)
    finally:
        if rows:
            print(table(rows))
            print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, ensure_ascii=False))
            if options.json:
                options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
            if options.table:
                options.table.write_text(table(rows))
        if "FAULTS_KEEP" not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
