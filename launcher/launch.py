"""Starts the workers of one training job, watches them, and restarts them until the job is done.

    python -m launcher.launch --workers=2 --gin_file=resnet_cpu.gin
    python -m launcher.launch --workers=2 --gin_file=resnet_cpu.gin --dry_run
    python -m launcher.launch --backend=ssh --hosts=a,b --gin_file=resnet_gpu.gin
    python -m launcher.launch --workers=2 --gin_file=resnet_cpu.gin --drill=kill

Flags that are not listed here are those of launcher.main, which every worker runs. A worker that dies, freezes or
stops making progress is named, and all go on from the last checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from launcher import errors, modes
from launcher.errors import EXIT_DONE, LauncherError, PeerError, UsageError, failures
from launcher.jobs import backends, kubernetes, private_network, sweep, transports
from launcher.jobs.drill import rehearsal
from launcher.jobs.job import Job
from launcher.jobs.output import JobConsole, flush_standard_streams
from launcher.jobs.supervisor import Supervisor
from launcher.machine import cluster, installation
from launcher.machine.child_process import run_forked
from launcher.model_dir import check_is_path, check_model_dir, lease
from launcher.modes import flag
from launcher.worker import preemption


@dataclasses.dataclass
class JobFlags:
    """The flags that every backend reads."""

    workers: int | None = flag(
        "Processes that train together, each with its replicas. Default: 1, or one a host, or one a task of a Slurm "
        "job; on several hosts, a multiple of their number.",
        lower_bound=1,
    )
    max_restarts: int | None = flag(
        "Restarts without progress before giving up; progress starts the count over. On Kubernetes: restarts of all "
        "pods, of which those after a new checkpoint are not counted. Default: 3; 0 for a member, whose scheduler "
        "restarts all of them.",
        lower_bound=0,
    )
    stall_timeout: float | None = flag(
        "Seconds without progress after which the stuck worker is named and all are restarted. Default: 20 times the "
        "median time between reports, at least 60; start-up and compilation always have 600 or more."
    )
    start_timeout: float = flag("Seconds until a worker's first report, and to connect.", 600.0)
    grace_period: float = flag("Seconds that workers may go on after SIGTERM or SIGINT, to save.", 60.0)
    on_event: str | None = flag(
        "Command that is run at each restart and at the end of the job, with JSON on its standard input: event, text, "
        "model_dir, step, exit_code, error and more."
    )


_FLAGS = {**modes.fields_of(JobFlags), **rehearsal.FLAGS}
# Those of its own, in the order of --help.
SHOWN_FLAGS = ("backend", *_FLAGS, "dry_run", "version", "help", *backends.FLAGS)
# What the supervisor's exit codes mean where that is not what a worker's means.
EXIT_CODES = {
    **errors.EXIT_CODES,
    errors.EXIT_RETRY: "gave up after restarts without progress, run again",
    "128 + N": "stopped by signal N",
}
_ENDING = f"""\
In MODEL_DIR: logs/attempt_K/worker_I.log, and error.json: which worker failed first, and why.
Exit codes: {"; ".join(f"{code} {says}" for code, says in EXIT_CODES.items())}."""

_LEASE_SECONDS = 2.0


def define_flags() -> flags.FlagValues:
    """The flags of the job; those of its workers are `launcher.modes.define_flags`."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # a value of launcher.main's flags may stand apart from its name
    backends.define_flags(values)
    modes.define(_FLAGS, values)
    flags.DEFINE_bool("dry_run", False, "Print what would run and stop; nothing is written.", flag_values=values)
    modes.define_about(values)
    # Not shown: what the tests run in the place of training.
    flags.DEFINE_string("worker_module", "launcher.main", "Program of each worker.", flag_values=values)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, runs the job and returns its exit code."""
    argv = list(sys.argv if argv is None else argv)
    console = JobConsole()
    try:
        options = define_flags()
        rest = modes.parse(options, argv, known_only=True)
        if options.help:
            sys.stdout.write(modes.help_text(__doc__ or "", options, SHOWN_FLAGS, _ENDING) + "\n")
            return EXIT_DONE
        if options.version:
            sys.stdout.write(installation.version_text() + "\n")
            return EXIT_DONE
        job = make_job(options, rest)
        if options["sweep"].present or options["at_once"].present:
            return sweep.run(options, check_model_dir(job.model_dir), console, argv[1:], job.arguments)
        kind = backends.chosen(options)
        if not kind.is_supervised:
            return kubernetes.run(options, job, argv[1:])
        drill = rehearsal.make(options, job, console)
        if "private_network" in kind.flags and not options.dry_run:  # before any thread
            console.note(private_network.enter(options.private_network, job, os.environ))
        planned = kind.backend(options, job, console)
        if options.dry_run:
            sys.stdout.write(planned.plan(job.next_attempt()))
            return EXIT_DONE
        flush_standard_streams()
        # Members share a folder: the chief's holds the lease for all.
        writes_to = None if job.member else job.model_dir
        with lease.held(
            writes_to, environ={}, say=console.note, supervised_job=job.identity, isolate=_isolated
        ) as held:

            def supervise() -> int:
                there = kind.backend(options, job, console)
                return Supervisor(job=job, backend=there, console=console, held=held, drill=drill).run()

            return rehearsal.run(drill, job, supervise, console) if drill else supervise()
    except Exception as raised:
        error = failures.explained(raised)
        flush_standard_streams()
        if not isinstance(error, LauncherError):  # ours: the whole traceback
            traceback.print_exc()
        if console.is_used:
            console.error(f"error: {error}")
        else:  # nothing runs that could be held up
            sys.stderr.write(f"error: {error}\n")
        return failures.exit_code(error)
    finally:
        console.close()


def make_job(options: flags.FlagValues, arguments: Sequence[str]) -> Job:
    """The job that the flags describe.

    Args:
      options: parsed flags of the job.
      arguments: the command line of its workers.

    Raises:
      UsageError: one of either is wrong; `launcher.main` would refuse the same, in every worker.
    """
    kind = backends.chosen(options)
    for name in ("stall_timeout", "start_timeout", "grace_period", "connect_timeout"):
        value = options[name].value
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name}={value:g}: must be a number of seconds above 0")
    values, rest = modes.options_of(["launcher.main", *arguments], others=SHOWN_FLAGS)
    modes.refuse_arguments(rest)
    request = modes.make_request(values)
    if isinstance(request, modes.TrainRequest):
        preemption.configure(request.notice_signals, request.stop_after)
    if not request.gin_file:
        raise UsageError("no recipe: add --gin_file=NAME; python -m launcher.main lists the recipes")
    if modes.MODES[request.mode].starts_processes:
        raise UsageError(f"--mode={request.mode} starts processes of its own; run it with python -m launcher.main")
    model_dir = request.run_dir
    check_is_path(model_dir)
    identity = uuid.uuid4().hex[:12]
    place = cluster.resolve(os.environ) if options.backend == "member" else None
    return Job(
        identity=identity,
        workers=kind.num_workers(options),
        module=options.worker_module,
        request=request,
        arguments=(*arguments, *(() if request.model_dir else (f"--model_dir={model_dir}",))),
        model_dir=model_dir,
        max_restarts=kind.max_restarts if options.max_restarts is None else options.max_restarts,
        stall_timeout_seconds=options.stall_timeout,
        start_timeout_seconds=options.start_timeout,
        grace_period_seconds=options.grace_period,
        scratch=Path(_temporary_folder(), f"launcher-{identity}"),
        on_event=_on_event(options.on_event),
        checks_hosts=options.check_hosts,
        leaves_out_stragglers=options.leave_out_stragglers,
        member=place.index if place else None,
        is_pod=place is not None and place.source == cluster.kubernetes.SOURCE,
    )


def _on_event(command: str | None) -> tuple[str, ...]:
    words = () if command is None else transports.split("on_event", command, "leave it out, or give a command")
    if missing := words and transports.missing(words[0], "install it, or give its whole path"):
        raise UsageError(f"--on_event={command}: {missing}")
    return words


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise PeerError(f"no temporary folder can be written to: {error.strerror}; make room or set TMPDIR") from None


def _isolated(work: Callable[[], Any]) -> Any:
    """The result of `work` on the lease's file; OSError whatever goes wrong, so that a dead disk holds nobody up."""
    try:
        return run_forked(work, seconds=_LEASE_SECONDS)
    except RuntimeError as error:
        raise OSError(f"the disk did not answer: {error}") from error


def command() -> int:
    """The program `launcher-jobs`, and `python -m launcher.launch`."""
    code = main()
    preemption.ignore_repeats()
    return code


if __name__ == "__main__":
    sys.exit(command())
