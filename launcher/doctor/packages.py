"""Packages that are installed: missing, old, doubled or conflicting ones. Imports none of them.

What Launcher requires stands in setup.py alone. `packaging` is imported late: where it is missing, the checks that need
it say so, and the others still run.
"""

import dataclasses
import functools
import importlib.metadata
import platform
import re
import runpy
import struct
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import launcher
from launcher.doctor.check import Context, Finding, Skip, check, fail, ok, warn
from launcher.machine import installation

# All of them bring files of the one module `tensorflow`.
PROVIDERS = (
    "tensorflow",
    *(f"tensorflow-{kind}" for kind in ("cpu", "tpu", "gpu", "intel", "macos", "rocm", "aarch64")),
    *("tf-nightly", "tf-nightly-cpu", "tf-nightly-tpu", "intel-tensorflow"),
)

# What TensorFlow is made of beside our own requirements; each one's requirements are looked at.
_LOOKED_AT = ("keras", "tensorflow-datasets", "jax", "jaxlib", "h5py", "tensorboard", "typeguard", "rich")

_SETUP = Path(__file__).resolve().parents[2] / "setup.py"  # if this copy is a checkout
_EXTRA = re.compile(r"""extra == ["']([\w-]+)["']""")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requirements:
    """The requirements of Launcher, which setup.py declares.

    `pythons` is a specifier such as ">=3.10"; `lines` are as installed metadata has them: those of an extra name it in
    their marker.
    """

    pythons: str
    lines: tuple[str, ...]

    @property
    def required(self) -> list[str]:
        """The requirements that always apply."""
        return [line for line in self.lines if not _EXTRA.search(line)]

    @property
    def optional(self) -> list[tuple[str, str]]:
        """The requirements of extras that users choose, without TensorFlow: (extra, requirement)."""
        found = [(match[1], line) for line in self.lines if (match := _EXTRA.search(line))]
        return [(extra, line) for extra, line in found if extra != "test" and _name(line) not in PROVIDERS]

    @property
    def tensorflows(self) -> str:
        """The specifier of TensorFlow, which is the same for each distribution of it."""
        from packaging.requirements import Requirement

        return str(next(Requirement(line).specifier for line in self.lines if _name(line) in PROVIDERS))


@functools.cache
def requirements() -> Requirements:
    """Launcher's requirements, of a checkout's setup.py or its installation; Skip where neither is there."""
    if _SETUP.is_file() and _SETUP.with_name("pyproject.toml").is_file():
        return _of_setup(_SETUP)
    try:
        metadata = importlib.metadata.metadata("tf-launcher")
    except importlib.metadata.PackageNotFoundError:
        raise Skip("Launcher's requirements are not known: it is neither installed nor a checkout") from None
    return Requirements(pythons=metadata["Requires-Python"], lines=tuple(metadata.get_all("Requires-Dist") or ()))


def _of_setup(path: Path) -> Requirements:
    seen: dict[str, Any] = {}
    # A stand-in: setuptools itself may be missing, and would go on to build.
    before, stand_in = sys.modules.get("setuptools"), types.ModuleType("setuptools")
    vars(stand_in).update(setup=seen.update, find_packages=lambda include: [])
    sys.modules["setuptools"] = stand_in
    try:
        runpy.run_path(str(path))
    finally:
        del sys.modules["setuptools"]
        if before is not None:
            sys.modules["setuptools"] = before
    lines = list(seen["install_requires"])
    for extra, wanted in seen["extras_require"].items():
        for name, _, marker in (line.partition(";") for line in wanted):
            lines.append(f"{name}; {f'({marker.strip()}) and ' if marker else ''}extra == '{extra}'")
    return Requirements(pythons=seen["python_requires"], lines=tuple(lines))


def _name(requirement: str) -> str:
    return _canonical(re.match(r"[\w.-]*", requirement)[0])  # type: ignore[index]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstalledPackage:
    """One installed distribution, by its canonical name, such as "tensorflow-cpu", and the folder where it lies."""

    name: str
    version: str
    folder: str = ""
    requires: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class InstalledPackages:
    """All installed packages; the first on the path wins, as when it is imported."""

    def __init__(self, found: Iterable[InstalledPackage]):
        self._all = tuple(found)
        self._first: dict[str, InstalledPackage] = {}
        for package in self._all:
            self._first.setdefault(package.name, package)

    def get(self, name: str) -> InstalledPackage | None:
        return self._first.get(_canonical(name))

    def tensorflows(self) -> list[InstalledPackage]:
        """The packages that bring the module `tensorflow`; there should be one."""
        return [self._first[name] for name in PROVIDERS if name in self._first]

    def shadowed(self) -> Iterator[tuple[InstalledPackage, InstalledPackage]]:
        """Pairs of the package that is imported and another version of it further down the path."""
        for package in self._all:
            first = self._first[package.name]
            if package is not first and package.version != first.version:
                yield first, package

    def unmet(self, name: str) -> list[str]:
        """Describes the requirements of an installed package that are not met."""
        package = self.get(name)
        problems = [] if package is None else [self.problem(requirement) for requirement in package.requires]
        return [f"{package} requires {problem}" for problem in problems if problem]

    def problem(self, requirement: str, extra: str = "") -> str | None:
        """Describes what is wrong with one requirement; None if it is met or does not apply here."""
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            wanted = Requirement(requirement)
        except InvalidRequirement:
            return None
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            return None
        name = f"{wanted.name}{wanted.specifier}"
        found = self.get(wanted.name)
        if found is None:
            return f"{name}, which is not installed"
        return None if fits(found.version, str(wanted.specifier)) else f"{name}, and {found.version} is installed"


