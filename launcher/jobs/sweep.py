"""`--sweep`: trials of one recipe with other bindings, each a job of `launcher.launch` with a folder of its own."""

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from launcher import modes
from launcher.config import gin_files
from launcher.errors import EXIT_DONE, EXIT_PREEMPTED, EXIT_RETRY, EXIT_USAGE, UsageError
from launcher.jobs import agent, local, supervisor
from launcher.jobs.output import JobConsole
from launcher.machine import child_process, nvidia
from launcher.machine.cluster.claim import whole_number
from launcher.modes import compare
from launcher.reporting import comparison, run_folder

_MOST, _LONGEST, _TURN_SECONDS = 1000, 255, 0.05
_BETWEEN = re.compile(r""";(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""")  # a semicolon outside of quotes
_FORM = "write NAME = VALUE, VALUE, each NAME once, as in 'cosine.peak = 0.1, 0.05; seed = 0, 1'; strings need quotes"


class Trial(NamedTuple):
    """One job: what it is called, where it writes, its command, and the last of its workers' flags."""

    title: str
    folder: Path
    command: list[str]
    arguments: list[str]

    def is_done(self) -> bool:
        """Whether this very command has come to its end, and would train the same now; in doubt the run knows."""
        run = run_folder.read(self.folder)
        if run.record is None or run.status != "completed":
            return False
        ran = shlex.split(run.record.command)
        return ran[-len(self.arguments) :] == self.arguments and _is_as_it_was(run.record)

    def said(self, how: str) -> str:
        """A line on its end, and what it came to."""
        results = comparison.ComparedRuns.of([run_folder.read(self.folder)]).results().items()
        told = [f"{name} {cells[0]}" for name, cells in results if name.startswith("best ") or name == "wall time"]
        return ", ".join([f"{self.title}: {how}", *told])


def _is_as_it_was(record: run_folder.RunRecord) -> bool:
    """Whether a run's recipe is all of its program, and in files that nobody has touched since."""
    opened: list[str] = []
    with contextlib.suppress(UsageError, OSError):
        paths = map(gin_files.find_file, record.recipe)
        statements = [statement for path in paths for statement in gin_files.read_file(path, opened=opened)]
        is_all = not any(isinstance(statement, gin_files.Import) for statement in statements)
        return is_all and all(os.path.getmtime(path) < record.started for path in opened)
    return False


def run(options: flags.FlagValues, model_dir: str, console: JobConsole, *given: Sequence[str]) -> int:
    """Runs the trials that are not done and compares them; `given` are the command lines of the job and its workers."""
    if options["sweep"].present > 1:
        raise UsageError("--sweep is given more than once, and only the last would be read: join them with a semicolon")
    trials = _trials(options.sweep or "", model_dir, *given)
    if (task := "SLURM_ARRAY_TASK_ID") in os.environ:
        trials = [trials[whole_number(os.environ, task, most=len(trials) - 1, advice="give sbatch --array this range")]]
    gpus = local.divide_gpus(nvidia.names(os.environ), options.at_once, "at_once")
    if options.dry_run:
        sys.stdout.write("".join(f"{shlex.join(trial.command)}\n" for trial in trials))
        return EXIT_DONE
    done = [trial for trial in trials if trial.is_done()]
    console.note("\n".join(trial.said("done before") for trial in done))
    shares = [{nvidia.VARIABLE: ",".join(names)} for names in gpus] or [{}] * options.at_once
    codes = _run([trial for trial in trials if trial not in done], shares, console)
    console.close()  # so that the table comes after it
    runs = [stored for trial in trials if (stored := run_folder.read(trial.folder)).is_run]
    runs.sort(key=comparison.score)
    if len(runs) > 1:
        compare.run(modes.CompareRequest(run=tuple(str(stored.path) for stored in runs), model_dir=model_dir))
    return EXIT_PREEMPTED if EXIT_PREEMPTED in codes else next(filter(None, codes), EXIT_DONE)


