"""The real TPU compiler for tests, with one cache for all that a worker of the test run compiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.preflight import slices
from launcher.preflight.compiler import Compilation, Compiler


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Compilation]:
    """compiled(stablehlo, accelerator_type): what the TPU compiler makes of a program."""
    compiler = Compiler(cache_dir=str(tmp_path_factory.mktemp("compilations")), timeout_seconds=300)
    return lambda text, accelerator_type: compiler.compile(text, slices.find(accelerator_type))
