"""Launcher: one command that trains TensorFlow models on any topology.

The map, from the door inwards. A room may use those below it, never those above. To know how a run trains, read from
`run` down: precision_report, preflight, doctor and verify are instruments beside it, and serving comes after it.

    main               the worker's entry: flags, then one mode
    launch             the supervisor's entry: starts workers, watches them, restarts them
    jobs               workers started, watched and restarted: on this host, over ssh, on TPU VMs, in Slurm, Kubernetes
    precision_report   what 16 bits would do to this model's gradients
    preflight          whether a step fits a device, and how fast it can be
    doctor             whether this machine and its peers are fit
    verify             the same training on several topologies, compared
    modes              what each `--mode` does: a table, and a file a mode
    step_program       the step as a StableHLO program, and what runs it
    serving            a trained model at work: predict, export
    run                one run: recipe, plan, session, controller, evaluator, starting point
    watch              gradients looked at while they are made: taps between layers, what float16 loses
    step               one training step: trainer, gradients, loss scale, layer policies, moving statistics
    runtime            the replicas that run a step's function and hold its state: TensorFlow's strategies
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

import os
import sys

__version__ = "1.0.0"

_PYTHONS = (3, 10), (3, 13)  # those of setup.py
# What a program of ours is called while it imports this; "-m" is `python -m`, before it has found the module.
_PROGRAMS = ("-m", "launcher", "launcher-jobs")
_PROGRAM = os.path.splitext(os.path.basename((sys.argv or [""])[0]))[0]
# Modules that a file of the same name would hide: these, and Python's own but for those that nobody here imports.
_PACKAGES = "absl gin jax keras launcher ml_dtypes numpy packaging rich tensorflow tensorflow_datasets typeguard"
_UNUSED = "cgi chunk configparser crypt doctest graphlib imp optparse pipes profile sched secrets test this trace wave"


def _refusal() -> str:
    """Why nothing here can run, or ""; nothing above its call may be newer than Python 3.6, or import Python's own."""
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
    try:
        os.getcwd()
    except OSError:
        return "the working directory has been removed: change to another"
    if _hiding():
        return _hiding()
    from importlib.util import find_spec

    if not sys.flags.no_site and find_spec("absl") is None:
        return (
            f"the packages that Launcher needs are not installed for this Python ({sys.executable}). Type source "
            ".venv/bin/activate in the checkout, if scripts/install.sh has made it; else see docs/install.md"
        )
    return ""


def _hiding() -> str:
    """Which file would be imported in place of a module that is needed here, as Python looks there first; or ""."""
    needed = {*sys.stdlib_module_names} - {*_UNUSED.split()}
    folders = [] if getattr(sys.flags, "safe_path", False) else [sys.path[0] or "."]  # since Python 3.11
    for folder in [*folders, "."] if _PROGRAM in _PROGRAMS else folders:
        is_ours = os.path.realpath(folder) == os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir))
        for entry in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            path, name = os.path.join(folder, entry), entry[:-3] if entry.endswith(".py") else entry
            is_module = entry != name or os.path.isfile(os.path.join(path, "__init__.py"))
            if is_module and (name in needed or (name in _PACKAGES.split() and not is_ours)):
                return f"{os.path.relpath(path)} hides the module {name}, which is needed here: rename your file"
    return ""


def _refuse(kind: object, error: object, trace: object, before: object = sys.excepthook) -> None:
    """Ends a program, as Python's hook for an error that nobody caught does."""
    if str(error) != _REFUSAL or hasattr(sys, "ps1"):
        before(kind, error, trace)  # type: ignore
        return
    sys.stderr.write(f"error: {_REFUSAL}\n")
    sys.exit(64)


_REFUSAL = _refusal()
if _REFUSAL:  # before any other import, which would fail with less to say
    if _PROGRAM in _PROGRAMS:
        _refuse(None, _REFUSAL, None)
    sys.excepthook = _refuse
    raise ImportError(_REFUSAL)

import importlib  # noqa: E402
import signal  # noqa: E402

from launcher.config.old_names import OldNames  # noqa: E402

if not os.path.isdir(os.path.join(__path__[0], "models")):  # a checkout, where models/ and gin_configs/ stand beside
    __path__.append(os.path.dirname(__path__[0]))
sys.meta_path.insert(0, OldNames(__path__[-1]))


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
__all__ = ["fit", "lint", "load"]
_LAZY = {"fit": "launcher.modes.fit", "lint": "launcher.run.layer_lint", "load": "launcher.serving.model_file"}
_BEFORE = "launcher.machine.tensorflow_import"  # says what to install, before a module needs what an old Keras lacks
_ENDING = "launcher.errors.excepthook"
TYPE_CHECKING = False  # but for checkers and editors, which know the name
if TYPE_CHECKING:
    from launcher.modes.fit import fit as fit
    from launcher.run.layer_lint import lint as lint
    from launcher.serving.model_file import load as load
else:

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        importlib.import_module(_ENDING).install()
        importlib.import_module(_BEFORE).require_tensorflow()
        return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
