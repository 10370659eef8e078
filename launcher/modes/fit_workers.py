"""`launcher.fit(..., workers=N)`: the call is sent to workers of `launcher.launch`, as a program in the run's folder.

Functions and classes of a program or of a notebook's cells go by value, by cloudpickle; what modules hold goes by name.
The text of the program and the cells goes with them: AutoGraph reads it, and messages name the file or the cell.
"""

import contextlib
import inspect
import io
import json
import linecache
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import keras
import tensorflow as tf

import launcher
from launcher import errors
from launcher.errors import EXIT_DONE, EXIT_PREEMPTED, LauncherError, Preempted, UsageError, notebook, user_code
from launcher.machine import child_process, installation
from launcher.machine import cluster as cluster_lib
from launcher.model_dir import check_model_dir
from launcher.modes.history import History
from launcher.reporting import strict_json
from launcher.reporting.console import CellLine
from launcher.serving import weights
from launcher.tasks.keras_model import KerasTask
from launcher.tasks.keras_private import forget_names

FOLDER, _PROGRAM, _CALL, _HISTORY = "program", "program.py", "call.pkl", "history.json"
_SENT = "sent"  # in place of a file's name, which `_of_cell`, as calls that are stored know it, puts back
_TEXT = """\
# Written by launcher.fit(..., workers=N) for its workers. call.pkl is Python: run it where you trust who wrote it.
import launcher
from launcher.modes import fit_workers

fit_workers.keep(__file__, launcher.fit(**fit_workers.received(__file__)))
"""
_ROOT = Path(launcher.__file__).parents[1]
_PROGRESS = re.compile(r"\[worker 0\] ((?:epoch \S+  )?step (\d+)/(\d+) .*)")
_OF_TENSORFLOW = re.compile(r"\[worker \d+\] [IW]\d{4} ")  # to developers, a page of it; the logs have it
_ERRORS: dict[int, type[LauncherError]] = {
    errors.EXIT_USAGE: UsageError,
    errors.EXIT_FAILED: errors.TrainingError,
    errors.EXIT_RETRY: errors.PeerError,
}


def fit(*, workers: int, model_dir: str, strategy: Any, replicas: int | None, **call: Any) -> History:
    """Does what `launcher.fit` with these arguments does, by workers of this machine, and shows what they print.

    Raises:
      UsageError: an argument cannot be sent or is wrong.
      LauncherError: the run failed, or was asked to stop.
    """
    if type(workers) is not int or workers < 1:
        raise UsageError(f"fit: workers={workers!r} must be a whole number, 1 or more, or None for this process alone")
    if strategy not in ("auto", "multi_worker"):
        raise UsageError(f"fit: workers={workers} decides on the strategy: leave strategy={strategy!r} out")
    check_model_dir(model_dir)
    call = {"precision": keras.config.dtype_policy().name, **call}
    program = _write(call, Path(model_dir, FOLDER))
    flags = {"workers": workers, "gin_file": program, "model_dir": model_dir, "replicas": replicas}
    # What the program draws before its call of fit must be the same, too, and its devices are set up before.
    flags |= {name: call.get(name) for name in ("seed", "engine")}
    _launch([f"--{name}={value}" for name, value in flags.items() if value is not None])
    history = History()
    kept = json.loads(program.with_name(_HISTORY).read_text(encoding="utf-8"))
    history.epoch, history.history, history.model_dir = kept["epoch"], kept["history"], model_dir
    history.set_model(_trained(call, model_dir))
    return history


def received(program: str) -> dict[str, Any]:
    """The arguments of `launcher.fit` that lie beside a program in a run's folder."""
    with Path(program).with_name(_CALL).open("rb") as file:
        sent = pickle.load(file)
        sys.path += [place for place in sent["path"] if place not in sys.path]
        linecache.cache |= {name: (len(lines), None, lines, name) for name, lines in sent["cells"].items()}
        return dict(pickle.load(file))


def keep(program: str, history: History) -> None:
    """Writes the history beside the program, on the chief."""
    if cluster_lib.resolve(os.environ).is_chief:
        kept = {"epoch": history.epoch, "history": history.history}
        strict_json.replace_file(Path(program).with_name(_HISTORY), json.dumps(kept, default=float))


