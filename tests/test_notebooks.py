"""`launcher.fit` in a notebook: real notebooks, executed by nbclient in real kernels."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.heavy]

FINE_TUNING = ROOT / "examples" / "notebook_fine_tuning.ipynb"  # which kills its kernel
EXAMPLES = sorted({*(ROOT / "examples").glob("*.ipynb")} - {FINE_TUNING})
DEADLINE_SECONDS = 240

SETUP = """
import os, time
import keras, numpy as np, tensorflow as tf
import launcher

x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
y = np.arange(256) % 3

class Shift(keras.layers.Layer):
    def build(self, shape):
        self.shift = self.add_weight(shape=(shape[-1],), name="shift")
        super().build(shape)

    def call(self, inputs):
        return inputs + self.shift

def build():
    model = keras.Sequential([keras.Input((8,)), Shift(), keras.layers.Dropout(0.1), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model

def bounded(features):
    if tf.reduce_max(features) > 3:  # which AutoGraph makes an operation of, from the text of this cell
        features = tf.minimum(features, 3.0)
    return features

def data():
    return np.stack(list(tf.data.Dataset.from_tensor_slices(x).map(bounded).as_numpy_iterator())), y

class Waits(keras.callbacks.Callback):
    '''Says that the third epoch is over, and goes on when there is a file.'''
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            open(self.folder + "/waits", "w").close()
            while not os.path.exists(self.folder + "/goes_on"):
                time.sleep(0.01)

def fit(name, **settings):
    return launcher.fit(build, data, validation=(x, y), epochs=6, model_dir=name, **settings)

def equal(one, other):
    pairs = zip(one.model.get_weights(), other.model.get_weights(), strict=True)
    return all(np.array_equal(*pair) for pair in pairs) and (one.history, one.epoch) == (other.history, other.epoch)
"""


class Notebook:
    """A notebook in a kernel of its own, in a folder; cells are executed one after another."""

    def __init__(self, client: NotebookClient, folder: Path):
        self._client = client
        self.folder = folder

    @property
    def kernel(self) -> psutil.Process:
        return psutil.Process(self._client.km.provisioner.pid)

    def run(self, source: str) -> Cell:
        cells = self._client.nb.cells
        cells.append(nbformat.v4.new_code_cell(source))
        return Cell(self._client.execute_cell(cells[-1], len(cells) - 1))

    def interrupted(self, source: str, heard: str) -> Cell:
        """Runs a cell whose callback `Waits`, and presses the stop button, whereupon it prints `heard`."""
        for name in ("waits", "goes_on"):
            (self.folder / name).unlink(missing_ok=True)
        problems: list[BaseException] = []
        has_ended = threading.Event()

        def press() -> None:
            try:
                until(lambda: (self.folder / "waits").exists() or has_ended.is_set())
                os.killpg(self.kernel.pid, signal.SIGINT)  # as Jupyter does, of whose kernels each leads a group
                until(lambda: heard in Cell(self._client.nb.cells[-1]).text or has_ended.is_set())
            except BaseException as problem:
                problems.append(problem)
            (self.folder / "goes_on").touch()

        thread = threading.Thread(target=press)
        thread.start()
        try:
            cell = self.run(source)
        finally:
            has_ended.set()
            thread.join()
        assert not problems, cell.error
        return cell


class Cell:
    """What is below a cell."""

    def __init__(self, cell: Any):
        self.outputs = cell.outputs

    def data(self, kind: str) -> list[str]:
        """What was displayed, of a MIME type."""
        return [one.data[kind] for one in self.outputs if "data" in one and kind in one.data]

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.outputs if one.output_type == "stream")

    @property
    def error(self) -> str:
        """The whole of what a person sees of an exception, without colours."""
        shown = ("\n".join(one.traceback) for one in self.outputs if one.output_type == "error")
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(shown))


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def opened(folder: Path, cells: Sequence[Any] = ()) -> Iterator[Notebook]:
    """A notebook with a fresh kernel, of which nothing is left afterwards."""
    client = NotebookClient(
        nbformat.v4.new_notebook(cells=list(cells)),
        timeout=DEADLINE_SECONDS,
        kernel_name="python3",
        allow_errors=True,
        shutdown_kernel="immediate",
        resources={"metadata": {"path": str(folder)}},
    )
    # A kernel that a test of ipykernel's own has started keeps the streams of the process to itself.
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    children: list[psutil.Process] = []
    with client.setup_kernel(env=environ):
        notebook = Notebook(client, folder)
        try:
            yield notebook
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = [notebook.kernel, *notebook.kernel.children(recursive=True)]
    _, alive = psutil.wait_procs(children, timeout=30)
    for process in alive:
        process.kill()
    assert not alive


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """One in which TensorFlow has been used before anything of the launcher."""
    with opened(tmp_path_factory.mktemp("notebook")) as found:
        assert not found.run(SETUP + "\nassert float(tf.reduce_sum(tf.ones(2))) == 2").error
        yield found


def test_after_tensorflow_was_used_it_trains_and_the_saved_notebook_has_one_progress_line(notebook):
    cell = notebook.run("history = fit('once')\nhistory")
    assert not cell.error
    lines = [line for line in cell.data("text/html") if "<progress" in line]
    assert len(lines) == 1 and "step 48/48" in lines[0]
    assert not re.search(r"^step \d", cell.text, re.MULTILINE)
    assert len(re.findall(r"^epoch \d+/6  step", cell.text, re.MULTILINE)) == 6
    assert len(cell.text.splitlines()) < 40


def test_the_history_is_kerass_own_and_has_the_report(notebook):
    assert not notebook.run("history = fit('once')").error
    assert notebook.run("print(isinstance(history, keras.callbacks.History))").text.split() == ["True"]
    (report,) = notebook.run("history.report()").data("text/html")
    assert report.startswith("<iframe srcdoc=") and "&lt;!doctype html&gt;" in report.lower()
    assert "launcher.fit in a notebook" in report and "ipykernel" not in report


def test_the_same_cell_again_returns_at_once_and_more_epochs_go_on(notebook):
    first = notebook.run("first = fit('again')")
    again = notebook.run("again = fit('again'); print(equal(first, again))")
    assert not first.error and not again.error
    assert "already trained to step 48" in again.text and again.text.strip().endswith("True")
    longer = notebook.run("launcher.fit(build, data, validation=(x, y), epochs=7, model_dir='again').epoch")
    assert longer.data("text/plain")[-1] == "[0, 1, 2, 3, 4, 5, 6]"


def test_a_policy_that_a_call_chose_is_not_that_of_the_next(notebook):
    cell = notebook.run("fit('half', precision='mixed_bfloat16'); print(keras.config.dtype_policy().name)")
    assert cell.text.strip().endswith("float32")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("fit('wrong', epoch=3)", r"UsageError: fit: there is no argument 'epoch'; did you mean 'epochs'\?"),
        (
            "fit('wrong', replicas=2)",
            r"UsageError: TensorFlow was used before .* on 2 replicas .*restart the kernel.* or give workers=N .*",
        ),
        (
            "def broken():\n    return build().undefined\nlauncher.fit(broken, data)",
            r"In\[\d+\] line 2, in broken\(\)\n    return build\(\)\.undefined\n"
            r"UsageError: In\[\d+\] line 2, in broken\(\): AttributeError: .*'undefined'.*",
        ),
        ("launcher.fit(build, data, workers=0)", r"UsageError: fit: workers=0 must be a whole number, 1 or more.*"),
        (
            "launcher.fit(build, tf.data.Dataset.from_tensor_slices((x, y)).batch(32), workers=2)",
            r"UsageError: fit: train is a tf.data.Dataset.*give a function that makes it",
        ),
        (
            "lines = open('lines', 'w')\ndef reads():\n    return lines\nlauncher.fit(build, reads, workers=2)",
            r"UsageError: fit: the call cannot be sent to other processes \(\w+Error: .*",
        ),
    ],
)
def test_a_mistake_is_one_message_without_a_traceback(notebook, call, message):
    assert re.fullmatch(message, notebook.run(call).error)


def test_what_is_no_mistake_of_the_users_keeps_its_traceback(notebook):
    error = notebook.run("def data():\n    raise MemoryError('all is used')\nlauncher.fit(build, data)").error
    assert "Traceback (most recent call last)" in error and "MemoryError: all is used" in error


@pytest.mark.nightly  # test_recovery.py stops runs by the same signal
def test_a_run_that_the_stop_button_ended_goes_on_and_ends_as_one_that_nobody_touched(tmp_path):
    with opened(tmp_path) as notebook:
        notebook.run(SETUP + "\nreplicas = 2")
        call = "stopped = fit('stopped', callbacks=[Waits(os.getcwd())], replicas=2)"
        stopped = notebook.interrupted(call, "finishing the step and saving")
        assert re.fullmatch(
            r"Interrupted: asked to stop: step 24 of 48 is saved; running the cell again .*", stopped.error
        )
        assert "restored step 24" in notebook.run(call).text
        assert notebook.run("print(equal(stopped, fit('untouched', replicas=2)))").text.strip().endswith("True")
        assert "restart the kernel" in notebook.run("fit('more', replicas=3)").error
        # Who presses again later than a double click does not want to wait.
        notebook.run("from launcher.worker import preemption; preemption.REPEAT_SECONDS = 0")
        again = notebook.run(
            "import signal\n"
            "def stop(*_):\n"
            "    for _ in range(2):\n"
            "        os.kill(os.getpid(), signal.SIGINT)\n"
            "        time.sleep(0.3)\n"
            "fit('twice', callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stop)])"
        )
        assert "KeyboardInterrupt" in again.error
        assert notebook.run("print('the kernel lives')").text.strip() == "the kernel lives"


# That workers go on to the same bits, test_callbacks_workers.py has.
@pytest.mark.parametrize("is_compared", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_workers_train_what_cells_define_and_the_stop_button_has_them_save(tmp_path, is_compared):
    with opened(tmp_path) as notebook:
        notebook.run(SETUP)
        call = "stopped = fit('stopped', callbacks=[Waits(os.getcwd())], workers=2)"
        stopped = notebook.interrupted(call, "passed on to the workers")
        assert re.fullmatch(r"Interrupted: asked to stop: what was trained is saved; the same call .*", stopped.error)
        goes_on = notebook.run(call)
        assert "restored step 24" in goes_on.text, goes_on.error
        assert len([line for line in goes_on.data("text/html") if "<progress" in line]) == 1
        shown = notebook.run("print(stopped.model.evaluate(x, y, verbose=0)[0] - stopped.history['val_loss'][-1])")
        assert abs(float(shown.text)) < 1e-5
        if is_compared:
            untouched = notebook.run("untouched = fit('untouched', workers=2); print(equal(stopped, untouched))")
            assert untouched.text.strip().endswith("True"), untouched.error
        broken = notebook.run("def broken():\n    return build().undefined\nlauncher.fit(broken, data, workers=1)")
        assert re.match(r"UsageError: First error .*: In\[\d+\] line 2, in broken\(\): AttributeError", broken.error)


@pytest.mark.nightly
def test_workers_do_not_outlive_the_kernel(tmp_path):
    with opened(tmp_path) as notebook:
        notebook.run(SETUP)
        kernel = notebook.kernel
        started: list[psutil.Process] = []

        def kill() -> None:
            until(lambda: (tmp_path / "waits").exists() or not kernel.is_running())
            started.extend(kernel.children(recursive=True))
            kernel.kill()
            (tmp_path / "goes_on").touch()

        thread = threading.Thread(target=kill)
        thread.start()
        with contextlib.suppress(Exception):  # nbclient's, of a kernel that died
            notebook.run("fit('orphans', callbacks=[Waits(os.getcwd())], workers=2)")
        thread.join()
        assert len(started) >= 3
        _, alive = psutil.wait_procs([kernel, *started], timeout=60)  # the kernel is this process's own child
        assert not alive


@pytest.mark.nightly
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_run_from_top_to_bottom(path, tmp_path):
    written = nbformat.read(path, as_version=4)
    nbformat.validate(written)
    with opened(tmp_path) as notebook:
        for cell in written.cells:
            if cell.cell_type == "code":
                assert not notebook.run(cell.source).error


@pytest.mark.nightly
@pytest.mark.skipif(not importlib.util.find_spec("keras_hub"), reason="keras-hub is not installed: docs/fine_tuning.md")
def test_fine_tuning_goes_on_after_its_kernel_was_killed_and_its_file_is_plain_keras(tmp_path):
    written = nbformat.read(FINE_TUNING, as_version=4)
    sources = [cell.source for cell in written.cells if cell.cell_type == "code"]
    with opened(tmp_path) as killed, pytest.raises(DeadKernelError):
        for source in sources:
            killed.run(source)
    with opened(tmp_path) as notebook:
        cells = [notebook.run(source) for source in sources]
        assert not [cell.error for cell in cells if cell.error]
        text = "".join(cell.text for cell in cells)
        assert re.search(r"restored step (8|16) from runs/lora\n", text) and "completed  step 32 of 32" in text
        assert cells[-1].text == "equal answers; Launcher was imported: False\n"
        (fit,) = (source for source in sources if "launcher.fit" in source)
        untouched = notebook.run(fit.replace("history =", "untouched =").replace("runs/lora", "runs/untouched"))
        assert "restored" not in untouched.text
        pairs = "zip(history.model.get_weights(), untouched.model.get_weights(), strict=True)"
        shown = notebook.run(f"print(all(np.array_equal(*pair) for pair in {pairs}))")
        assert shown.text.strip() == "True", untouched.error + shown.error
