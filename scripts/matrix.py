#!/usr/bin/env python3
"""Tries Launcher with several versions of TensorFlow and Keras, each in a virtual environment of its own.

    python scripts/matrix.py                  # all environments, then checkpoints and models from each in each other
    python scripts/matrix.py --only=oldest    # one of them
    python scripts/matrix.py --list

Each environment runs the command line on the digits of the quickstart and the tests of what leans on TensorFlow most.
What was run, and what it printed, is in FOLDER/report.md. Exit code 0: all of it passed; 1: something failed.

Environment: PYTHONS, interpreters besides those on PATH and pyenv's, with colons between them.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TENSORFLOW = "tensorflow-cpu" if platform.machine() in ("x86_64", "AMD64") else "tensorflow"
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema", "psutil", "PyYAML", "tensorboard"]
TOOLS += ["matplotlib", "pandas"]
SECONDS = 1800  # for one command


@dataclasses.dataclass(frozen=True)
class Environment:
    """Versions that pip is asked for, "" for the newest, and the Pythons that have wheels of them, the best first."""

    tensorflow: str
    keras: str
    pythons: tuple[str, ...]


ENVIRONMENTS = {
    "oldest": Environment("==2.16.1", "==3.8.0", ("3.10", "3.11", "3.12")),
    "oldest_newest_keras": Environment("==2.16.2", "", ("3.12", "3.11")),
    "2.18_oldest_keras": Environment("==2.18.1", "==3.8.0", ("3.11", "3.12", "3.10")),
    "2.18": Environment("==2.18.1", "", ("3.12", "3.11")),
    "newest_oldest_keras": Environment("", "==3.12.0", ("3.11", "3.12", "3.13")),
    "newest": Environment("", "", ("3.13", "3.12", "3.11")),
}
CROSSED = ("oldest", "2.18", "newest")

# A program of two replicas, on one of which a step overflows float16, and no other step does.
OVERFLOW = """
import keras, numpy as np
import launcher
from launcher.step.precision import DynamicLossScale

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001), "mse")
    return model

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
x[9] = 3e38  # in the second step of eight, on the first of its replicas
y = x.clip(-1, 1).sum(1, keepdims=True)
history = launcher.fit(build, (x, y), epochs=2, batch_size=8, shuffle=False, replicas=2, precision="mixed_float16",
                       model_dir="overflow", log_every=1, loss_scale=DynamicLossScale(initial_scale=8.0))
assert all(np.isfinite(w.numpy()).all() for w in history.model.weights)
"""
DIGITS = "--gin_file=resnet_cpu.gin --gin_param='resnet.depth = 8' --gin_param='train.global_batch_size = 64'"
LOADS = """
import os, sys
import keras, numpy as np
from sklearn.datasets import load_digits
import launcher

images = load_digits().images[:64, :, :, None].astype("float32")
folder, expected = sys.argv[1:]
models = [launcher.load(folder), keras.saving.load_model(folder + "/model.keras")]
found = [np.asarray(model(images, training=False), "float32") for model in models]
np.testing.assert_array_equal(*found)
if not os.path.exists(expected):
    np.save(expected, found[0])
