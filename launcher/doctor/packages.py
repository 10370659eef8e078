"""Packages that are installed, and variables that change what they do: what is missing, old, doubled or in the way.

Imports none of them.

What packages require of each other, Launcher among them, is asked of pip.
"""

import importlib.metadata
import json
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import launcher
from launcher.doctor.check import FAIL, Context, Finding, check, fail, ok, warn
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


def installed() -> dict[str, str]:
    """Versions of the packages that this Python would import, by their canonical names, such as "tensorflow-cpu"."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:  # a folder that a broken installation left behind has none
            versions.setdefault(_canonical(name), distribution.version)  # the first on the path is imported
    return versions


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()  # PEP 503


def _shown(there: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [f"{name} {there[name]}" for name in names if name in there]


def facts() -> dict[str, str]:
    """The versions that decide what a run computes, which all workers of a job should share."""
    there = installed()
    deciding = {name: there[name] for name in (*PROVIDERS, "keras", "numpy", "gin-config") if name in there}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "launcher": launcher.__version__, **deciding}


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


def tensorflow_findings(there: Mapping[str, str]) -> Iterator[Finding]:
    """The finding on the distributions of TensorFlow among packages; there should be one."""
    names, anew = [name for name in PROVIDERS if name in there], installation.tensorflow_command()
    if not names:
        yield fail("TensorFlow is not installed", f"choose the extra for this machine: {anew}")
        return
    name, seen = names[0], " and ".join(_shown(there, names))
    if len(names) > 1:
        yield fail(
            f"{seen} are installed at once and overwrite each other's files",
            f"pip uninstall -y {' '.join(names)}, then install one of them anew: {anew}",
        )
    elif name == "tensorflow-gpu":
        yield fail(f"{seen}: that distribution has been withdrawn", f"pip uninstall -y tensorflow-gpu; {anew}")
    elif versions.of(there[name]) < versions.TENSORFLOW:
        wanted = f">={versions.text(versions.TENSORFLOW)}"
        yield fail(f"{seen} is too old, {wanted} is needed", f"pip install --upgrade '{name}{wanted}'")
    else:
        yield ok(seen)


@check("missing, old or conflicting packages", waits_for="pip check")
def packages(context: Context) -> Iterator[Finding]:
    yield from package_findings(installed(), _checked_by_pip())


def _checked_by_pip() -> list[str]:
    """Lines of pip on what is missing or in conflict; none where there is no pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def package_findings(there: Mapping[str, str], told: Sequence[str]) -> Iterator[Finding]:
    """Findings on packages that are missing, old, doubled or in conflict; `told` are the lines of `pip check`."""
    shown = ("keras", "numpy", "tensorflow-datasets", "gin-config", "protobuf", "jax")
    yield from [*_unmet(told), *_misfits(there)] or [ok(", ".join(_shown(there, shown)))]


def _unmet(told: Sequence[str]) -> Iterator[Finding]:
    for match in filter(None, map(_UNMET.fullmatch, told)):
        name, missing, wanted = match.groups()
        if _canonical(name) == _OURS:
            yield fail(match[0], f"pip install '{missing or wanted}'")
        elif _canonical(name) in _LOOKED_AT:
            yield warn(match[0], "install both anew in one command, so that pip finds versions that fit")


def _misfits(there: Mapping[str, str]) -> Iterator[Finding]:
    """Findings on conflicts that no package's own requirements declare."""
    if len(both := _shown(there, ("keras", "keras-nightly"))) > 1:
        yield fail(
            f"{' and '.join(both)} are installed at once and overwrite each other's files",
            f"pip uninstall -y keras keras-nightly, then pip install 'keras>={versions.text(versions.KERAS)}'",
        )
    libtpu = there.get("libtpu", "0")
    # Google's storage has others, which count as TensorFlow does.
    if "tensorflow-tpu" in there and not accelerators.older(libtpu, "0.0.42") and accelerators.older(libtpu, "1"):
        seen = f"libtpu {libtpu} lacks functions that tensorflow-tpu {there['tensorflow-tpu']} calls at its import"
        yield fail(seen, "pip install 'libtpu<0.0.22'")


# --------------------------------------------------------------------------------------------- environment variables

# What each variable does where its value is wrong, or not right, as patterns say.
_KNOWN = json.loads(Path(__file__).with_name("variables.json").read_text("utf-8"))


@check("environment variables that get in the way")
def variables(context: Context) -> Iterator[Finding]:
    yield from [*_mistakes(context.environ)] or [ok("none that gets in the way")]


def _mistakes(environ: Mapping[str, str]) -> Iterator[Finding]:
    for known in _KNOWN:
        name = known["variable"]
        # Of these, oneDNN is on by default on x86 alone.
        if name == "TF_ENABLE_ONEDNN_OPTS" and platform.machine() not in ("x86_64", "AMD64"):
            continue
        value = environ.get(name, "")
        if value and bool(re.fullmatch(known.get("wrong") or known["right"], value)) == ("wrong" in known):
            yield (fail if known["status"] == FAIL else warn)(f"{name}={value}: {known['effect']}", known["fix"])
