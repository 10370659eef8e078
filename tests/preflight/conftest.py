"""The real TPU compiler for tests, with one cache for all that a test run compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import hlo_oracle
import pytest

from launcher.preflight import slices
from launcher.preflight.compiler import Compilation, Compiler


@pytest.fixture(scope="session")
def compiled(made_once: Callable[..., Path]) -> Callable[[str, str], Compilation]:
    """compiled(stablehlo, accelerator_type): what the TPU compiler makes of a program."""
    compiler = Compiler(cache_dir=str(made_once("compilations")), timeout_seconds=300)
    return lambda text, accelerator_type: compiler.compile(text, slices.find(accelerator_type))


@pytest.fixture(scope="session", autouse=True)
def _every_program_is_read_whole() -> Iterator[None]:
    """Whatever a test compiles, its optimised program is read to the last instruction."""
    compile_, seen = Compiler.compile, set()

    def checked(self: Compiler, *args: object, **kwargs: object) -> Compilation:
        found = compile_(self, *args, **kwargs)
        if found.hlo not in seen:
            seen.add(found.hlo)
            if found.hlo.startswith("HloModule"):
                hlo_oracle.check_read(found.hlo)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "compile", checked)
        yield
