"""The installation: what is there of Launcher, and the command that installs more, for a checkout or another copy.

No package index has Launcher, so its name alone does not do. Imports no TensorFlow: it may be what is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import shlex
import shutil
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import launcher
from launcher.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_NAME = "tf-launcher"
_CHECKOUT = Path(__file__).resolve().parents[2]  # if this copy is one
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")
# Of the oldest JAX that was tried, 0.10.2: the Python it has wheels for, and the TensorFlow whose requirements of NumPy
# and ml_dtypes go with its own.
_PYTHON_OF_JAX = (3, 11)
_TENSORFLOW_OF_JAX = (2, 18)


def command(extra: str) -> str:
    """The command that installs an extra of setup.py, such as "text".

    A checkout is named by its folder; elsewhere the extra's packages are named.
    """
    if (_CHECKOUT / "setup.py").is_file() and (_CHECKOUT / "pyproject.toml").is_file():
        return f"{python()} -m pip install -e {shlex.quote(f'{_CHECKOUT}[{extra}]')}"
    import importlib.metadata  # late: it takes as long as all else that a supervisor imports

    try:
        distribution = importlib.metadata.distribution(_NAME)
    except importlib.metadata.PackageNotFoundError:
        return f"{python()} -m pip install '.[{extra}]' in a checkout of Launcher"
    return f"{python()} -m pip install {shlex.join(_packages(distribution, extra))}"


def required(module: str, *, by: str, extra: str, package: str = "") -> types.ModuleType:
    """A module of an extra; UsageError, that `by` needs its package and how to install it, where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UsageError(f"{by} needs {package or module}, which is not installed: {command(extra)}") from None


def tensorflow_command() -> str:
    """The command that installs TensorFlow, for each kind of machine."""
    return f"{command('cpu')}, with [cuda] in the place of [cpu] for NVIDIA GPUs, or [tpu] on a Cloud TPU VM"


def require_python_of_jax(what: str, extra: str = "preflight") -> None:
    """UsageError where this Python is too old for JAX, which `what` needs: pip leaves it out of extras in silence."""
    if sys.version_info < _PYTHON_OF_JAX:
        raise UsageError(
            f"{what} needs Python 3.{_PYTHON_OF_JAX[1]} or later, because JAX does, and this is Python "
            f"{platform.python_version()}: make a virtual environment with a newer one, and install Launcher there "
            f"with [cpu,{extra}]"
        )


def jax_command(extra: str) -> str:
    """Advice for an extra that brings JAX: what to type, unless this environment's TensorFlow would break by it."""
    for package in _versions(*_TENSORFLOWS):
        if extra == "jax_tpu" and package.startswith("tensorflow-tpu "):
            return (
                f"{package} needs another libtpu and would take the chips, so make a second virtual environment, and "
                f"install Launcher there with [cpu,{extra}]"
            )
        if tuple(map(int, re.findall(r"\d+", package)[:2])) < _TENSORFLOW_OF_JAX:
            return f"{package} admits no NumPy for JAX: install [cpu,{extra}] into a second virtual environment"
    return command(extra)


def version_text() -> str:
    """The version of Launcher, and those of what it computes with, as far as they are installed; imports none."""
    versions = [f"Python {platform.python_version()}", *_versions(*_TENSORFLOWS, "keras", "numpy")]
    return f"launcher {launcher.__version__} ({', '.join(versions)})"


def _versions(*names: str) -> list[str]:
    """Names and versions of those packages that are installed, such as "keras 3.15.1"."""
    import importlib.metadata

    versions = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return versions


def _packages(distribution: Distribution, extra: str) -> list[str]:
    from packaging.requirements import Requirement  # late: where it is missing, the doctor says so

    packages = []
    for line in distribution.requires or ():
        requirement = Requirement(line)
        if requirement.marker and requirement.marker.evaluate({"extra": extra}):
            extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            packages.append(f"{requirement.name}{extras}{requirement.specifier}")
    return packages


def python() -> str:
    """The command for this interpreter: `python` where a shell finds it by that, else its path, quoted."""
    if os.path.dirname(shutil.which("python") or "") == os.path.dirname(sys.executable):
        return "python"
    path = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if path.startswith(os.pardir) else path)
