"""Packages that are installed: missing, old, doubled or conflicting ones. Imports none of them.

What packages require of each other, Launcher among them, is asked of pip.
"""

import dataclasses
import importlib.metadata
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

import launcher
from launcher.doctor.check import Context, Finding, check, fail, ok, warn
from launcher.machine import accelerators, installation, versions

# All of them bring files of the one module `tensorflow`.
PROVIDERS = (
    "tensorflow",
    *(f"tensorflow-{kind}" for kind in ("cpu", "tpu", "gpu", "intel", "macos", "rocm", "aarch64")),
    *("tf-nightly", "tf-nightly-cpu", "tf-nightly-tpu", "intel-tensorflow"),
)

# The packages that Launcher and TensorFlow are made of: conflicts of others are none of a training's.
_OURS = "tf-launcher"
_LOOKED_AT = (
    *(_OURS, "keras", "tensorflow-datasets", "jax", "jaxlib", "h5py", "tensorboard", "typeguard", "rich"),
    *("numpy", "protobuf", "ml-dtypes", "gin-config", "absl-py"),
    *PROVIDERS,
)

# "rich 14.0 requires pygments, which is not installed." or "jax 1.0 has requirement numpy>=2, but you have numpy 1.26."
_UNMET = re.compile(r"(\S+) \S+ (?:requires (\S+), which is not installed|has requirement (.+), but you have .+)\.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstalledPackage:
    """One installed distribution, by its canonical name, such as "tensorflow-cpu"."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class InstalledPackages:
    """All installed packages; the first on the path wins, as when it is imported."""

    def __init__(self, found: Iterable[InstalledPackage]):
        self._first: dict[str, InstalledPackage] = {}
        for package in found:
            self._first.setdefault(package.name, package)

    def get(self, name: str) -> InstalledPackage | None:
        return self._first.get(_canonical(name))

    def tensorflows(self) -> list[InstalledPackage]:
        """The packages that bring the module `tensorflow`; there should be one."""
        return [self._first[name] for name in PROVIDERS if name in self._first]


def installed() -> InstalledPackages:
    """The packages that this Python would import, in the order of its path."""
    return InstalledPackages(
        InstalledPackage(name=_canonical(name), version=distribution.version)
        for distribution in importlib.metadata.distributions()
        if (name := distribution.metadata["Name"])  # a folder that a broken installation left behind has none
    )


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()  # PEP 503


def facts() -> dict[str, str]:
    """The versions that decide what a run computes, which all workers of a job should share."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "launcher": launcher.__version__}
    everything = installed()
    for package in (*everything.tensorflows(), *map(everything.get, ("keras", "numpy", "gin-config"))):
        if package is not None:
            found[package.name] = package.version
    return found


@check("version and platform that TensorFlow has wheels for")
def python(context: Context) -> Iterator[Finding]:
    version = platform.python_version()
    seen = f"{version}, {platform.python_implementation()}, {platform.system()} on {platform.machine()}"
    if platform.python_implementation() != "CPython" or struct.calcsize("P") != 8:
        yield fail(seen, "TensorFlow's wheels are for 64-bit CPython: make a virtual environment with it")
    elif platform.system() != "Linux":
        yield warn(seen, "tried on Linux only: a Mac's CPU should train; for all else use Linux")
    else:
        yield ok(seen)


@check("one distribution that brings TensorFlow, not none or two")
def tensorflow_package(context: Context) -> Iterator[Finding]:
    yield from tensorflow_findings(installed())


def tensorflow_findings(found: InstalledPackages) -> Iterator[Finding]:
    """The finding on the distributions of TensorFlow among packages."""
    there, anew = found.tensorflows(), installation.tensorflow_command()
    if not there:
        yield fail("TensorFlow is not installed", f"choose the extra for this machine: {anew}")
        return
    seen = " and ".join(map(str, there))
    if len(there) > 1:
        both = " ".join(package.name for package in there)
        yield fail(
            f"{seen} are installed at once and overwrite each other's files",
            f"pip uninstall -y {both}, then install one of them anew: {anew}",
        )
    elif there[0].name == "tensorflow-gpu":
        yield fail(f"{seen}: that distribution has been withdrawn", f"pip uninstall -y tensorflow-gpu; {anew}")
    elif versions.of(there[0].version) < versions.TENSORFLOW:
        wanted = f">={versions.text(versions.TENSORFLOW)}"
        yield fail(f"{seen} is too old, {wanted} is needed", f"pip install --upgrade '{there[0].name}{wanted}'")
    else:
        yield ok(seen)


@check("missing, old or conflicting packages", waits_for="pip check")
def packages(context: Context) -> Iterator[Finding]:
    yield from package_findings(installed(), _checked_by_pip())


def _checked_by_pip() -> list[str]:
    """What pip finds missing or in conflict, a line each; nothing where there is no pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def package_findings(found: InstalledPackages, told: Sequence[str]) -> Iterator[Finding]:
    """Findings on packages that are missing, old, doubled or in conflict; `told` are the lines of `pip check`."""
    shown = ("keras", "numpy", "tensorflow-datasets", "gin-config", "protobuf", "jax")
    fine = ok(", ".join(str(package) for package in map(found.get, shown) if package is not None))
    yield from [*_unmet(told), *_misfits(found)] or [fine]


def _unmet(told: Sequence[str]) -> Iterator[Finding]:
    for match in filter(None, map(_UNMET.fullmatch, told)):
        name, missing, wanted = match.groups()
        if _canonical(name) == _OURS:
            yield fail(match[0], f"pip install '{missing or wanted}'")
        elif _canonical(name) in _LOOKED_AT:
            yield warn(match[0], "install both anew in one command, so that pip finds versions that fit")


def _misfits(found: InstalledPackages) -> Iterator[Finding]:
    """Findings on conflicts that no package's own requirements declare."""
    keras, nightly = found.get("keras"), found.get("keras-nightly")
    if keras and nightly:
        yield fail(
            f"{keras} and {nightly} are installed at once and overwrite each other's files",
            f"pip uninstall -y keras keras-nightly, then pip install 'keras>={versions.text(versions.KERAS)}'",
        )
    tpu, libtpu = found.get("tensorflow-tpu"), found.get("libtpu")
    # Google's storage has others, which count as TensorFlow does.
    is_too_new = libtpu and not accelerators.older(libtpu.version, "0.0.42") and accelerators.older(libtpu.version, "1")
    if tpu and is_too_new:
        yield fail(f"{libtpu} lacks functions that {tpu} calls at its import", "pip install 'libtpu<0.0.22'")
