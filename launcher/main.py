"""Trains a TensorFlow model on one CPU, many GPUs, many hosts or a TPU pod.

    python -m launcher.main --gin_file=resnet_cpu.gin
    python -m launcher.main --gin_file=resnet_cpu.gin --replicas=2 --gin_param='train.steps = 30'
    python -m launcher.main --gin_file=resnet_gpu.gin --dry_run

The gin file says what to train, the flags where and how. Without --gin_file, the recipes are listed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from absl import flags

import launcher
from launcher import modes
from launcher.config import gin_files
from launcher.errors import EXIT_CODES, EXIT_DONE, LauncherError, UsageError, failures, user_code
from launcher.machine import compile_cache, exit_barrier, installation
from launcher.machine.tensorflow_import import require_tensorflow
from launcher.reporting import summary
from launcher.worker import drill, preemption, progress

_ENDING = f"Exit codes: {'; '.join(f'{code} {says}' for code, says in EXIT_CODES.items())}."


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, runs one mode and returns an exit code of `launcher.errors.EXIT_CODES`."""
    argv = list(sys.argv if argv is None else argv)
    summary.note_beginning()
    progress.install_stack_dump(os.environ)
    progress.Progress(os.environ).report(phase="startup")
    try:
        options = parse(argv)
        if options.help:
            print(modes.help_text(__doc__ or "", options, list(options), _ENDING))
            return EXIT_DONE
        if options.version:
            print(installation.version_text())
            return EXIT_DONE
        request = modes.make_request(options)
        mode = modes.MODES[request.mode]
        if mode.needs_recipe and not request.gin_file:
            print(_recipe_list())
            return EXIT_DONE
        if mode.needs_jax:
            installation.require_python_of_jax(f"--mode={mode.name}")
        if request.data_dir is not None:
            # TFDS reads the same variable, and so do the processes this one starts.
            os.environ["TFDS_DATA_DIR"] = os.path.expanduser(request.data_dir)
        if isinstance(request, modes.TrainRequest):
            preemption.configure(request.notice_signals, request.stop_after)
            if request.compile_cache is not None:
                compile_cache.use(request.compile_cache)
        drill.install(os.environ)
        trains = mode.trains and not request.dry_run
        if not trains and signal.getsignal(signal.SIGTERM) is launcher.leave:  # for long work outside of Python
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with preemption.before_training() if trains else contextlib.nullcontext():
            if mode.needs_tensorflow:
                require_tensorflow()  # takes seconds, and may be missing
            return modes.run(request)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as raised:
        error = failures.explained(raised)
        code = failures.exit_code(error)
        progress.record_error(os.environ, error, code)
        is_told = isinstance(error, LauncherError)
        if not is_told or os.environ.get(user_code.TRACEBACK) == "1":  # ours: the whole traceback
            traceback.print_exc()
        if is_told:
            print(f"error: {error}", file=sys.stderr)
        return code


def prepare(argv: Sequence[str]) -> None:
    """Imports what `main` would with this command line and does nothing else, for a process that runs it later."""
    request = modes.make_request(parse(argv))
    require_tensorflow()
    modes.module_of(request)
    importlib.import_module("launcher.run.loading").import_builtins()  # with TensorFlow, which is there only now


def parse(argv: Sequence[str]) -> flags.FlagValues:
    """The flags of a command line, of which each is known and has a value of its type.

    Raises:
      UsageError: one is not, or there is something else.
    """
    try:
        options, rest = modes.options_of(argv)
    except UsageError:
        from launcher.launch import SHOWN_FLAGS  # late: nothing else needs it

        if not {word.partition("=")[0].strip("-") for word in argv[1:]} & ({*SHOWN_FLAGS} - {*modes.define_flags()}):
            raise
        line = f"{installation.python()} -m launcher.launch {shlex.join(argv[1:])}"
        raise UsageError(f"this is for the supervisor, which starts the workers: {line}") from None
    if options.mode == "compare":
        options.run = [*options.run, *rest]
    else:
        modes.refuse_arguments(rest)
    return options


def _recipe_list() -> str:
    recipes = gin_files.recipes()
    width = max((len(name) for name, _ in recipes), default=0)
    lines = ["Recipes (python -m launcher.main --gin_file=NAME):"]
    lines += [f"  {name:<{width}}  {purpose}" for name, purpose in recipes]
    return "\n".join(lines)


def command() -> NoReturn:
    """The program `launcher`: as `python -m launcher.main`, which finds modules in the working directory, too."""
    sys.path.insert(0, os.getcwd())
    exit_barrier.run_program(_main_and_end)


def _main_and_end() -> int:
    code = main()
    # A request to stop that comes while the process ends must not change the exit code.
    preemption.ignore_repeats()
    return code


if __name__ == "__main__":
    exit_barrier.run_program(_main_and_end)