print("outputs differ by at most", float(np.abs(np.load(expected) - found[0]).max()))
assert np.abs(np.load(expected) - found[0]).max() < 1e-4
"""
RECOVERY = "tests/test_recovery.py"
TESTS = {
    "kill and resume, bit for bit": [
        f"{RECOVERY}::test_killed_run_resumes_by_the_same_command_and_ends_bitwise_as_undisturbed"
    ],
    "launcher.fit": ["tests/modes/test_fit.py"],
    "versions": ["tests/machine/test_versions.py"],
    "Keras's optimizers": ["tests/optimizers/test_keras_optimizers.py"],
}
LONGER = {  # where all environments are tried
    "model.keras out and in": ["tests/serving/test_model_file.py"],
    "a model given to launcher.fit": ["tests/modes/test_fit_model.py"],
    "metrics of Keras": ["tests/tasks/test_keras_metrics.py"],
    "preflight's dumps": ["tests/test_compiler_dumps.py"],
    "optimizers": ["tests/optimizers"],
    "checkpoints": ["tests/checkpoints"],
    "topologies": ["tests/test_topologies.py"],
    "step": ["tests/step"],
    "TPU programs": ["tests/tpu"],
    "callbacks and data of fit": [
        "tests/modes/test_callbacks.py",
        "tests/modes/test_callbacks_workers.py",
        "tests/modes/test_fit_data.py",
    ],
    "a train_step of one's own": ["tests/tasks/test_own_train_step.py"],
}


class Trial:
    """One environment: its folder, its interpreter, and what was run in it."""

    def __init__(self, name: str, folder: Path, dry_run: bool):
        self.name, self.wanted, self.folder, self.dry_run = name, ENVIRONMENTS[name], folder / name, dry_run
        self.python = self.folder / "venv/bin/python"
        self.rows: list[tuple[str, bool, float, str]] = []

    def install(self, *more: str) -> None:
        """Makes the virtual environment with the versions and `more`, or brings it up to date."""
        if self.dry_run or not self.python.exists():
            self.run("python", [find_python(self.wanted.pythons), "-m", "venv", str(self.folder / "venv")])
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        self.run("pip", [*pip, "--upgrade", "pip", "setuptools"])
        versions = [f"{TENSORFLOW}{self.wanted.tensorflow}", f"keras{self.wanted.keras}"]
        self.run("install", [*pip, *more, *versions, *TOOLS])

    def versions(self) -> str:
        if self.dry_run:
            return ""
        code = (
            "import platform; from importlib.metadata import version as v; print('Python', platform.python_version(), "
            f"*(f', {{n}} {{v(n)}}' for n in ('{TENSORFLOW}', 'keras', 'numpy', 'ml_dtypes', 'protobuf', 'h5py')))"
        )
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def launcher(self, what: str, flags: str, *, module: str = "launcher.main", says: str = "") -> bool:
        return self.run(what, [str(self.python), "-m", module, *shlex.split(flags)], says=says)

    def front_door(self, epochs: int) -> None:
        """The command line on the quickstart's data, for so long: what a person would do first."""
        write(self.folder / "overflow.py", OVERFLOW, self.dry_run)
        for old in ("quickstart", "overflow", "workers", "sharded"):
            shutil.rmtree(self.folder / old, ignore_errors=True)
        flags = f"--gin_file=resnet_cpu.gin --gin_param='train.epochs = {epochs}' --model_dir=quickstart"
        self.launcher("the quickstart's recipe", flags, says="best ")
        ran = self.run("two replicas, an overflow on one", [str(self.python), "overflow.py"], says="completed")
        if ran and not self.dry_run:
            summary = json.loads((self.folder / "overflow/summary.json").read_text())
            skipped = summary["metrics"]["train"]["skipped_steps"]
            self.rows.append(("steps skipped: one in each epoch", skipped == 2, 0.0, f"skipped_steps = {skipped}"))
        self.launcher(
            "two workers",
            f"--workers=2 {DIGITS} --gin_param='train.steps = 6' --model_dir=workers",
            module="launcher.launch",
            says="completed",
        )
        sharded = "--gin_param='train.shard = \"optimizer\"' --gin_param='train.optimizer = @adamw' --replicas=2"
        sharded += " --gin_param='adamw.learning_rate = 0.001'"
        self.launcher(
            "shard",
            f"{DIGITS} {sharded} --gin_param='train.steps = 6' --model_dir=sharded",
            says="completed",
        )

    def tests(self, groups: Mapping[str, Sequence[str]]) -> None:
        """Runs all tests in one process with its helpers; a row for each group."""
        results = self.folder / "tests.xml"
        results.unlink(missing_ok=True)
        command = [str(self.python), "-m", "pytest", "-q", "-n", os.environ.get("WORKERS", "3"), "--dist", "worksteal"]
        command += [
            "-p",
            "no:cacheprovider",
            f"--junitxml={results}",
            *(one for paths in groups.values() for one in paths),
        ]
        self.run("tests", command, cwd=ROOT, says="passed")
        if self.dry_run or not results.exists():
            return
        cases = [
            (f"{one.get('classname', '').replace('.', '/')}", one)
            for one in ElementTree.parse(results).iter("testcase")
        ]
        for what, paths in groups.items():
            of = tuple(path.partition("::")[0].removesuffix(".py") for path in paths)
            found = [one for name, one in cases if name.startswith(of)]
            bad = sum(one.find("failure") is not None or one.find("error") is not None for one in found)
            skipped = sum(one.find("skipped") is not None for one in found)
            seconds = sum(float(one.get("time", 0)) for one in found)
            said = f"{len(found) - bad - skipped} passed, {bad} failed, {skipped} skipped"
            self.rows.append((what, bool(found) and not bad, seconds, said))

    def trained(self, folder: str, steps: int, what: str = "") -> bool:
        flags = "--replicas=2 --gin_param=\"train.precision = 'mixed_float16'\""
        return self.launcher(
            what or f"trains {folder}",
            f"{DIGITS} {flags} --gin_param='train.steps = {steps}' --model_dir={shlex.quote(folder)}",
            says="evaluation at",
        )

    def loads(self, folder: Path, expected: Path, what: str) -> bool:
        write(self.folder / "loads.py", LOADS, self.dry_run)
        return self.run(what, [str(self.python), "loads.py", str(folder), str(expected)], says="outputs differ")

    def run(self, what: str, command: Sequence[str], *, cwd: Path | None = None, says: str = "") -> bool:
        """Runs a command, and keeps what it printed last that begins with or has `says` in it."""
        if self.dry_run:
            print("+", shlex.join(command))
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ.pop("PYTHONPATH", None)
        log = self.folder / f"{what.replace(' ', '_').replace(',', '')}.log"
        with log.open("w+") as file:
            try:
                done = subprocess.run(
                    command, cwd=cwd or self.folder, env=environ, stdout=file, stderr=subprocess.STDOUT, timeout=SECONDS
                ).returncode
            except subprocess.TimeoutExpired:
                done = -1
        seconds, lines = time.monotonic() - begun, log.read_text(errors="replace").splitlines()
        said = [line for line in lines if says and says in line] or lines[-1:]
        passed = done == 0 and (not says or (bool(said) and says in said[-1]))
        self.rows.append((what, passed, seconds, said[-1] if says and said else ""))
        print(
            f"{self.name}: {what}: {'passed' if passed else 'FAILED, see ' + str(log)} in {seconds:.0f} s", flush=True
        )
        if not passed:
            print("\n".join(lines[-30:]), flush=True)
            if what in ("python", "pip", "install"):
                raise SystemExit(1)
        return passed


