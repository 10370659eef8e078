#!/usr/bin/env python3
"""Tells which traps of docs/traps.md the installed versions have: one small check a row, without Launcher.

    python scripts/traps.py
    python scripts/traps.py --only=sentinel        # a row, by its name in the table
    python scripts/traps.py --list

Each row is one line: holds, mended or cannot tell, its name, and what was seen. "Cannot tell" is what needs a package
that is not installed, a compiler that cannot be started here, or another way of asking than these versions have.
Rows of one package run in one process, which may end without the others.

Exit code 0: as docs/traps.md says; 1: a row is mended in versions of which the page does not say so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trap_rows import (  # the modules make the rows
    ROWS,
    CannotTell,
    Row,
    compilers,  # noqa: F401
    files,  # noqa: F401
    training,  # noqa: F401
)

SECONDS = 400.0  # for the rows of one process
SHOWN = ("tensorflow", "keras", "jax", "jaxlib", "libtpu", "numpy", "tensorflow-datasets", "safetensors", "optax",
         "grain", "orbax-checkpoint", "mlflow", "keras-rs")  # fmt: skip
ANOTHER_NAME = {  # the distributions that bring a module, where they are called otherwise
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
    "keras": ("keras", "keras-nightly"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
KNOWN = {  # rows that do not hold in versions that docs/traps.md names
    "metric-variable": lambda has: _before(has.get("keras", ""), (3, 14)),
    "dump-names": lambda has: _before(has.get("jaxlib", ""), (0, 12)),
    "jax-export": lambda has: not _before(has.get("tensorflow", ""), (2, 22)),
    "tpu-lookup-text": lambda has: not _before(has.get("jaxlib", ""), (0, 12)),
}


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in SHOWN:
        for distribution in ANOTHER_NAME.get(name, (name,)):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(name, importlib.metadata.version(distribution))
    return found


def _before(version: str, other: tuple[int, int]) -> bool:
    return tuple(map(int, version.split(".")[:2])) < other if version else False


def _is_there(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # of the package that it is in
        return importlib.util.find_spec(module) is not None
    return False


def told(one: Row) -> tuple[str, str]:
    """holds, mended or cannot tell, and why."""
    missing = [module for module in one.needs if not _is_there(module)]
    if missing:
        return "cannot tell", f"{', '.join(missing)} is not installed"
    try:
        seen, holds = one.check()
    except CannotTell as why:
        return "cannot tell", str(why)
    except Exception as error:  # another interface, most likely
        return "cannot tell", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
    return ("holds" if holds else "mended"), seen


def run_here(names: list[str], file: Path) -> None:
    """In a process of its own: writes a line a row."""
    if any(ROWS[name].needs[0] == "tensorflow" for name in names):
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[:1]
        tf.config.set_logical_device_configuration(cpu[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    with file.open("a") as lines:
        for name in names:
            lines.write(json.dumps([name, *told(ROWS[name])]) + "\n")
            lines.flush()


def run(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """What becomes of each row, in order."""
    first = dict.fromkeys(ROWS[name].needs[0] for name in names)
    environ = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    environ |= {"JAX_PLATFORMS": "cpu", "TF_ENABLE_ONEDNN_OPTS": environ.get("TF_ENABLE_ONEDNN_OPTS", "1")}
    for package in first:
        own = [name for name in names if ROWS[name].needs[0] == package]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows")
            file.touch()
            command = [sys.executable, os.path.abspath(__file__), f"--only={','.join(own)}", f"--write={file}"]
            why = ""
            try:
                done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
                why = f"the process ended with {done.returncode}"
            except subprocess.TimeoutExpired:
                why = f"not within {SECONDS:.0f} s"
            answers = {name: rest for name, *rest in map(json.loads, file.read_text().splitlines())}
        for name in own:
            state, seen = answers.get(name, ["cannot tell", why])
            yield name, state, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="rows, with commas between them; all unless said")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{one.name:28} needs {', '.join(one.needs)}" for one in ROWS.values()))
        return 0
    names = options.only.split(",") if options.only else list(ROWS)
    for name in names:
        if name not in ROWS:
            parser.error(f"--only={options.only}: there is no row {name!r}; --list prints them")
    if options.write:
        run_here(names, options.write)
        return 0
    has = versions()
    print(", ".join(f"{name} {version}" for name, version in has.items()), flush=True)
    states, news = [], []
    for name, state, seen in run(names):
        states.append(state)
        if state == "mended" and not KNOWN.get(name, lambda has: False)(has):
            news.append(name)
        print(f"{state:11} {name:28} {seen}", flush=True)
    print(", ".join(f"{states.count(one)} {one}" for one in ("holds", "mended", "cannot tell")))
    if news:
        print(f"docs/traps.md does not say so yet: {', '.join(news)}")
    return int(bool(news))


if __name__ == "__main__":
    sys.exit(main())