def _write(call: Mapping[str, Any], folder: Path) -> Path:
    """The program of a call, written with what it is called with, in a folder of the run."""
    for name in ("train", "validation"):
        if isinstance(call[name], tf.data.Dataset):
            raise UsageError(f"fit: {name} is a tf.data.Dataset, which cannot be sent: give a function that makes it")
    content = io.BytesIO()
    try:
        _pickle(dict(call), content)
    except LauncherError:
        raise
    except Exception as error:  # of whatever the arguments refer to
        raise UsageError(
            f"fit: the call cannot be sent to other processes ({user_code.summary(error)}): let functions make what "
            "they need, and refer to nothing of this process, such as a dataset or an open file"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _HISTORY).unlink(missing_ok=True)
    own = getattr(sys.modules["__main__"], "__file__", None)  # the program, as it is now
    names = [name for name in (*linecache.cache, own) if name and (name == own or notebook.is_cell(name))]
    texts = {name: linecache.getlines(name) for name in names}
    with open(os.open(folder / _CALL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        pickle.dump({"path": [place for place in sys.path if place], "cells": texts}, file)
        file.write(content.getbuffer())
    program = folder / _PROGRAM
    program.write_text(_TEXT, encoding="utf-8")
    return program


def _pickle(value: Any, file: IO[bytes]) -> None:
    try:
        import cloudpickle  # late: only this needs it
    except ImportError:
        raise UsageError(f"fit: workers=N needs cloudpickle: {installation.command('notebook')}") from None

    class Pickler(cloudpickle.Pickler):
        """Keeps the names of files and cells in the code of functions, which cloudpickle 3.1 replaces."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType) and obj.co_filename != _SENT:
                return _of_cell, (obj.replace(co_filename=_SENT), obj.co_filename)
            return super().reducer_override(obj)

    Pickler(file).dump(value)


def _of_cell(code: types.CodeType, name: str) -> types.CodeType:
    return code.replace(co_filename=name)


def _launch(flags: Sequence[str]) -> None:
    """Runs `launcher.launch` with these flags to its end; LauncherError where it does not end well."""
    search = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile() as said:
        process = child_process.start(
            [sys.executable, "-m", "launcher.launch", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, "PYTHONPATH": search},
            # The workers end with the kernel, too: the supervisor has them save.
            preexec_fn=lambda: child_process.signal_at_parents_end(signal.SIGTERM),
        )
        assert process.stdout is not None
        try:
            with _passing_on_the_stop_button(process):
                _show(process.stdout)
                code = process.wait()
        finally:
            child_process.kill_group(process.pid)
            process.wait()
            process.stdout.close()
        said.seek(0)
        why = notebook.with_cells(said.read().decode(errors="replace").strip().removeprefix("error: "))
    if code == EXIT_PREEMPTED:
        told = Preempted("asked to stop: what was trained is saved; the same call goes on from there")
        told.signal = signal.SIGINT
        raise told
    if code not in (EXIT_DONE, *_ERRORS):  # stopped twice, or killed
        raise Preempted(f"launcher.launch ended with exit code {code}: the same call goes on from the last checkpoint")
    if code != EXIT_DONE:
        raise _ERRORS[code](why)


@contextlib.contextmanager
def _passing_on_the_stop_button(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Inside the block, what interrupts this process asks the supervisor to stop; it knows what a second time means."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda *_: process.terminate()) if in_main else None
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)


def _show(output: IO[bytes]) -> None:
    """Prints lines as they come; in a notebook, those that tell of steps in the place of each other."""
    in_notebook, line = notebook.shell() is not None, CellLine()
    for text in (content.decode(errors="replace").rstrip("\n") for content in output):
        if in_notebook and (found := _PROGRESS.match(text)):
            line.show(found[1], int(found[2]) / int(found[3]))
        elif not (in_notebook and _OF_TENSORFLOW.match(text)):
            print(text, flush=True)
    line.flush()


def _trained(call: Mapping[str, Any], model_dir: str) -> keras.Model:
    """The model with the weights of the last checkpoint, in this process and of no strategy."""
    summary = strict_json.read_object(Path(model_dir, "summary.json"))
    before = keras.config.dtype_policy()
    try:
        forget_names()
        keras.config.set_dtype_policy(summary["policy"])
        model = call["build"]()
        if not model.built:  # its data says how
            forget_names()
            own = {name: call[name] for name in inspect.signature(KerasTask).parameters if name in call}
            model = KerasTask(**own).model()
    finally:
        keras.config.set_dtype_policy(before)
    store = weights.checkpoints_of(model_dir)
    step = weights.step_of(store, "last")
    assert step is not None
    weights.put(model, weights.read(store, step, model, averaged=False).arrays)
    return model
