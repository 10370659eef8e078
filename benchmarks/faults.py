"""What a job of two workers loses to each fault, and how long; prints a table and JSON.

python benchmarks/faults.py                          # all rows; about ten minutes on two cores
python benchmarks/faults.py --rows=kill_chief,freeze
python benchmarks/faults.py --json=faults.json --table=table.md

Real processes train ResNet-8 on digits for 60 steps, with a checkpoint every 5. All numbers come from the runs' files
and from the processes of this machine. Linux.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from fault_run import WORKERS, Run, difference

_FAULT_STEP = 12
_STALL_SECONDS = 8
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


def signalled(folder: Path, rank: int, number: signal.Signals, words: str, *flags: str) -> Row:
    run = Run(folder, *flags)
    run.start()
    at_step(run)
    at = time.time()
    run.workers()[rank].send_signal(number)
    return restarted(run, Row(f"{number.name} of {'the chief' if rank == 0 else f'worker {rank}'}"), at, rank, words)


def kill_chief(folder: Path) -> Row:
    return signalled(folder, 0, signal.SIGKILL, "killed by SIGKILL")


def kill_worker(folder: Path) -> Row:
    return signalled(folder, 1, signal.SIGKILL, "killed by SIGKILL")


def freeze(folder: Path) -> Row:
    return signalled(folder, 1, signal.SIGSTOP, "frozen")


def exception(folder: Path) -> Row:
    """An I/O error between two steps: the drill's, for want of a disk that fails on demand."""
    run = Run(folder)
    run.start("--drill=exception", f"--drill_step={_FAULT_STEP}")
    at_step(run)
    run.until(lambda: run.error(1))
    at = run.error(1)["error"]["time"]
    row = restarted(run, Row("I/O error raised in worker 1"), at, 1, "OSError")
    row.note = "made by --drill=exception"
    return row


def faulty(folder: Path, fault: str, *flags: str) -> tuple[Run, Path]:
    marker = folder / "marker"
    run = Run(folder, f"--gin_file={folder}/faulty.gin", *flags)
    (folder / "faulty.gin").write_text(
        "import faulty_digits\nimage_classification.data = @faulty_data()\nfaulty_data.source = @image_data()\n"
        f"faulty_data.fault = '{fault}'\nfaulty_data.rank = 1\nfaulty_data.step = {_FAULT_STEP}\n"
        f"faulty_data.marker = '{marker}'\n"
    )
    run.start()
    run.until(marker.exists)
    run.workers()
    return run, marker


def exception_for_good(folder: Path) -> Row:
    """What a retry is not expected to help ends the job; somebody mends the record and gives the command again."""
    run, marker = faulty(folder, "raise")
    code = run.wait()
    first = run.error(1)
    ended = time.time()
    run.start()
    again = run.wait()
    row = Row(
        "exception in worker 1's data", note=f"ended with exit code {code}, as a retry would not help; same command"
    )
    fill(run, row, float(marker.read_text()), first.get("time"), again)
    event = run.first_event(since=ended)
    row.seconds_to_training = event - ended if event else None
    row.named = f"worker {first.get('worker')} {first.get('what')}: {first.get('error')}"
    row.named_correctly = first.get("worker") == 1 and "record 4711 cannot be decoded" in row.named
    return row


def stuck(folder: Path) -> Row:
    run, marker = faulty(folder, "block", f"--stall_timeout={_STALL_SECONDS}")
    row = Row("data loader of worker 1 blocks", note=f"--stall_timeout={_STALL_SECONDS}")
    return restarted(run, row, float(marker.read_text()), 1, "faulty_digits.py")


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


def sigterm(folder: Path) -> Row:
    run = Run(folder)
    run.start()
    at_step(run)
    at = time.time()
    run.process.send_signal(signal.SIGTERM)
    code = run.wait()
    ended = time.time()
    run.start()
    row = Row("SIGTERM to the job", note=f"detected: until saved and ended with {code}; same command again")
    fill(run, row, at, ended, run.wait())
    row.named_correctly = code == 42
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


def damaged(folder: Path) -> Row:
    """The whole job dies, a disk damages the newest checkpoint, and the same command is given again."""
    from launcher.jobs.drill import files as drill_files

    run = Run(folder)
    run.start()
    at_step(run)
    run.process.kill()
    run.process.wait()
    while run.workers():
        time.sleep(0.01)
    newest = drill_files.newest_step(run.model_dir)
    checksum = drill_files.damage(run.model_dir, newest)
    at = time.time()
    run.start()
    run.until(lambda: "Skipping the damaged checkpoint" in run.log(2))
    detected = time.time()
    run.until(lambda: run.step(2) > 0)
    row = Row("newest checkpoint damaged, same command again")
    fill(run, row, at, detected, run.wait())
    kept = drill_files.is_kept(run.model_dir, checksum)
    row.named = f"step_{newest:08d}"
    row.named_correctly = f"{row.named}: " in run.log(2)
    kept_word = "kept for inspection" if kept else "NOT KEPT"
    row.note = f"damaged {newest}, went on from {run.restored(2)}; {kept_word}; seconds from the new start"
    return row


def disk_full(folder: Path) -> Row:
    """A small file system of its own for the checkpoints, filled up, and emptied when the job has noticed."""
    run = Run(folder)
    checkpoints = run.model_dir / "checkpoints"
    checkpoints.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(checkpoints)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        return Row("disk full", note="not run: this user may not mount a small file system; --drill=disk_full")
    try:
        run.start()
        at_step(run)
        at = time.time()
        with open(checkpoints / "ballast", "wb", buffering=0) as ballast:
            while True:
                try:
                    ballast.write(b"\0" * 65536)
                except OSError:
                    break
        told = ("No space left", "could not be written", "Could not write")
        run.until(lambda: run.error(1) or any(words in run.log(1) for words in told))
        detected = time.time()
        if not run.error(1):
            run.until(lambda: run.error(1) or run.step(1) > _FAULT_STEP + 10)
        (checkpoints / "ballast").unlink()
        row = Row("disk full under the checkpoints")
        fill(run, row, at, detected, run.wait())
        error = run.error(1)
        row.named = f"worker {error.get('worker')} {error.get('what')}" if error else "a warning in the chief's log"
        row.named_correctly = error.get("worker", 0) == 0 and ("No space left" in json.dumps(error) + run.log(1))
        row.bitwise_equal = not difference(run.model_dir, reference_of(folder))
        return row
    finally:
        run.end()
        subprocess.run(["umount", "-l", str(checkpoints)], check=False)


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
    function.__name__: function
    for function in (
        kill_chief, kill_worker, freeze, exception, exception_for_good, stuck, never_starts, sigterm, kill_in_write,
        damaged, disk_full, kill_supervisor, random_kills,
    )
}  # fmt: skip


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
