"""The two packages that bring the TPU compiler: whether they are there, and in which version."""

from __future__ import annotations

import importlib.metadata
import platform
import re

from launcher.errors import UsageError
from launcher.machine import installation

# The oldest that were tried; what is private in them is in `tpu_compiler`.
MINIMUM = {"jax": "0.10.2", "libtpu": "0.0.51"}


def require() -> dict[str, str]:
    """Versions of jax, jaxlib and libtpu, none of which is imported for it.

    Raises:
      UsageError: one is missing or older than what was tried.
    """
    found = {}
    for name in ("jax", "jaxlib", "libtpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise UsageError(
                f"--mode=preflight needs the TPU compiler, and {name} is not installed (no TPU is needed): {_advice()}"
            ) from None
    for name, minimum in MINIMUM.items():
        if _parts(found[name]) < _parts(minimum):
            raise UsageError(
                f"--mode=preflight: {name} {found[name]} is too old, {minimum} is the oldest that was tried: "
                f"{_advice()}"
            )
    return found


def _advice() -> str:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"libtpu has wheels for Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    return installation.command("preflight")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
