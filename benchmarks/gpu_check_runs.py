"""The runs of gpu_check.py: commands of the launcher in processes of their own, and what came of each."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PLAYED = ROOT / "tests" / "support" / "played_gpu"
RESNET = """
include 'resnet_gpu.gin'
import benchmarks.byte_images
image_data.name = None
image_data.source = @byte_images()
image_data.augmentation = 'none'
train.strategy = 'auto'
train.epochs = None
"""
LM = """
include 'lm_gpu.gin'
import launcher.gin_configs.data.python_docs
text_corpus.source = @PythonDocs()
text_corpus.vocab_size = 8192
"""


class NotRun(Exception):
    """The text says why a case cannot be run here."""


class Check:
    """One run of the cases, on a card or played."""

    def __init__(self, options: argparse.Namespace):
        self.small, self.engine, self.end = options.rehearse, options.engine, time.monotonic() + options.seconds
        self.folder = Path(tempfile.mkdtemp(prefix="gpu_check-"))
        self.keeps = options.keep and Path(options.keep)
        if self.keeps:
            self.keeps.mkdir(parents=True, exist_ok=True)
        self.environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONDONTWRITEBYTECODE": "1"}
        self.unplayed = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.environ["PYTHONPATH"] = self.unplayed
        if self.small:
            self.environ["PYTHONPATH"] = f"{PLAYED}{os.pathsep}{self.environ['PYTHONPATH']}"
            self.environ |= {"PATH": f"{PLAYED / 'bin'}{os.pathsep}{os.environ['PATH']}", "PLAYED_GPUS": "1"}
        self.runs: dict[str, dict[str, Any]] = {}

    @property
    def gpus(self) -> list[str]:
        """As the driver lists them: name, memory in MiB, driver."""
        command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
        try:
            return subprocess.run(
                command, env=self.environ, capture_output=True, text=True, timeout=60
            ).stdout.splitlines()
        except FileNotFoundError:
            return []

    @property
    def card(self) -> str | None:
        """As preflight calls it."""
        known = re.findall(r"(H100|H200|B200|A100|L40S|L4|T4|V100)", " ".join(self.gpus))
        return {"A100": "a100-80"}.get(known[0], known[0].lower()) if known else None

    @property
    def has_kernel(self) -> bool:
        """Whether cuDNN's attention can be run."""
        return not self.small

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    # ---------------------------------------------------------------------------------------------------- processes

    def begin(self, command: Sequence[str], name: str, more: Mapping[str, str] | None = None) -> subprocess.Popen:
        if self.left < 10:
            raise NotRun("no time is left")
        with (self.folder / f"{name}.log").open("w") as log:
            environ = {**self.environ, **(more or {})}
            return subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def finish(self, process: subprocess.Popen, name: str, seconds: float) -> tuple[int | None, str]:
        """Its exit code, None where its time was over, and what it printed."""
        try:
            code: int | None = process.wait(max(1.0, min(seconds * (6 if self.small else 1), self.left)))
        except subprocess.TimeoutExpired:
            code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return code, (self.folder / f"{name}.log").read_text(errors="replace").replace("\r", "\n")

    def launch(
        self, name: str, flags: Sequence[str], more: Mapping[str, str] | None = None, on_gpu: bool = True, gpus: int = 1
    ):
        """Begins a run of the launcher; `ended` takes it."""
        engine = (f"--engine={self.engine}", f"--replicas={gpus}") if on_gpu else ()
        if on_gpu and self.engine == "pjrt":
            engine += (f"--compile_cache={self.folder / 'cache'}",)
        command = [str(HERE / "gpu_run.py"), *flags, *engine, f"--model_dir={self.folder / name}"]
        return name, self.begin(command, name, more), time.monotonic()

    def ended(self, run: tuple[str, subprocess.Popen, float], seconds: float = 150) -> dict[str, Any]:
        """What came of a run: exit code, losses, milliseconds a step, peak memory, and its last words if it failed."""
        name, process, started = run
        code, said = self.finish(process, name, seconds)
        found: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - started, 1)}
        path = self.folder / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        train = [row for row in rows if row["split"] == "train"]
        found["losses"] = [row["loss"] for row in train]
        found["skipped"] = re.findall(r"step (\d+) skipped: gradients were not finite.*?not finite: ([^\n]*)", said)
        if steady := [row["examples_per_second"] for row in train[1:] if row.get("examples_per_second")]:
            found["examples_per_second"] = round(sorted(steady)[len(steady) // 2], 1)
        found["input_wait_fraction"] = train[-1].get("input_wait_fraction") if train else None
        for line in said.splitlines():
            if line.startswith("MEMORY "):
                found |= json.loads(line.removeprefix("MEMORY "))
        if seen := re.search(r"compiling the training step: took (\S+)", said):
            found["compiled_in"] = seen[1]
        if code != 0:
            found["said"] = said.splitlines()[-12:]
        self.runs[name] = found
        if self.keeps:
            (self.keeps / f"{name}.log").write_text(said[-100_000:])
        return found

    def run(self, name: str, flags: Sequence[str], more: Mapping[str, str] | None = None, seconds: float = 150):
        """A run that has the GPU for itself; it has to end well."""
        found = self.ended(self.launch(name, flags, more), seconds)
        if found["exit"] != 0:
            raise RuntimeError(f"{name} ended with {found['exit']}: {' | '.join(found['said'])[-1500:]}")
        return found

    # --------------------------------------------------------------------------------------------------------- recipes

    def digits(self, *bindings: str) -> list[str]:
        recipe = str(ROOT / "tests/support/small_digits.gin") if self.small else "resnet_cpu.gin"
        steps = ("train.steps = 20", "train.log_every = 1", "train.steps_per_loop = 1", "train.evaluate_every = 100000")
        return [f"--gin_file={recipe}", *bound(*steps, "Checkpoints.save_model = 'none'", *bindings)]

    def resnet(self, *bindings: str, batch: int = 256, steps: int = 80) -> list[str]:
        size = ("image_data.image_size = 32", "resnet.depth = 8") if self.small else ()
        size += ("byte_images.examples = 64",) if self.small else ()
        return self._recipe("resnet", RESNET, batch, steps, (*size, *bindings))

    def lm(self, *bindings: str, batch: int = 64, steps: int = 80) -> list[str]:
        size = ("layers = 1", "width = 64", "heads = 4", "kv_heads = 2", "hidden = 64") if self.small else ()
        sizes = [f"language_model.{one}" for one in size] + (["text_corpus.length = 128"] if self.small else [])
        return self._recipe("lm", LM, batch, steps, (*sizes, *bindings))

    def _recipe(self, name: str, text: str, batch: int, steps: int, bindings: Sequence[str]) -> list[str]:
        path = self.folder / f"{name}.gin"
        path.write_text(text)
        every = max(1, steps // 4)
        if self.small:
            batch, steps, every = 32 if name == "resnet" else 2, 4, 1
        run = (f"global_batch_size = {batch}", f"steps = {steps}", f"steps_per_loop = {every}", f"log_every = {every}")
        never = ("train.evaluate_every = 100000", "train.checkpoint_every = 100000", "Checkpoints.save_model = 'none'")
        return [f"--gin_file={path}", *bound(*(f"train.{one}" for one in run), *never, *bindings)]

    def timed(self, name: str, flags: Sequence[str], batch: int, seconds: float = 150, **more: Any) -> dict[str, Any]:
        found = self.run(name, flags, more or None, seconds)
        if found.get("examples_per_second"):
            found["ms"] = round(batch / found["examples_per_second"] * 1e3, 2)
        return found


def bound(*bindings: str) -> list[str]:
    """As flags."""
    return [f"--gin_param={one}" for one in bindings]


def apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """The largest difference of two runs' losses."""
    pairs = list(zip(first["losses"], second["losses"], strict=False))
    if not pairs:
        raise RuntimeError("a run has logged no loss")
    return max(abs(one - other) for one, other in pairs)


def require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(what)
