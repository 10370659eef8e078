"""`--sweep`: trials of one recipe with other bindings, each a job of `launcher.launch` with a folder of its own."""

import contextlib
import dataclasses
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Any

from absl import flags

from launcher import modes
from launcher.config.gin_files import read_param
from launcher.errors import EXIT_CODES, EXIT_DONE, EXIT_PREEMPTED, EXIT_USAGE, UsageError
from launcher.jobs import agent, local, supervisor
from launcher.jobs.job import Job
from launcher.jobs.output import JobConsole
from launcher.machine import child_process
from launcher.machine.cluster.claim import whole_number
from launcher.modes import compare
from launcher.reporting import run_folder
from launcher.reporting.comparison import ComparedRuns

_MOST, _LONGEST_NAME, _SHOWN, _TURN_SECONDS = 1000, 255, 5, 0.05
_BETWEEN = re.compile(r""";(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""")  # a semicolon outside of quotes
_FORM = "write NAME = VALUE, VALUE, each NAME once, as in 'cosine.peak = 0.1, 0.05; seed = 0, 1'; strings need quotes"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One job: its place from 0, what it is called, where it writes, and the flags that it alone has."""

    index: int
    title: str
    folder: Path
    own: list[str]

    def read(self) -> run_folder.RunFolder:
        return run_folder.read(self.folder)

    def is_done(self, common: Sequence[str]) -> bool:
        """Whether its workers, which have the flags `common` as well, have come to the end of this very command."""
        found, given = self.read(), [*common, *self.own]
        ran = shlex.split(found.record.command) if found.record else []
        return found.status == "completed" and ran[-len(given) :] == given

    def said(self, how: str) -> str:
        """How it ended, and what it came to."""
        results = ComparedRuns.of([self.read()]).results().items()
        told = [f"{name} {cells[0]}" for name, cells in results if name.startswith("best ") or name == "wall time"]
        return ", ".join([f"{self.title}: {how}", *told])


def run(options: flags.FlagValues, job: Job, arguments: Sequence[str], console: JobConsole) -> int:
    """Runs the trials that are not done and compares them; `job` is what `arguments` describe without `--sweep`."""
    if options.sweep is None or options.backend in ("member", "kubernetes"):
        raise UsageError(f"--at_once goes with --sweep, and neither with --backend={options.backend}; change the flags")
    chosen = trials = _trials(options.sweep, job.model_dir)
    if is_array := "SLURM_ARRAY_TASK_ID" in os.environ:
        last = len(trials) - 1
        advice = f"it counts the trials from 0: sbatch --array=0-{last}"
        chosen = [trials[whole_number(os.environ, "SLURM_ARRAY_TASK_ID", most=last, advice=advice)]]
    gpus = local.divide_gpus(local.visible_gpus(os.environ), options.at_once, "at_once")
    shares = [{"CUDA_VISIBLE_DEVICES": ",".join(names)} for names in gpus] or [{}] * options.at_once
    program = [sys.executable, "-m", "launcher.launch", *_without_own(arguments)]
    if options.dry_run:
        sys.stdout.write("".join(f"{shlex.join([*program, *trial.own])}\n" for trial in chosen))
        return EXIT_DONE
    done = [trial for trial in chosen if trial.is_done(_without_own(job.arguments))]
    console.note("\n".join(trial.said("done before") for trial in done))
    codes = _run([trial for trial in chosen if trial not in done], program, shares, console)
    console.close()  # so that the table comes after it
    folders = [found for trial in chosen if (found := trial.read()).is_run]
    if codes.get(0) != EXIT_USAGE and len(folders) > 1 and not is_array:
        compare.show(ComparedRuns.best_first(folders), job.model_dir, most=_SHOWN)
    return EXIT_PREEMPTED if EXIT_PREEMPTED in codes.values() else next(filter(None, codes.values()), EXIT_DONE)


def _run(
    todo: Sequence[Trial], program: Sequence[str], shares: Sequence[Mapping[str, str]], console: JobConsole
) -> dict[int, int]:
    """Runs as many at once as there are `shares`; exit codes by place, 42 for what a signal has kept from beginning."""
    signals: list[int] = []
    passed_on, codes = 0, dict[int, int]()
    running: dict[int, tuple[Trial, Path | None, subprocess.Popen[bytes]]] = {}
    processors = agent.divide_processors(len(shares), os.environ)
    with supervisor.listening(signals):
        while todo or running:
            heard = len(signals)
            if heard or EXIT_PREEMPTED in codes.values():
                codes.update({trial.index: EXIT_PREEMPTED for trial in todo})
                todo = []
            for slot in range(len(shares)):
                if not todo or slot in running:
                    continue
                trial, *todo = todo
                log = trial.folder / "sweep.log" if len(shares) > 1 else None
                how = "goes on" if trial.read().is_run else "begins"
                console.note(f"{trial.title}: {how}{f', output in {log}' if log else ''}")
                if log:
                    trial.folder.mkdir(parents=True, exist_ok=True)
                with log.open("ab") if log else contextlib.nullcontext() as output:
                    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                    before = child_process.die_with_parent(processors[slot])
                    environ = {**os.environ, **shares[slot]}
                    started = child_process.start([*program, *trial.own], env=environ, preexec_fn=before, **streams)
                running[slot] = trial, log, started
            for slot, (trial, log, process) in [*running.items()]:
                for _ in range(heard - passed_on):
                    process.terminate()  # also for SIGINT: SIGTERM means the same from the first moment on
                if (code := process.poll()) is None:
                    continue
                del running[slot]
                code = EXIT_PREEMPTED if heard and code == -SIGTERM else code if code >= 0 else 128 - code
                codes[trial.index] = code
                words = child_process.last_words(log.read_text().splitlines(), 3) if log and code else ""
                how = f"exit code {code}, {EXIT_CODES.get(code, 'killed')}" if code else "done"
                console.note(trial.said(how) + words)
                if code == EXIT_USAGE and not trial.index:
                    return codes  # all would be refused
            passed_on = heard
            console.turn()
            time.sleep(_TURN_SECONDS)
    return codes


def _without_own(words: Sequence[str]) -> list[str]:
    """A command line without the flags that each trial has of its own, or none has."""
    own = flags.FlagValues()
    for name in ("sweep", "at_once", "model_dir"):
        flags.DEFINE_string(name, None, "", flag_values=own)
    flags.DEFINE_bool("dry_run", False, "", flag_values=own)
    return modes.parse(own, ["", *words], known_only=True)


def _trials(text: str, model_dir: str) -> list[Trial]:
    """Every combination of the values in a text such as 'a.b = 1, 2; seed = 0, 1'; the first name varies slowest."""
    values: dict[str, Sequence[Any]] = {}
    for part in _BETWEEN.split(text):
        name, _, listed = map(str.strip, part.partition("="))
        with contextlib.suppress(UsageError):
            if name not in values and (found := read_param(f"{name} = [{listed}]").value):
                values[name] = found
                continue
        raise UsageError(f"--sweep={text!r}: {part.strip()!r} cannot be read; {_FORM}")
    chosen = [*itertools.islice(itertools.product(*values.values()), _MOST + 1)]
    if len(chosen) > _MOST:
        raise UsageError(f"--sweep={text!r}: more than {_MOST:,} trials; leave values out")
    ends = {name: re.findall(r"(?:^|(?<=[./]))(?=(.+))", name)[::-1] for name in values}
    every = [*itertools.chain(*ends.values())]
    short = {name: next((end for end in ends[name] if every.count(end) == 1), name) for name in values}
    trials: dict[str, Trial] = {}
    for index, combination in enumerate(chosen):
        pairs = [*zip(values, combination, strict=True)]
        name = re.sub(r"[^A-Za-z0-9._=,+-]", "_", ",".join(f"{short[one]}={value}" for one, value in pairs))
        if name in trials or len(name) > _LONGEST_NAME:
            raise UsageError(f"--sweep={text!r}: {name} is too long, or the folder of two trials; change the values")
        bound = [f"--seed={value}" if one == "seed" else f"--gin_param={one} = {value!r}" for one, value in pairs]
        folder = Path(model_dir, name)
        title = f"trial {index + 1} of {len(chosen)}, {name}"
        trials[name] = Trial(index, title, folder, [*bound, f"--model_dir={folder}"])
    return [*trials.values()]
