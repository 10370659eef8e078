"""What people install: the source distribution, the wheel that is built of it, and an environment with the wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from places import ROOT

FOLDERS = ("launcher", "models", "gin_configs")
_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")
SOURCES = (*FOLDERS, "completions", "tests", *_FILES)
_NOT_SOURCES = shutil.ignore_patterns("__pycache__")


def build(folder: Path) -> None:
    """Fills a folder with the source distribution, unpacked in `source`, and the wheel.

    Both are built as `python -m build` and package indexes do, with the setuptools that is installed, from a copy of
    the checkout.
    """
    copy = folder / "copy"
    for name in SOURCES:
        source, target = ROOT / name, copy / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=_NOT_SOURCES)
        else:
            shutil.copy(source, target)
    _run([sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('..')"], copy)
    (built,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(built, folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (folder / built.name.removesuffix(".tar.gz")).rename(folder / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    again = shutil.copytree(folder / "source", folder / "again")
    _run([*pip, "--wheel-dir", str(folder), str(again)], folder)


def environment(folder: Path, wheel: Path) -> Path:
    """The interpreter of a new environment that has the wheel, and finds in this one what the wheel requires."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    _run([*pip, str(wheel)], folder)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "required.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return python


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
