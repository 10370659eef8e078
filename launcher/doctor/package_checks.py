"""Versions and their known conflicts."""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterator

from launcher.doctor import packages as packages_lib
from launcher.doctor.context import Context
from launcher.doctor.finding import Finding, fail, ok, warn
from launcher.doctor.packages import OPTIONAL, PYTHONS, REQUIRED, TENSORFLOWS, Packages
from launcher.machine import installation

# What TensorFlow is made of beside our own requirements; each one's requirements are looked at.
_LOOKED_AT = ("keras", "tensorflow-datasets", "jax", "jaxlib", "h5py", "tensorboard", "typeguard", "rich")


def python(context: Context) -> Iterator[Finding]:
    """This Python, and whether TensorFlow has wheels for it."""
    version = platform.python_version()
    seen = f"{version}, {platform.python_implementation()}, {platform.system()} on {platform.machine()}"
    if not packages_lib.fits(version, PYTHONS):
        yield fail("python", seen, f"TensorFlow has wheels for Python {PYTHONS}: make a virtual environment with one")
    elif platform.python_implementation() != "CPython" or struct.calcsize("P") != 8:
        yield fail("python", seen, "TensorFlow's wheels are for 64-bit CPython: make a virtual environment with it")
    elif platform.system() != "Linux":
        yield warn("python", seen, "Launcher is tried on Linux only; use a Linux machine or a container")
    else:
        yield ok("python", seen)


def tensorflow_package(context: Context) -> Iterator[Finding]:
    """The one distribution that brings the module `tensorflow`."""
    yield from tensorflow_findings(packages_lib.installed())


def tensorflow_findings(found: Packages) -> Iterator[Finding]:
    """Of any set of packages."""
    name, there, anew = "tensorflow_package", found.tensorflows(), installation.tensorflow_command()
    if not there:
        yield fail(
            name,
            "TensorFlow is not installed",
            f"choose the extra for this machine: {anew}",
        )
        return
    seen = " and ".join(map(str, there))
    if len(there) > 1:
        both = " ".join(package.name for package in there)
        yield fail(
            name,
            f"{seen} are installed at once and overwrite each other's files",
            f"pip uninstall -y {both}, then install one of them anew: {anew}",
        )
    elif there[0].name == "tensorflow-gpu":
        yield fail(
            name,
            f"{seen}: that distribution has been withdrawn",
            f"pip uninstall -y tensorflow-gpu; {anew}",
        )
    elif not packages_lib.fits(there[0].version, TENSORFLOWS):
        yield fail(
            name, f"{seen} is too old, {TENSORFLOWS} is needed", f"pip install --upgrade '{there[0].name}>=2.20'"
        )
    else:
        yield ok(name, seen)


def packages(context: Context) -> Iterator[Finding]:
    """Packages that are missing, too old, there twice, or not made for each other."""
    yield from package_findings(packages_lib.installed())


def package_findings(found: Packages) -> Iterator[Finding]:
    """Of any set of packages."""
    name, clean = "packages", True
    for requirement in REQUIRED:
        if problem := found.problem(requirement):
            clean = False
            yield fail(name, f"Launcher requires {problem}", f"pip install '{requirement}'")
    for requirement in OPTIONAL:
        problem = found.problem(requirement)
        if problem and "not installed" not in problem:
            clean = False
            yield warn(name, f"Launcher uses {problem}", f"pip install '{requirement}'")
    looked_at = dict.fromkeys((*(package.name for package in found.tensorflows()), *_LOOKED_AT))
    for problem in (problem for one in looked_at for problem in found.unmet(one)):
        clean = False
        yield warn(
            name, problem, "install both anew in one command, so that pip finds versions that fit: see pip check"
        )
    for first, behind in found.shadowed():
        if first.name in looked_at or first.name in ("numpy", "protobuf", "ml-dtypes", "gin-config", "absl-py"):
            clean = False
            yield warn(
                name,
                f"{first.name} is there twice: {first.version} in {first.folder} hides {behind.version} in "
                f"{behind.folder}",
                "delete one of them, or unset PYTHONPATH, or set PYTHONNOUSERSITE=1",
            )
    for one in _misfits(found):
        clean = False
        yield one
    if clean:
        shown = ("keras", "numpy", "tensorflow-datasets", "gin-config", "protobuf", "jax")
        yield ok(name, ", ".join(str(package) for package in map(found.get, shown) if package is not None))


def _misfits(found: Packages) -> Iterator[Finding]:
    """What no package's own requirements say."""
    keras, nightly = found.get("keras"), found.get("keras-nightly")
    if keras and nightly:
        yield fail(
            "packages",
            f"{keras} and {nightly} are installed at once and overwrite each other's files",
            "pip uninstall -y keras keras-nightly, then pip install 'keras>=3.10'",
        )
    if addons := found.get("tensorflow-addons"):
        yield warn(
            "packages",
            f"{addons} is for Keras 2 and cannot be used with Keras 3",
            "pip uninstall -y tensorflow-addons; Launcher has LAMB and warm-up schedules of its own",
        )
    jax, jaxlib = found.get("jax"), found.get("jaxlib")
    if jax and not jaxlib:
        yield warn("packages", f"{jax} without jaxlib cannot be imported", installation.command("preflight"))