def fits(version: str, specifier: str) -> bool:
    """Whether a version, also a preliminary one, matches a specifier such as ">=2.20"."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def installed() -> InstalledPackages:
    """The packages that this Python would import, in the order of its path."""
    return InstalledPackages(
        InstalledPackage(
            name=_canonical(name),
            version=distribution.version,
            folder=str(distribution.locate_file("")),
            requires=tuple(distribution.requires or ()),
        )
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
    pythons = requirements().pythons
    if not fits(version, pythons):
        yield fail(seen, f"TensorFlow has wheels for Python {pythons}: make a virtual environment with one")
    elif platform.python_implementation() != "CPython" or struct.calcsize("P") != 8:
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
    elif not fits(there[0].version, wanted := requirements().tensorflows):
        yield fail(f"{seen} is too old, {wanted} is needed", f"pip install --upgrade '{there[0].name}{wanted}'")
    else:
        yield ok(seen)


@check("missing, old, doubled or conflicting packages")
def packages(context: Context) -> Iterator[Finding]:
    yield from package_findings(installed())


def package_findings(found: InstalledPackages) -> Iterator[Finding]:
    """Findings on packages that are missing, old, doubled or in conflict."""
    shown = ("keras", "numpy", "tensorflow-datasets", "gin-config", "protobuf", "jax")
    fine = ok(", ".join(str(package) for package in map(found.get, shown) if package is not None))
    yield from [*_unmet(found), *_misfits(found)] or [fine]


def _unmet(found: InstalledPackages) -> Iterator[Finding]:
    for requirement in requirements().required:
        if problem := found.problem(requirement):
            yield fail(f"Launcher requires {problem}", f"pip install '{requirement}'")
    optional = [(one, found.problem(one, extra)) for extra, one in requirements().optional]
    met = {_name(requirement) for requirement, problem in optional if not problem}  # extras may differ, as on libtpu
    for requirement, problem in optional:
        if problem and "not installed" not in problem and _name(requirement) not in met:
            yield warn(f"Launcher uses {problem}", f"pip install '{requirement.partition(';')[0]}'")
    looked_at = dict.fromkeys((*(package.name for package in found.tensorflows()), *_LOOKED_AT))
    for problem in (problem for one in looked_at for problem in found.unmet(one)):
        yield warn(problem, "install both anew in one command, so that pip finds versions that fit: see pip check")
    for first, behind in found.shadowed():
        if first.name in looked_at or first.name in ("numpy", "protobuf", "ml-dtypes", "gin-config", "absl-py"):
            yield warn(
                f"{first.name} is there twice: {first.version} in {first.folder} hides {behind.version} in "
                f"{behind.folder}",
                "delete one of them, or unset PYTHONPATH, or set PYTHONNOUSERSITE=1",
            )


def _misfits(found: InstalledPackages) -> Iterator[Finding]:
    """Findings on conflicts that no package's own requirements declare."""
    keras, nightly = found.get("keras"), found.get("keras-nightly")
    if keras and nightly:
        wanted = next(line for line in requirements().required if _name(line) == "keras")
        yield fail(
            f"{keras} and {nightly} are installed at once and overwrite each other's files",
            f"pip uninstall -y keras keras-nightly, then pip install '{wanted}'",
        )
    if addons := found.get("tensorflow-addons"):
        yield warn(
            f"{addons} is for Keras 2 and cannot be used with Keras 3",
            "pip uninstall -y tensorflow-addons; Launcher has LAMB and warm-up schedules of its own",
        )
    tpu, libtpu = found.get("tensorflow-tpu"), found.get("libtpu")
    if tpu and libtpu and fits(libtpu.version, ">=0.0.42,<1"):
        yield fail(f"{libtpu} lacks functions that {tpu} calls at its import", "pip install 'libtpu<0.0.22'")
    jax, jaxlib = found.get("jax"), found.get("jaxlib")
    if jax and not jaxlib:
        yield warn(f"{jax} without jaxlib cannot be imported", installation.jax_command("preflight"))
