"""Compiling for a TPU that is not there: what comes back, the cache, and every way in which it can end badly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from toy_step import dense_step

from launcher.errors import EXIT_FAILED, EXIT_USAGE, LauncherError, TrainingError, UsageError
from launcher.preflight import compiler as compiler_lib
from launcher.preflight import gpus, slices
from launcher.preflight.compiled import gpu_program, hbm, hlo

pytestmark = pytest.mark.slow

WHERE = slices.find("v5litepod-4")


# Answers without compiling anything.
ANSWERING = """
    import gzip, json, sys
    with gzip.open(sys.argv[1] + "/outcome.json.gz", "wt") as file:
        json.dump(dict(error="no", unsupported=None, memory={}, cost={}, hlo="", seconds=1.0), file)
"""


def make(tmp_path, *, child: str | None = None, timeout_seconds: float = 300):
    """A compiler with a cache of its own, whose process runs the Python text `child` when it is given."""
    command = {} if child is None else {"child": (sys.executable, "-c", textwrap.dedent(child))}
    return compiler_lib.Compiler(cache_dir=str(tmp_path / "cache"), timeout_seconds=timeout_seconds, **command)


def test_a_program_for_all_replicas_compiles_with_memory_costs_and_code(compiled):
    found = compiled(dense_step(WHERE.num_replicas), WHERE.name)
    assert found.error is None
    weights, batch = 4 * 1024 * 512, 2 * 256 * 1024
    assert found.memory["argument"] == weights + batch
    assert found.memory["alias"] == weights  # the new weights take the place of the old ones
    assert found.hlo and found.buffers


def test_the_second_look_at_a_program_starts_no_compiler(tmp_path):
    first = make(tmp_path).compile(dense_step(4), WHERE)
    again = make(tmp_path, child="raise SystemExit('must not run')").compile(dense_step(4), WHERE)
    assert (first.cached, again.cached) == (False, True)
    assert again.memory == first.memory
    assert again.hlo == first.hlo


def test_a_step_that_is_refused_for_a_gpu_is_compiled_again_without_tritons_products(tmp_path):
    refusing = """
        import sys
        from launcher.preflight import compile_child
        compile_ = compile_child._compile
        def refused(*given, overrides=(), **named):
            found = compile_(*given, overrides=overrides, **named)
            return found if overrides else {"error": "INTERNAL: no such tile"}
        compile_child._compile = refused
        sys.exit(compile_child.main(sys.argv))
    """
    found = make(tmp_path, child=refusing).compile(dense_step(1), gpus.find("h100:1"))
    assert (found.error, found.without_triton) == (None, "INTERNAL: no such tile")
    counted = gpu_program.count(hlo.parse(found.hlo), None).kernels_by_kind
    assert "cuBLAS" in counted and "Triton GEMM" not in counted


def test_another_program_topology_or_version_is_not_found_in_the_cache(tmp_path, monkeypatch):
    made = make(tmp_path, child=ANSWERING)
    assert not made.compile("program", WHERE).cached
    assert made.compile("program", WHERE).cached
    assert not made.compile("another", WHERE).cached
    assert not made.compile("program", slices.find("v6e-4")).cached
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1024")
    assert not made.compile("program", WHERE).cached
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    other = {"jax": "1.0", "jaxlib": "1.0", "libtpu": "1.0"}
    monkeypatch.setattr(compiler_lib, "require_versions", lambda accelerator: other)
    assert not make(tmp_path, child=ANSWERING).compile("program", WHERE).cached


def test_a_program_is_found_in_the_cache_whatever_number_tensorflow_gave_its_functions(tmp_path):
    made, loop = make(tmp_path, child=ANSWERING), "func.func private @{0}.3(\n func.call @{0}.3(\n @Sharding({1})"
    assert not made.compile(loop.format("while_cond_1567", 1), WHERE).cached
    assert made.compile(loop.format("while_cond_2833", 1), WHERE).cached
    assert not made.compile(loop.format("while_cond_2833", 2), WHERE).cached
    assert not made.compile(loop.format("while_cond_2833", 1).replace("Sharding", "Other"), WHERE).cached
    assert not made.compile(loop.format("while_cond_2833", 1).replace("call @while_cond", "call @other"), WHERE).cached


def test_a_damaged_entry_of_the_cache_is_compiled_again(tmp_path):
    made = make(tmp_path, child=ANSWERING)
    made.compile("program", WHERE)
    (entry,) = (tmp_path / "cache").glob("*.json.gz")
    entry.write_bytes(entry.read_bytes()[:-10])
    assert not made.compile("program", WHERE).cached
    assert made.compile("program", WHERE).cached


def test_a_program_too_big_for_hbm_is_refused_with_the_compilers_figures(compiled):
    found = compiled(dense_step(4, batch=2**19, features=120_000), WHERE.name)
    needed, available = hbm.refused_for_hbm(found.error)
    # The batch alone: 2^19 rows of 120,000 numbers of two bytes.
    assert needed > 2**19 * 120_000 * 2
    assert available == WHERE.chip.hbm_bytes.value


@pytest.mark.nightly  # of one of them, above
def test_the_memory_of_each_generation_is_what_its_compiler_says(compiled):
    for name in ("v2-8", "v3-8", "v4-8", "v5p-8", "v6e-4"):
        where = slices.find(name)
        found = compiled(dense_step(where.num_replicas, batch=2**19, features=120_000), name)
        refused = hbm.refused_for_hbm(found.error)
        assert refused is not None, name
        assert refused[1] == where.chip.hbm_bytes.value, name


def test_a_compiler_that_is_not_done_in_time_is_ended(tmp_path):
    before = {*psutil.Process().children(recursive=True)}
    made = make(tmp_path, child="import time; time.sleep(600)", timeout_seconds=0.3)
    with pytest.raises(UsageError, match=r"--preflight_timeout=0.3.*v5litepod-4") as refusal:
        made.compile("program", WHERE)
    assert refusal.value.exit_code == EXIT_USAGE
    assert {*psutil.Process().children(recursive=True)} <= before


def test_a_compiler_that_the_kernel_killed_is_said_to_lack_memory(tmp_path):
    made = make(tmp_path, child=f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    with pytest.raises(TrainingError, match=r"killed while compiling for v5litepod-4.*GiB") as refusal:
        made.compile("program", WHERE)
    assert refusal.value.exit_code == EXIT_FAILED


def test_a_compiler_that_aborts_is_reported_with_its_last_words(tmp_path):
    made = make(tmp_path, child="import os; os.write(2, b'Check failed: x'); os.abort()")
    with pytest.raises(LauncherError, match=r"SIGABRT.*\n  \| Check failed: x"):
        made.compile("program", WHERE)


def test_the_compilers_process_does_not_outlive_the_one_that_started_it(tmp_path):
    os.mkfifo(tmp_path / "request.json")  # the child waits for ever for what it is to do
    starter = textwrap.dedent(f"""
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-m", "launcher.preflight.compile_child", {str(tmp_path)!r}],
                                 stdin=subprocess.PIPE, start_new_session=True)
        print(child.pid, flush=True)
        sys.stdin.read()
        os._exit(1)
    """)
    process = subprocess.Popen([sys.executable, "-c", starter], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the compiler's process is still there"
        time.sleep(0.02)
    process.stdin.close()
    process.stdout.close()


def test_a_compiler_that_is_missing_or_too_old_is_refused_with_the_extra_to_install(monkeypatch):
    installed = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.51"}

    def version(name: str) -> str:
        if name not in installed:
            raise compiler_lib.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(compiler_lib.importlib.metadata, "version", version)
    assert compiler_lib.require_versions() == installed
    installed["libtpu"] = "0.0.9"
    with pytest.raises(UsageError, match=r"libtpu 0\.0\.9 is older than .*pip install -e .*\[preflight\]"):
        compiler_lib.require_versions()
    del installed["libtpu"]
    with pytest.raises(UsageError, match=r"libtpu is not installed.*pip install -e .*\[preflight\]"):
        compiler_lib.require_versions()


def test_a_cache_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    made = compiler_lib.Compiler(cache_dir=str(tmp_path / "file" / "cache"), timeout_seconds=10)
    with pytest.raises(UsageError, match=r"--preflight_cache=.*choose another"):
        made.compile("program", WHERE)
