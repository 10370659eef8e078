"""Which packages are installed, and which of them do not go together. Imports none of them.

`packaging` is imported late: where it is missing, the checks that need it say so, and the others still run.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
from collections.abc import Iterable, Iterator

import launcher

# As in setup.py, which a checkout that was not installed cannot be asked for.
PYTHONS = ">=3.10,<3.14"
REQUIRED = (
    "absl-py>=2.0",
    "gin-config>=0.5.0,<0.6",
    "importlib-resources",
    "keras>=3.10",
    "ml-dtypes>=0.3",
    "numpy>=1.26",
    "packaging>=22",
    "rich>=13.0",
    "tensorflow-datasets>=4.9.9",
    "typeguard>=4.3",
)
TENSORFLOWS = ">=2.20"
# Of the extras: not needed, and of use from these versions on.
OPTIONAL = ("jax>=0.10.2", "libtpu>=0.0.51", "matplotlib>=3.8", "sentencepiece>=0.2", "sacrebleu>=2.3")

# All of them bring files of the one module `tensorflow`.
PROVIDERS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-tpu",
    "tensorflow-gpu",
    "tensorflow-intel",
    "tensorflow-macos",
    "tensorflow-rocm",
    "tensorflow-aarch64",
    "tf-nightly",
    "tf-nightly-cpu",
    "tf-nightly-tpu",
    "intel-tensorflow",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """One installed distribution.

    Attributes:
      name: in canonical form, as in "tensorflow-cpu".
      version: as its maker wrote it.
      folder: where it lies.
      requires: its requirements.
    """

    name: str
    version: str
    folder: str = ""
    requires: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Packages:
    """All that is installed; the first on the path wins, as when it is imported."""

    def __init__(self, found: Iterable[Package]):
        self._all = tuple(found)
        self._first: dict[str, Package] = {}
        for package in self._all:
            self._first.setdefault(package.name, package)

    def get(self, name: str) -> Package | None:
        return self._first.get(_canonical(name))

    def tensorflows(self) -> list[Package]:
        """What brings the module `tensorflow`; one is right."""
        return [self._first[name] for name in PROVIDERS if name in self._first]

    def shadowed(self) -> Iterator[tuple[Package, Package]]:
        """What is imported, and another version of it that lies behind, further down the path."""
        for package in self._all:
            first = self._first[package.name]
            if package is not first and package.version != first.version:
                yield first, package

    def unmet(self, name: str) -> list[str]:
        """Requirements of an installed package that are not met, in words."""
        package = self.get(name)
        problems = [] if package is None else [self.problem(requirement) for requirement in package.requires]
        return [f"{package} requires {problem}" for problem in problems if problem]

    def problem(self, requirement: str) -> str | None:
        """What is wrong with one requirement, in words; None where it is met or does not apply here."""
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            wanted = Requirement(requirement)
        except InvalidRequirement:
            return None
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            return None
        name = f"{wanted.name}{wanted.specifier}"
        found = self.get(wanted.name)
        if found is None:
            return f"{name}, which is not installed"
        return None if fits(found.version, str(wanted.specifier)) else f"{name}, and {found.version} is installed"


def fits(version: str, specifier: str) -> bool:
    """Whether a version, also a preliminary one, is one of those that a specifier such as ">=2.20" means."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def installed() -> Packages:
    """What this Python would import, in the order of its path."""
    return Packages(_read())


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()  # PEP 503


def _read() -> Iterator[Package]:
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a folder that a broken installation left behind has none
            yield Package(
                name=_canonical(name),
                version=distribution.version,
                folder=str(distribution.locate_file("")),
                requires=tuple(distribution.requires or ()),
            )


def facts() -> dict[str, str]:
    """What all workers of a job should have alike: the versions that decide what a run computes."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "launcher": launcher.__version__}
    everything = installed()
    for package in (*everything.tensorflows(), *map(everything.get, ("keras", "numpy", "gin-config"))):
        if package is not None:
            found[package.name] = package.version
    return found
