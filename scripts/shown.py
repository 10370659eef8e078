#!/usr/bin/env python3
"""Writes what pages show of real runs: outputs of the notebooks in examples/, and docs/shown/ with a run's report,
a comparison and a sweep.

    python scripts/shown.py               # all, where keras-hub is installed, too (docs/fine_tuning.md); three minutes
    python scripts/shown.py notebook_fit  # or some of them, by their names

Each is made in a temporary folder, whose name is taken out of it. tests/test_shown.py looks at what is there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ROOT / "docs" / "shown"
SWEEP = "cosine.peak = 0.02, 0.1, 0.5"
PAGES = {
    "report.html": "sweep/peak=0.1/report.html",
    "sweep.html": "sweep/compare.html",
    "comparison.html": "compare.html",
}


def cleaned(text: str, folder: Path) -> str:
    """A text without the folder's name, and without what TensorFlow tells its own developers."""
    text = text.replace(f"{folder}/", "").replace(str(folder), ".").replace(str(ROOT), "launcher")
    text = re.sub(r"\S*/site-packages/", "", text)
    noise = ("I0000", "W0000", "E0000", "WARNING: All log messages")
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(noise))


def notebook(path: Path, folder: Path, *, is_again: bool = False) -> str:
    """The text of a notebook with its outputs, as a kernel of its own gives them; where that dies, as a second does."""
    read = nbformat.read(path, as_version=4)
    try:
        NotebookClient(read, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    except DeadKernelError:
        if is_again:
            raise
        return notebook(path, folder, is_again=True)
    for cell in read.cells:
        cell.metadata.pop("execution", None)  # its times
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                output.text = cleaned(output.text, folder)
            for kind, data in output.get("data", {}).items():
                output.data[kind] = cleaned(data, folder)
        if "outputs" in cell:
            cell.outputs = _joined(cell.outputs)
    read.metadata = {"kernelspec": read.metadata.kernelspec, "language_info": {"name": "python"}}
    return nbformat.writes(read) + "\n"


def _joined(outputs: list[Any]) -> list[Any]:
    """Outputs of a cell, of which one stream has all the text that follows each other, and none is empty."""
    found: list[Any] = []
    for output in outputs:
        is_stream = output.output_type == "stream"
        if is_stream and found and found[-1].get("name") == output.name:
            found[-1].text += output.text
        elif not is_stream or output.text:
            found.append(output)
    return found


def pages(folder: Path) -> None:
    """Fills docs/shown/ from a sweep of three trials, and one run more."""
    recipe = ["--gin_file=resnet_cpu.gin", "--strategy=one_device"]
    short = [("resnet.depth", 8), ("train.steps", 60), ("train.log_every", 5), ("train.evaluate_every", 20)]
    common = [*recipe, *(f"--gin_param={name} = {value}" for name, value in short)]
    commands = (
        ["launcher.launch", *common, f"--sweep={SWEEP}", "--model_dir=sweep"],
        ["launcher.main", *common, "--gin_param=image_data.augmentation = 'none'", "--model_dir=plain"],
        ["launcher.main", "--mode=compare", "sweep/peak=0.1", "plain"],
    )
    for command in commands:
        subprocess.run([sys.executable, "-m", *command], cwd=folder, check=True)
    SHOWN.mkdir(exist_ok=True)
    for name, made in PAGES.items():
        (SHOWN / name).write_text(cleaned((folder / made).read_text("utf-8"), folder), encoding="utf-8")


def main(names: list[str]) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                path.write_text(notebook(path, Path(folder).resolve()), encoding="utf-8")
    if not names or "pages" in names:
        with tempfile.TemporaryDirectory() as folder:
            pages(Path(folder).resolve())


if __name__ == "__main__":
    main(sys.argv[1:])
