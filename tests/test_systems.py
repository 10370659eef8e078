"""Where Launcher runs: what another Python and Windows are told, and what macOS would meet as far as Linux shows."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys

import psutil
import pytest
from places import PYTHONPATH, ROOT, SMALL_DIGITS

import launcher
from launcher import main
from launcher.machine import child_process, installation

PROGRAMS = ("launcher.main", "launcher.launch")


@pytest.fixture
def customized(tmp_path):
    """customized(code): the environment of a Python that runs it before anything else."""

    def make(code: str) -> dict[str, str]:
        (tmp_path / "first").mkdir(exist_ok=True)
        (tmp_path / "first" / "sitecustomize.py").write_text(code)
        return {"PYTHONPATH": f"{tmp_path / 'first'}:{PYTHONPATH}"}

    return make


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.version_info = (3, 9, 18)", r"Launcher needs Python 3\.10 to 3\.13, and this is 3\.9\.18 \("),
        ("import sys; sys.version_info = (3, 14, 0)", r"Launcher needs Python 3\.10 to 3\.13, and this is 3\.14\.0 \("),
        ("import sys; sys.platform = 'win32'", r"Launcher does not run on Windows.*wsl --install"),
        (
            "import sys; sys.path[:] = [place for place in sys.path if 'site-packages' not in place]",
            r"the packages that Launcher needs .* Type source \.venv/bin/activate",
        ),
    ],
)
def test_what_cannot_run_here_is_one_message(customized, run_launcher, code, said):
    env = customized(code)
    for module in PROGRAMS:
        done = run_launcher("--gin_file=resnet_cpu.gin", module=module, env=env, timeout=60)
        assert done.returncode == 64
        assert re.match(f"error: {said}", done.stderr) and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_program_that_imports_launcher_on_windows_gets_the_same(customized, tmp_path, run_launcher):
    (tmp_path / "program.py").write_text("import launcher\n")
    done = run_launcher(module="program", env=customized("import sys; sys.platform = 'win32'"), timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (64, 1)
    assert done.stderr.startswith("error: Launcher does not run on Windows")


@pytest.mark.parametrize("name", ["tokenize.py", "random.py", "keras/__init__.py", "launcher.py"])
def test_a_file_that_hides_a_module_that_is_needed_is_named(run_launcher, tmp_path, name):
    hiding = tmp_path / name
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("raise AssertionError('was run')\n")
    file = name.partition("/")[0]
    message = f"error: {file} hides the module {file.removesuffix('.py')}, which is needed here: rename your file\n"
    (tmp_path / "program.py").write_text("import launcher\n\nlauncher.fit\n")
    program = [sys.executable, "-c", "import sys; sys.argv[0] = 'launcher'; import launcher"]
    if name == "launcher.py":  # else Python takes it for Launcher, and there is nobody to tell
        safe = [program[0], "-P", *program[1:]] if sys.version_info >= (3, 11) else [program[0], "-I", *program[1:]]
        done = subprocess.run(safe, cwd=tmp_path, env={**os.environ, "PYTHONPATH": PYTHONPATH}, capture_output=True)
        assert (done.returncode, done.stderr.decode()) == (64, message)
        return
    for module in (*PROGRAMS, "program"):
        done = run_launcher("--mode=doctor", "--gin_file=resnet_cpu.gin", module=module, fresh=True, timeout=60)
        assert (done.returncode, done.stderr) == (64, message)


def test_the_first_file_is_one_that_old_pythons_can_read():
    text = (ROOT / "launcher" / "__init__.py").read_text()
    ast.parse(text, feature_version=(3, 7))
    oldest, newest = launcher._PYTHONS
    admitted = f">={'.'.join(map(str, oldest))},<{newest[0]}.{newest[1] + 1}"
    assert f'python_requires="{admitted}"' in (ROOT / "setup.py").read_text()


def test_a_python_too_old_for_jax_is_named_before_anything_is_imported(monkeypatch, capsys):
    monkeypatch.setattr(installation, "_PYTHON_OF_JAX", (3, 99))
    monkeypatch.setattr(main, "require_tensorflow", lambda: pytest.fail("imported TensorFlow"))
    assert main.main(["launcher.main", "--mode=preflight", "--gin_file=resnet_cpu.gin"]) == 64
    said = capsys.readouterr().err
    assert said.startswith(
        "error: --mode=preflight needs Python 3.99 or later, because JAX does, and this is Python 3."
    )
    assert "[cpu,preflight]" in said and len(said.splitlines()) == 1


def test_beside_a_tensorflow_that_jax_would_break_another_environment_is_advised(monkeypatch):
    monkeypatch.setattr(installation, "_versions", lambda *names: ["tensorflow-cpu 2.17.1"])
    said = installation.jax_command("gpu_preflight")
    assert said.startswith("tensorflow-cpu 2.17.1 admits no NumPy") and "[cpu,gpu_preflight]" in said
    monkeypatch.setattr(installation, "_versions", lambda *names: ["tensorflow 2.18.0"])
    assert installation.jax_command("preflight") == installation.command("preflight")


def test_a_forked_child_that_dies_is_an_error_and_not_an_answer():
    def dies() -> None:
        import os

        os._exit(3)

    before = {*psutil.Process().children()}
    with pytest.raises(RuntimeError, match="ended without an answer"):
        child_process.run_forked(dies, seconds=60)
    assert {*psutil.Process().children()} <= before


@pytest.mark.skipif(sys.platform != "linux", reason="makes Linux look like macOS")
@pytest.mark.heavy
@pytest.mark.nightly
def test_without_what_linux_alone_has_workers_train_and_are_restarted(customized, run_launcher, tmp_path):
    env = customized("import like_macos\n")
    done = run_launcher(
        f"--gin_file={SMALL_DIGITS}",
        *("--workers=2", "--drill=kill", "--model_dir=run"),
        *("--gin_param=train.steps = 30", "--gin_param=train.checkpoint_every = 5"),
        module="launcher.launch",
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drill passed: kill" in done.stdout
    assert "macOS: training on the CPU should work" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.skipif(sys.platform != "linux", reason="makes Linux look like macOS")
@pytest.mark.heavy
@pytest.mark.nightly
def test_the_doctor_finds_nothing_wrong_with_what_macos_lacks(customized, run_launcher):
    done = run_launcher("--mode=doctor", env=customized("import like_macos\n"))
    assert done.returncode == 0, done.stdout
    assert "1 warn, 0 fail" in done.stdout and "a Mac's CPU should train" in done.stdout