def cross(trials: Sequence[Trial]) -> None:
    """Trains in each environment, goes on in each other one, and loads the models of each in each."""
    if len(trials) < 2:
        return
    for maker in trials:
        shutil.rmtree(maker.folder / "crossed", ignore_errors=True)
        maker.trained("crossed/trained", 10, "trains for the others")
        maker.loads(maker.folder / "crossed/trained", maker.folder / "crossed/outputs.npy", "model.keras, its own")
    for maker in trials:
        losses = {}
        for user in (maker, *(one for one in trials if one is not maker)):
            what = f"goes on with a run of {maker.name}"
            copy = maker.folder / "crossed" / f"in_{user.name}"
            if not maker.dry_run:
                shutil.copytree(maker.folder / "crossed/trained", copy)
            user.trained(str(copy), 15, what)
            if not maker.dry_run:
                losses[user.name] = evaluated(copy)
                near = abs(losses[user.name] - losses[maker.name]) < 1e-3
                user.rows.append(
                    (f"{what}: its loss", near, 0.0, f"{losses[user.name]:.6f}, there {losses[maker.name]:.6f}")
                )
            if user is not maker:
                user.loads(
                    maker.folder / "crossed/trained",
                    maker.folder / "crossed/outputs.npy",
                    f"model.keras of {maker.name}",
                )


def evaluated(folder: Path) -> float:
    return float(json.loads((folder / "summary.json").read_text())["metrics"]["eval"]["loss"])


def find_python(wanted: Sequence[str]) -> str:
    """The first interpreter of one of these versions."""
    for version in wanted:
        for path in candidates(version):
            code = "import sys; print('%d.%d' % sys.version_info[:2])"
            told = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
            if told == version:
                return path
    raise SystemExit(f"error: no Python {', '.join(wanted)} on PATH; name it in PYTHONS")


def candidates(version: str) -> Iterator[str]:
    yield from (path for path in os.environ.get("PYTHONS", "").split(":") if path)
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    yield from sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python"))
    yield from filter(None, [shutil.which(f"python{version}"), sys.executable])


def write(path: Path, text: str, dry_run: bool) -> None:
    if not dry_run:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def report(trials: Sequence[Trial]) -> str:
    lines = []
    for trial in trials:
        lines += [f"## {trial.name}", "", trial.versions(), "", "| | | seconds | printed |", "|---|---|---|---|"]
        lines += [
            f"| {what} | {'passed' if ok else '**FAILED**'} | {seconds:.0f} | {said.strip()[:99].replace('|', '/')} |"
            for what, ok, seconds, said in trial.rows
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="environments, with commas between them; all unless said")
    parser.add_argument("--folder", default=str(ROOT / ".matrix"), help="where environments and runs go")
    parser.add_argument("--install", action="store_true", help="make the environments without Launcher, and end")
    parser.add_argument("--list", action="store_true", help="print the environments and end")
    parser.add_argument("--dry_run", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args()
    if options.list:
        for name, wanted in ENVIRONMENTS.items():
            print(f"{name:20} {TENSORFLOW}{wanted.tensorflow or ', newest'}  keras{wanted.keras or ', newest'}")
        return 0
    names = options.only.split(",") if options.only else list(ENVIRONMENTS)
    for name in names:
        if name not in ENVIRONMENTS:
            parser.error(
                f"--only={options.only}: there is no environment {name!r}; there are {', '.join(ENVIRONMENTS)}"
            )
    trials = [Trial(name, Path(options.folder).resolve(), options.dry_run) for name in names]
    for trial in trials:
        trial.install(*([] if options.install else ["-e", f"{ROOT}[demo,text]"]))
    if options.install:
        return 0
    for trial in trials:
        trial.front_door(epochs=1 if options.only else 3)
        trial.tests(TESTS if options.only else TESTS | LONGER)
    cross([trial for trial in trials if trial.name in CROSSED])
    if not options.dry_run:
        text = report(trials)
        Path(options.folder, "report.md").write_text(text)
        print(f"\n{text}")
    return int(not all(passed for trial in trials for _, passed, *_ in trial.rows))


if __name__ == "__main__":
    sys.exit(main())
