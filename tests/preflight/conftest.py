"""The real compilers for tests, with one cache for all that they compile, and --mode=preflight of a small recipe."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import forked
import pytest

from launcher import main as entry
from launcher.machine import child_process
from launcher.preflight import gpus, slices
from launcher.preflight.compiled import Compilation, hlo
from launcher.preflight.compiler import CHILD, Compiler

SMALL = (
    "--gin_file=mlp_fashion.gin",
    "--gin_param=mlp.units = 256",
    "--gin_param=mlp.layers = 1",
    *("--gin_param=verify.steps = 3", "--gin_param=precision_report.batches = 3", "--gin_param=gpu.tf32 = False"),
)


@pytest.fixture(scope="session")
def compiled(made_once: Callable[..., Path]) -> Callable[[str, str], Compilation]:
    """compiled(stablehlo, name): what the compiler for a TPU slice, or for GPUs as "h100:2", makes of a program."""
    compiler = Compiler(cache_dir=str(made_once("compilations")), timeout_seconds=300)
    return lambda text, name: compiler.compile(text, gpus.find(name) if ":" in name else slices.find(name))


@pytest.fixture(scope="session", autouse=True)
def _every_program_is_read_whole() -> Iterator[None]:
    """Whatever a test compiles, its optimised program is read to the last instruction."""
    compile_, seen = Compiler.compile, set()

    def checked(self: Compiler, *args: object, **kwargs: object) -> Compilation:
        found = compile_(self, *args, **kwargs)
        if found.hlo not in seen:
            seen.add(found.hlo)
            for dump in filter(None, (found.hlo, found.before_libraries)):
                assert hlo.parse(dump).unread == ()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "compile", checked)
        yield


@pytest.fixture(scope="session", autouse=True)
def _compilers_are_forked() -> Iterator[None]:
    """Spares each of them the import of JAX; those that a process of a test's own starts are fresh ones."""
    server, fresh = forked.Server("jax", "jax.experimental.topologies"), child_process.start

    def start(argv: Sequence[str], **options: object) -> object:
        if tuple(argv[: len(CHILD)]) != CHILD:
            return fresh(argv, **options)
        output = options["stdout"]
        return server.start(CHILD[-1], argv[len(CHILD) :], Path.cwd(), options["env"], output, output, piped=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "start", start)
        yield
    server.close()


@pytest.fixture(scope="session")
def cache(made_once) -> str:
    return str(made_once("preflight_cache"))


@pytest.fixture
def preflight(cache, capsys, tmp_path, monkeypatch):
    """preflight(*flags): exit code, standard output and error, and preflight.json, of a small recipe."""
    monkeypatch.setenv("COLUMNS", "200")
    model_dir = tmp_path / "run"

    def run(*flags: str, recipe: tuple[str, ...] = SMALL) -> types.SimpleNamespace:
        code = entry.main(
            ["launcher", "--mode=preflight", f"--preflight_cache={cache}", f"--model_dir={model_dir}", *recipe, *flags]
        )
        out, err = capsys.readouterr()
        path = model_dir / "preflight.json"
        report = json.loads(path.read_text()) if path.exists() else None
        return types.SimpleNamespace(code=code, out=out, err=err, report=report, model_dir=model_dir)

    return run
