"""Launcher: one command that trains TensorFlow models on any topology.

The map, from the door inwards. A room may use those below it, never those above.

    main               the worker's entry: flags, then one mode
    launch             the supervisor's entry: starts workers, watches them, restarts them
    jobs               workers started, watched and restarted: on this host, over ssh, on TPU VMs, in Slurm, Kubernetes
    modes              what each `--mode` does: a table, and a file a mode
    precision_report   what 16 bits would do to this model's gradients
    preflight          whether a step fits a device, and how fast it can be
    doctor             whether this machine and its peers are fit
    verify             the same training on several topologies, compared
    step_program       the step as a StableHLO program, and what runs it
    serving            a trained model at work: predict, export
    run                one run: recipe, plan, session, controller, evaluator, starting point
    watch              gradients looked at while a model trains
    step               one training step: trainer, gradients, loss scale, layer policies, moving statistics
    tasks              model, data, loss and metrics: image classification, translation, language modelling
    decoding           how a model writes text: greedy, sampled, beam search
    data               batches in an order that depends on (seed, step) alone
    checkpoints        written whole or not at all, verified, restored, retired
    optimizers         Keras optimizers and learning rates that recipes bind, and the ones Keras lacks
    reporting          console, metrics.jsonl, summary.json, TensorBoard, report.html
    machine            cluster, devices, strategy, TPU, ports, child processes, TensorFlow's import
    model_dir          the folder of a run, and the lease of its one writer
    worker             the worker's side of a supervised job: progress, being asked to stop, drills
    config             gin files and bindings, checked before anything is built
    errors             users' errors, exit codes, the nearest name
"""

import importlib
import importlib.util
import os
import signal
import sys

__version__ = "0.1.0"

_PYTHONS = (3, 10), (3, 13)  # those of setup.py
# What a program of ours is called while it imports this; "-m" is `python -m`, before it has found the module.
_PROGRAMS = ("-m", "launcher", "launcher-jobs")


def _refusal() -> str:
    """Why nothing here can run, or ""; nothing above its call may be newer than Python 3.6."""
    if not _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        return (
            "Launcher needs Python 3.{} to 3.{}, and this is {}.{}.{} ({}). Install Launcher into a virtual "
            "environment of one that fits; docs/install.md shows how"
        ).format(_PYTHONS[0][1], _PYTHONS[1][1], *sys.version_info[:3], sys.executable)
    if sys.platform == "win32":
        return (
            "Launcher does not run on Windows: it needs file locks, signals and child processes as Linux has them. "
            "Run it in WSL 2: type wsl --install in a terminal, then follow docs/install.md in its Ubuntu. A "
            "model.keras that a run has saved opens on Windows with Keras alone"
        )
    if not sys.flags.no_site and importlib.util.find_spec("absl") is None:
        return (
            f"the packages that Launcher needs are not installed for this Python ({sys.executable}). Type source "
            ".venv/bin/activate in the checkout, if scripts/install.sh has made it; else see docs/install.md"
        )
    try:
        os.getcwd()
    except OSError:
        return "the working directory has been removed: change to another"
    return ""


if _refusal():  # before any other import, which would fail with less to say
    if os.path.splitext(os.path.basename((sys.argv or [""])[0]))[0] in _PROGRAMS:
        sys.stderr.write("error: {}\n".format(_refusal()))  # noqa: UP032
        sys.exit(64)
    raise ImportError(_refusal())


def leave(number: int, frame: object = None) -> None:
    """Ends this process with 42: a signal asks it to stop, and nothing has been done."""
    what = "not training, so there is nothing to save; the same command goes on from the last checkpoint"
    os.write(2, f"{signal.Signals(number).name}: {what}\n".encode())
    os._exit(42)


# Before any other import, which take a third of a second: process 1 of a container hears no SIGTERM without a handler.
_STARTS = {"launcher.main", "launcher.launch"} & {*sys.orig_argv} or os.path.basename(sys.argv[0]) in _PROGRAMS[1:]
for _name in ("stdin", "stdout", "stderr"):
    if getattr(sys, _name) is None:  # closed, as a daemon's; the first file opened would take its place
        setattr(sys, _name, open(os.devnull, "r+"))  # noqa: SIM115
if _STARTS and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, leave)

# What Python programs use, each with the module that it is imported from when it is first used.
__all__ = ["fit", "load"]
_LAZY = {"fit": "launcher.modes.fit", "load": "launcher.serving.model_file"}
_BEFORE = "launcher.machine.tensorflow_import"  # says what to install, before a module needs what an old Keras lacks
_ENDING = "launcher.errors.excepthook"


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(_ENDING).install()
    importlib.import_module(_BEFORE).require_tensorflow()
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
