"""The real TPU compiler for tests, with one cache for all that a test run compiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.preflight import slices
from launcher.preflight.compiler import Compilation, Compiler


@pytest.fixture(scope="session")
def compiled(made_once: Callable[..., Path]) -> Callable[[str, str], Compilation]:
    """compiled(stablehlo, accelerator_type): what the TPU compiler makes of a program."""
    compiler = Compiler(cache_dir=str(made_once("compilations")), timeout_seconds=300)
    return lambda text, accelerator_type: compiler.compile(text, slices.find(accelerator_type))
