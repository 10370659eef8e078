"""The two commands of the README, as far as they go without the network."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from places import ROOT

SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
CHECKED = [*SCRIPTS, ROOT / "scripts" / "slurm.sbatch", ROOT / ".ci" / "run"]
COMMANDS = {"quickstart.sh": [], "test.sh": [], "install.sh": ["cpu,demo"]}

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the scripts are bash")


def run(script, *args, cwd=None, **environ):
    env = {name: value for name, value in os.environ.items() if name not in ("VENV", "PYTHON", "WORKERS", "EXTRAS")}
    return subprocess.run(
        [str(ROOT / "scripts" / script), *args],
        env={**env, **environ},
        cwd=cwd or ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def log(tmp_path):
    return tmp_path / "commands.log"


@pytest.fixture
def venv(tmp_path, log):
    """A virtual environment that is real but for two commands it only notes down: pip, and the launcher itself, which
    leaves the summary of a run behind."""
    summary = json.dumps({"status": "completed", "metrics": {"eval": {"accuracy": 0.98125}}})
    executable(
        tmp_path / "venv" / "bin" / "python",
        f"""#!/usr/bin/env bash
        case "$*" in
          "-m pip --version" | *" --upgrade pip") ;;
          "-m pip install "*) printf '%s\\n' "$*" >>{log}; [[ -z "${{FAIL:-}}" ]] ;;
          "-m launcher.main "*)
            printf '%s in %s\\n' "$*" "$PWD" >>{log}
            for argument in "$@"; do
              case "$argument" in --model_dir=*) folder="${{argument#*=}}" ;; esac
            done
            mkdir -p "$folder" && printf '%s' '{summary}' >"$folder/summary.json"
            exit "${{STATUS:-0}}" ;;
          *) exec {sys.executable} "$@" ;;
        esac
        """,
    )
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    return str(tmp_path / "venv")


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_help_is_shown_and_nothing_done(script, tmp_path):
    done = run(script, "--help", VENV=str(tmp_path / "venv"))
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: scripts/{script}")
    assert "--dry_run" in done.stdout
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("script", "arguments"), COMMANDS.items())
def test_a_dry_run_prints_what_would_run_and_changes_nothing(script, arguments, tmp_path):
    done = run(script, "--dry_run", *arguments, cwd=tmp_path, VENV=str(tmp_path / "venv"), PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("+ ") for line in done.stdout.splitlines())
    assert f"+ {sys.executable} -m venv {tmp_path}/venv" in done.stdout
    assert "-m pip install" in done.stdout
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "path", [*SCRIPTS, ROOT / "scripts" / "slurm.sbatch", ROOT / ".ci" / "run"], ids=lambda path: path.name
)
def test_shellcheck_has_nothing_to_say_and_bash_is_strict(path):
    checker = Path(sysconfig.get_path("scripts")) / "shellcheck"
    done = subprocess.run([checker, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert os.access(path, os.X_OK)


def test_fast_leaves_out_what_is_slow_and_prepares_no_data(tmp_path):
    done = run("test.sh", "--fast", "--dry_run", "tests/config", VENV=str(tmp_path / "venv"), PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "launcher.data.prepare" not in done.stdout
    (tests,) = (line for line in done.stdout.splitlines() if line.endswith("tests/config"))
    chosen = shlex.split(tests)
    assert chosen[chosen.index("-m", chosen.index("pytest")) + 1] == "not heavy and not slow and not nightly"


def test_ci_runs_the_command_of_the_readme():
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("name", ["launcher", "tf-launcher"])
def test_a_checkout_of_the_packages_name_is_told_to_hide_it(name, tmp_path):
    for path in ("scripts/install.sh", "setup.py", "pyproject.toml"):
        copy = tmp_path / name / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy)
    command = [tmp_path / name / "scripts" / "install.sh", "--dry_run", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("programs beside this folder take it for the package" in done.stderr) == (name == "launcher")


def test_versions_are_those_of_constraints_only_where_they_are_asked_for(venv, log):
    tested = str(ROOT / "constraints.txt")
    for environ in ({}, {"CONSTRAINTS": tested}, {"CONSTRAINTS": tested}):
        assert run("install.sh", "cpu", VENV=venv, **environ).returncode == 0
    newest, constrained = log.read_text().splitlines()  # the same again is nothing to do
    assert "--constraint" not in newest
    assert f"--constraint {tested} -e" in constrained
    done = run("install.sh", "cpu", VENV=venv, CONSTRAINTS="nonesuch.txt")
    assert done.returncode == 1 and "CONSTRAINTS=nonesuch.txt" in done.stderr


def test_quickstart_from_any_folder_prints_the_accuracy_and_where_the_results_are(venv, log, tmp_path):
    (tmp_path / "else where").mkdir()
    done = run("quickstart.sh", "--model_dir=my run", "--seed=1", cwd=tmp_path / "else where", VENV=venv)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "else where" / "my run"
    assert "Test accuracy: 98.1" in done.stdout
    assert f"{folder} (summary.json" in done.stdout
    installed, trained = log.read_text().splitlines()
    assert installed.endswith(f"-e {ROOT}[cpu,demo]")
    assert trained == f"-m launcher.main --gin_file=resnet_cpu.gin --model_dir={folder} --seed=1 in {ROOT}"


def test_quickstart_ends_as_the_training_ended(venv):
    done = run("quickstart.sh", "--model_dir", f"{venv}/run", VENV=venv, STATUS="42")
    assert done.returncode == 42
    assert "Test accuracy" not in done.stdout


def test_an_install_is_done_once_until_it_fails_or_asks_for_more(venv, log):
    assert run("install.sh", "cpu", VENV=venv, FAIL="1").returncode != 0
    for extras, installs in [("cpu", 2), ("cpu", 2), ("cpu,demo", 3), ("test", 4), ("demo", 4), ("preflight", 5)]:
        assert run("install.sh", extras, VENV=venv).returncode == 0
        assert len(log.read_text().splitlines()) == installs, extras


GPU = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)"


@pytest.fixture
def machine(tmp_path):
    """machine(system, nvidia_smi): a PATH with these answers of uname, in one line, and of nvidia-smi."""

    def make(system, nvidia_smi=None):
        name, processor = system.split()
        executable(
            tmp_path / "bin/uname",
            f'#!/bin/sh\ncase "$1" in -m) echo {processor};; -s) echo {name};; *) echo {system};; esac\n',
        )
        if nvidia_smi is not None:
            executable(tmp_path / "bin/nvidia-smi", f"#!/bin/sh\necho '{nvidia_smi}'\n")
        return f"{tmp_path}/bin:{os.environ['PATH']}"

    return make


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="a machine with a GPU")
@pytest.mark.parametrize(
    ("system", "nvidia_smi", "extra"),
    [
        ("Linux x86_64", GPU, "cuda"),
        ("Linux x86_64", None, "cpu"),
        ("Linux x86_64", "No devices found.", "cpu"),
        ("Linux aarch64", GPU, "cpu"),
        ("Darwin arm64", None, "cpu"),
    ],
)
def test_auto_is_what_the_machine_has(machine, tmp_path, system, nvidia_smi, extra):
    path = machine(system, nvidia_smi)
    for script, arguments in (("install.sh", ["demo,auto,text"]), ("quickstart.sh", [])):
        done = run(script, "--dry_run", *arguments, PATH=path, VENV=str(tmp_path / "venv"), PYTHON=sys.executable)
        assert done.returncode == 0, done.stderr
        assert f"auto: {extra}" in done.stderr.splitlines()  # beside a note where the checkout is called launcher
        assert (f"\\[demo\\,{extra}\\,text\\]" if arguments else f"\\[{extra}\\,demo\\]") in done.stdout


def test_quickstart_installs_what_it_is_told_to(machine, venv, log):
    done = run("quickstart.sh", VENV=venv, PATH=machine("Linux x86_64", GPU), EXTRAS="cpu,demo")
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines()[0].endswith("[cpu,demo]")


def test_an_environment_does_not_get_a_second_tensorflow(machine, venv, log):
    path = machine("Linux x86_64")
    done = run("install.sh", "cuda,demo", VENV=venv, PATH=path)  # this Python's packages stand for the environment's
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    for part in ("has tensorflow-cpu, and", f"VENV={venv}-cuda", "pip uninstall -y tensorflow-cpu"):
        assert part in done.stderr
    assert not log.exists()
    assert run("install.sh", "cpu,demo", VENV=venv, PATH=path).returncode == 0
    assert run("install.sh", "preflight", VENV=venv, PATH=path).returncode == 0  # brings none


@pytest.mark.parametrize("extras", ["cpu,cuda", "test,cuda", "tpu,demo,cpu"])
def test_extras_with_two_tensorflows_are_refused(machine, extras):
    done = run("install.sh", extras, PATH=machine("Linux x86_64"))
    assert done.returncode == 1 and "choose one of cpu, cuda and tpu" in done.stderr


def test_a_python_that_does_not_fit_is_named(tmp_path):
    old = executable(tmp_path / "python3", "#!/bin/sh\nexit 1\n")
    done = run("install.sh", "cpu", VENV=str(tmp_path / "venv"), PYTHON=str(old))
    assert done.returncode == 1
    assert f"PYTHON={old} is not a Python from 3.10 to 3.13" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_preflight_is_not_installed_where_pip_would_leave_jax_out(tmp_path):
    ten = executable(
        tmp_path / "python3",
        f"""#!/usr/bin/env bash
        exec {sys.executable} -c "import sys; sys.version_info = (3, 10, 13); exec(sys.argv[1])" "$2"
        """,
    )
    for extras in ("cpu,preflight", "gpu_preflight,demo", "cpu,jax_cuda13"):
        done = run("install.sh", extras, VENV=str(tmp_path / "venv"), PYTHON=str(ten))
        assert done.returncode == 1
        assert f"is not a Python from 3.11 to 3.13, which [{extras}] needs" in done.stderr
    assert run("install.sh", "--dry_run", "cpu", VENV=str(tmp_path / "venv"), PYTHON=str(ten)).returncode == 0


def test_a_machine_without_python_is_told_what_to_install(tmp_path):
    for tool in ("bash", "dirname", "cat", "env", "ls", "id"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}" if os.path.exists(f"/bin/{tool}") else f"/usr/bin/{tool}")
    done = run("install.sh", "cpu", PATH=str(tmp_path), VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert "no Python from 3.10 to 3.13" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


def test_debians_missing_ensurepip_is_named_with_its_package(tmp_path):
    # Debian's python3 without python3-venv: it runs, and cannot import ensurepip.
    python = executable(
        tmp_path / "python3",
        f"""#!/usr/bin/env bash
        [[ "$*" != *ensurepip* ]] || exit 1
        exec {sys.executable} "$@"
        """,
    )
    done = run("install.sh", "--dry_run", "cpu", VENV=str(tmp_path / "venv"), PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    major, minor = sys.version_info[:2]
    assert f"python{major}.{minor}-venv" in done.stdout


def test_a_folder_that_is_no_virtual_environment_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    done = run("install.sh", "cpu", VENV=str(tmp_path), PYTHON=sys.executable)
    assert done.returncode == 1
    assert "is not a virtual environment" in done.stderr
    assert os.listdir(tmp_path) == ["precious"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which extras?"),
        (["a", "b"], "one argument"),
        (["-x"], "unknown option -x"),
        (["gpu,demo"], "no extra 'gpu'; did you mean 'cuda'?"),
        (["cpu,jax_cuda14"], "no extra 'jax_cuda14'; did you mean 'jax_cuda13'? there are: auto cpu cuda tpu"),
        (["cpu,none"], "no extra 'none'; there are: auto"),
    ],
)
def test_install_explains_wrong_arguments(arguments, message):
    done = run("install.sh", *arguments)
    assert done.returncode == 1
    assert message in done.stderr


# -------------------------------------------------------------------------------------------------------- several hosts


def test_launch_ssh_gives_the_hosts_the_interpreter_and_every_flag_to_the_launcher(tmp_path):
    ssh = executable(tmp_path / "my ssh", "#!/bin/sh\n")
    done = run(
        "launch_ssh.sh", "--dry_run", "a,me@b", "--gin_file=x.gin", "--model_dir=my run", "--min_workers=1",
        cwd=tmp_path, PYTHON=sys.executable, SSH_COMMAND=f"'{ssh}' -p 2222", PYTHONPATH="/mine",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    agents = [shlex.split(line) for line in lines if "launcher.jobs.agent" in line]
    assert [words[:3] for words in agents] == [[str(ssh), "-p", "2222"]] * 2
    for words in agents:
        remote = shlex.split(words[-1])
        assert f"PYTHONPATH={ROOT}:/mine" in remote and str(tmp_path) in remote
        assert remote[-3:] == [sys.executable, "-m", "launcher.jobs.agent"]
    workers = [line for line in lines if line.startswith(("TF_", "PYTHON"))]
    assert len(workers) == 2 and all(line.endswith("--gin_file=x.gin '--model_dir=my run'") for line in workers)
    assert os.listdir(tmp_path) == ["my ssh"]


def test_launch_ssh_takes_a_file_of_hosts(tmp_path):
    executable(tmp_path / "ssh", "#!/bin/sh\n")
    (tmp_path / "hosts.txt").write_text("a slots=2\nb  # the other\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = run(
        "launch_ssh.sh", "--dry_run", "hosts.txt", "--gin_file=x.gin", cwd=tmp_path, PYTHON=sys.executable, PATH=path
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines() if line.startswith("# worker")] == [
        "# worker 0 on a", "# worker 1 on a", "# worker 2 on b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "name the hosts"), (["a,b"], "name the hosts"), (["--gin_file=x.gin", "a"], "come first")],
)
def test_launch_ssh_explains_wrong_arguments(arguments, message):
    done = run("launch_ssh.sh", *arguments)
    assert done.returncode == 64
    assert message in done.stderr