def _run(todo: Sequence[Trial], shares: Sequence[Mapping[str, str]], console: JobConsole) -> list[int]:
    """Runs as many at once as there are `shares`; the exit codes, 42 for what a signal has kept from beginning."""
    codes, signals, passed_on = list[int](), list[int](), 0
    running: dict[int, tuple[Trial, Path | None, subprocess.Popen[bytes]]] = {}
    with supervisor.listening(signals):
        while todo or running:
            if (heard := len(signals)) or EXIT_PREEMPTED in codes:
                codes, todo = [*codes, *[EXIT_PREEMPTED] * len(todo)], []
            if (are_refused := {*codes} == {EXIT_USAGE}) and not running:  # all that have ended
                raise UsageError("the first trials were refused, as the others would be")
            for slot in [slot for slot in range(len(shares)) if slot not in running][: 0 if are_refused else len(todo)]:
                trial, *todo = todo
                log = trial.folder / "sweep.log" if len(shares) > 1 else None
                how = "goes on" if run_folder.read(trial.folder).is_run else "begins"
                console.note(f"{trial.title}: {how}{f', output in {log}' if log else ''}")
                before = child_process.die_with_parent(agent.divide_processors(len(shares), os.environ)[slot])
                try:
                    os.makedirs(log.parent if log else ".", exist_ok=True)
                    with log.open("ab") if log else contextlib.nullcontext() as output:
                        options = {"env": {**os.environ, **shares[slot]}, "stdout": output, "stderr": output}
                        running[slot] = trial, log, child_process.start(trial.command, preexec_fn=before, **options)
                except OSError as error:
                    codes.append(EXIT_RETRY)
                    console.note(f"{trial.title}: cannot be started: {error.strerror} ({error.filename})")
            for slot, (trial, log, process) in [*running.items()]:
                for _ in range(heard - passed_on):
                    process.terminate()  # also for SIGINT: SIGTERM means the same from the first moment on
                if (code := process.poll()) is not None:
                    del running[slot]
                    code = EXIT_PREEMPTED if heard and code == -signal.SIGTERM else code if code >= 0 else 128 - code
                    codes.append(code)
                    lines = log.read_text(errors="replace").splitlines()[-3:] if log and code else []
                    console.note("\n  | ".join([trial.said(f"exit code {code}" if code else "done"), *lines]))
            passed_on = heard
            time.sleep(_TURN_SECONDS)
    return codes


def _trials(text: str, model_dir: str, *given: Sequence[str]) -> list[Trial]:
    """Every combination of the values in `text`, the first name varying slowest; `given` to the job and its workers."""
    parts = [part.partition("=") for part in _BETWEEN.split(text)]
    bound = gin_files.values("\n".join(f"{name.strip()} = [{listed.strip()}]" for name, _, listed in parts))
    if len(bound) != len(parts) or not all(bound.values()):
        raise UsageError(f"--sweep={text!r} cannot be read; {_FORM}")
    chosen = [*itertools.islice(itertools.product(*bound.values()), _MOST + 1)]
    ends = {name: re.findall(r"(?:^|(?<=[./]))(?=(.+))", name)[::-1] for name in bound}
    short = [next((e for e in ends[name] if sum(e in some for some in ends.values()) == 1), name) for name in bound]
    said = [",".join(f"{name}={value}" for name, value in zip(short, values, strict=True)) for values in chosen]
    folders = [Path(model_dir, re.sub(r"[^A-Za-z0-9._=,+-]", "_", name)) for name in said]
    if len(chosen) > _MOST or len({*folders}) < len(folders) or max(map(len, said)) > _LONGEST:
        raise UsageError(f"--sweep={text!r}: over {_MOST:,} trials, or two of one folder, or a long name; take others")
    replaced = flags.FlagValues()
    for name in ("sweep", "at_once", "model_dir"):
        flags.DEFINE_string(name, None, "", flag_values=replaced)
    flags.DEFINE_bool("dry_run", False, "", flag_values=replaced)
    of_job, theirs = (modes.parse(replaced, ["", *words], known_only=True) for words in given)
    trials = []
    for number, (folder, values) in enumerate(zip(folders, chosen, strict=True), 1):
        pairs = zip(bound, values, strict=True)
        own = [f"--seed={value}" if name == "seed" else f"--gin_param={name} = {value!r}" for name, value in pairs]
        own.append(f"--model_dir={folder}")
        title = f"trial {number} of {len(chosen)}, {folder.name}"
        trials.append(Trial(title, folder, [sys.executable, "-m", "launcher.launch", *of_job, *own], [*theirs, *own]))
    return trials
