"""Every command of README.md and docs/ works: accepted in every run of the suite, and run for real with `-m ''`."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pages
import pytest
from places import PYTHONPATH, ROOT

from launcher import launch, modes
from launcher.config import gin_bindings
from launcher.config.gin_files import Import, find_file, read_file
from launcher.errors import UsageError
from launcher.main import parse

pytestmark = pytest.mark.slow

DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]

# Of what is not the launcher's: what no test can run here, and why.
CANNOT_RUN = {
    r"(gcloud|kubectl|docker|ray|sbatch|srun|salloc|scancel|squeue|ssh|scp|ssh-copy-id|rsync) ": "needs a cluster",
    r"(git clone|(\.venv/bin/)?(pip (install|wheel)|pre-commit install)|python -m venv|cd)\b": "sets a machine up",
    r"(\.|source) \S+/activate$": "sets a shell up",
    r"python scripts/matrix\.py": "takes an hour, each night",
    r"python -m launcher\.data\.prepare ": "downloads data",
    r"curl http://127": "asks a run that goes on",
    r"(tensorboard|wandb|mlflow) ": "serves until it is stopped",
    r"while true|tail -f ": "goes on until it is stopped",
    r"python benchmarks/": "measures for minutes to hours",
}
# Of the launcher's own: what is only planned here (--dry_run), and why.
ONLY_PLANNED = {
    r"--backend=(ssh|exec|slurm|ray|kubernetes|tpu_vm|member)": "needs hosts",
    r"\w+_(gpu|tpu|multiworker|wmt)\.gin": "needs accelerators and large data",
    r"(fashion|help|guide_mlp|table1)\.gin": "needs data that is downloaded",
    r"=(/shared/|gs://)": "needs storage that hosts share",
}
# What takes long, and what shortens it without changing what is shown.
SHORTENED = {
    r"--drill=": "--gin_param='train.steps = 100' --gin_param='resnet.depth = 8'",
    r"--mode=verify": "--gin_param='verify.steps = 2' --gin_param='verify.replicas = 2'",
    r"--gin_file=experiment_underflow\.gin": "--gin_param='train.steps = 20'",
    r"--gin_file=resnet_cpu\.gin.*train\.(epochs|steps) =": "--gin_param='resnet.depth = 8'",
    r"--gin_file=resnet_cpu\.gin": "--gin_param='train.steps = 20' --gin_param='resnet.depth = 8'",
    r"--gin_file=(lm|lstm|transformer)_cpu\.gin": "--gin_param='train.steps = 2'",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NUM_NODES": "2",
}


def matches(table: dict[str, str], command: str, match: Callable[..., object] = re.search) -> str | None:
    """The value of the first pattern that is found in the command."""
    return next((value for pattern, value in table.items() if match(pattern, command)), None)


# ----------------------------------------------------------------------------------- what pages take for granted


def _own_files(folder: Path) -> None:
    _photographs_and_model(folder)
    words = ("quick", "brown", "fox", "jumps", "over", "lazy", "dog", "while", "seven", "other", "look")
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 12)) for i in range(1, 400)]
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("\n".join(f"{line} {i}" for i, line in enumerate(lines)))
    (folder / "pairs.tsv").write_text("\n".join(f"{line[:20]} {i}\t{i} {line[20::-1]}" for i, line in enumerate(lines)))


def _photographs_and_model(folder: Path) -> None:
    import published_data

    published_data.make(folder)


def _keras_program(folder: Path) -> None:
    pages.write_files(ROOT / "docs/keras.md", folder)
    shutil.copy(folder / "digits.py", folder / "program.py")


def _constraints(folder: Path) -> None:
    shutil.copy(ROOT / "constraints.txt", folder)


def _own_recipe(folder: Path) -> None:
    (folder / "my.gin").write_text("include 'resnet_cpu.gin'\ntrain.steps = 20\n")


# What a page says is there before its first command, and the commands of another page that it says it follows.
GIVEN = {
    "docs/install.md": _constraints,
    "docs/own_data.md": _own_files,
    "docs/fine_tuning.md": _photographs_and_model,
    "docs/model_out.md": _keras_program,
    "docs/troubleshooting.md": _keras_program,
    "docs/precision.md": _own_recipe,
}
QUICKSTART = (
    "python -m launcher.main --gin_file=resnet_cpu.gin --model_dir=runs/quickstart --gin_param='train.steps = 20' "
    "--gin_param='resnet.depth = 8'"
)
FOLLOWS = {
    "docs/model_out.md": ["python digits.py"],
    "docs/first_hour.md": [QUICKSTART],
    "docs/see_a_run.md": [QUICKSTART],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """folder(page): a fresh one, the working directory, with what the page shows and takes for granted."""

    def made(page: str) -> Path:
        if page in GIVEN:
            GIVEN[page](tmp_path)
        pages.write_files(ROOT / page, tmp_path)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return made


# ----------------------------------------------------------------------------------------------- accepted, in any case


def flags_of(command: str) -> tuple[str, list[str]] | None:
    """The launcher's program that a command runs, also by srun or with variables before it, and its flags."""
    words = pages.words(command.replace(".venv/bin/", ""))
    while words and (words[0] in ("srun", "timeout") or re.match(r"[A-Z_]+=", words[0])):
        words.pop(0)
        while words and re.match(r"-|\d+$", words[0]):
            words.pop(0)
    by_name = {"launcher": "launcher.main", "launcher-jobs": "launcher.launch"}
    if words and words[0] in by_name:
        return by_name[words[0]], words[1:]
    if words[:2] == ["python", "-m"] and words[2:] and words[2] in by_name.values():
        return words[2], words[3:]
    return None


def check_worker(flags: list[str]) -> None:
    """Flags, and bindings where no module of a page has to be imported for them, as --dry_run checks them first."""
    from launcher.run import loading, programs

    options = parse(["launcher.main", *flags])
    if options.help or options.version:
        return
    request = modes.make_request(options)
    program, recipes = programs.split(request.gin_file)
    if program:
        compile(Path(program).read_text(), program, "exec")
    statements = [one for name in recipes for one in read_file(find_file(name), opened=[])]
    if request.gin_file and not any(isinstance(one, Import) for one in statements):
        try:
            loading.load_bindings(recipes, request.gin_param, called_by_program=("train",) if program else ())
        finally:
            gin_bindings.reset()


def check_job(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a job, which starts and connects to nothing."""
    if "--backend=slurm" in flags:
        for name, value in SLURM.items():
            monkeypatch.setenv(name, value)
    if "--backend=member" in flags:
        monkeypatch.setenv(
            "TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
        )
    assert launch.main(["launcher.launch", *flags, "--dry_run"]) == 0
    for name in (*SLURM, "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def check_others(command: str, folder: Path) -> None:
    command = re.sub(r"^([A-Z_]+=\S+ )+", "", command)  # variables of the environment
    words = pages.words(command)
    if words[0].startswith("scripts/"):
        script = ROOT / words[0]
        assert os.access(script, os.X_OK), f"{words[0]} cannot be run"
        environ = {**os.environ, "VENV": str(folder / "venv")}  # this one has a TensorFlow already
        planned = subprocess.run(
            [script, "--dry_run", *words[1:]], env=environ, capture_output=True, text=True, timeout=60
        )
        assert planned.returncode == 0, planned.stderr
    elif words[0] == "python" and words[1].endswith(".py"):
        is_made = words[1].startswith("runs/")  # by a command before
        assert is_made or (folder / words[1]).is_file() or (ROOT / words[1]).is_file(), f"there is no {words[1]}"
    else:
        why = matches(CANNOT_RUN, command, re.match)
        assert why, f"{command!r}: no test runs this. If it is a command, see CANNOT_RUN; if not, fence it as text"
    if words[:2] == ["pip", "install"]:
        setup = (ROOT / "setup.py").read_text()
        for extra in re.findall(r"\[([\w,]+)\]", command):
            assert [name for name in extra.split(",") if f'"{name}": ' not in setup] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_are_accepted(page, folder, monkeypatch):
    here = folder(page)
    for block in pages.blocks(ROOT / page):
        assert block.is_commands or not re.match(r"(python|launcher|scripts/|pip) ", block.text), (
            f"line {block.line}: sh"
        )
        if block.language == "python":
            compile(block.text, f"{page} line {block.line}", "exec")
        for command in block.commands:
            print(f"{page} line {block.line}: {command}")
            own = flags_of(command)
            if own is None:
                check_others(command, here)
            elif own[0] == "launcher.main":
                check_worker(own[1])
            else:
                check_job(own[1], monkeypatch)


@pytest.mark.parametrize("page", PAGES)
def test_bindings_and_arguments_of_fit_that_sentences_name_are_accepted(page):
    from launcher.modes.fit import fit
    from launcher.modes.fit_settings import FitSettings
    from launcher.run import loading

    known = {*inspect.signature(fit).parameters, *FitSettings.__annotations__}
    wrong = []
    for span in pages.spans(ROOT / page):
        # A letter stands for a number, and some names must be bound beside others (vocab_size).
        if re.fullmatch(r"(?!layer\.)[A-Za-z_][\w.]*\.\w+ = \S.*", span) and not re.search(r"…|= [A-Z]$", span):
            try:
                loading.load_bindings(["resnet_cpu.gin"], [span])
            except UsageError as error:
                if "required and not bound" not in str(error):
                    wrong.append(f"{span}: {error}")
            finally:
                gin_bindings.reset()
    sources = [block.text for block in pages.blocks(ROOT / page) if (block.language, block.note) == ("python", "")]
    sources += [span for span in pages.spans(ROOT / page) if re.fullmatch(r"launcher\.fit\([^…]+\)", span)]
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "launcher.fit":
            unknown = {one.arg for one in node.keywords if one.arg} - known
            wrong += [f"launcher.fit({name}=)" for name in sorted(unknown)]
    assert wrong == []


def test_command_that_no_test_runs_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Do this:\n\n    frobnicate --now  # at once\n\n```text\nok now\n```\n")
    (command,) = [command for block in pages.blocks(page) for command in block.commands]
    assert command == "frobnicate --now"
    with pytest.raises(AssertionError, match="'frobnicate --now': no test runs this"):
        check_others(command, tmp_path)


# -------------------------------------------------------------------------------------------------------- run, for real


@pytest.fixture
def shell(tmp_path_factory):
    """shell(command, folder): runs it in bash, where python and the launcher's programs are those of this checkout."""
    programs_folder = tmp_path_factory.mktemp("bin")
    for name, run in {
        "python": "",
        "launcher": "-m launcher.main",
        "launcher-jobs": "-m launcher.launch",
    }.items():
        (programs_folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {run} "$@"\n')
        (programs_folder / name).chmod(0o755)
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_", "TF_CONFIG"))
    }
    environ |= {"PATH": f"{programs_folder}{os.pathsep}{environ['PATH']}", "PYTHONPATH": PYTHONPATH}

    def run(command: str, folder: Path) -> types.SimpleNamespace:
        command = command.replace(".venv/bin/", "")
        here = re.sub(r"(?<![\w/.])(scripts|benchmarks|examples)/", rf"{shlex.quote(str(ROOT))}/\1/", command)
        process = subprocess.Popen(
            ["bash", "-c", here],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=580)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after 580 s: {here}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return types.SimpleNamespace(returncode=process.returncode, output=output)

    return run


def as_run(command: str) -> str | None:
    """A command as a test runs it: planned only, or shortened, where the tables say so; None where it cannot be."""
    if flags_of(command) is None and not re.match(r"([A-Z_]+=\S+ )*scripts/", command):
        return None if matches(CANNOT_RUN, command, re.match) else command
    if re.match(r"([A-Z_]+=\S+ )*scripts/", command):
        return re.sub(r"^(?:[A-Z_]+=\S+ )*\S+", r"\g<0> --dry_run", command)
    if matches(ONLY_PLANNED, command):
        return None if "srun " in command or "--backend=slurm" in command else f"{command} --dry_run"
    return f"{command} {matches(SHORTENED, command) or ''}"


@pytest.mark.nightly
@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_run_from_top_to_bottom(page, folder, shell):
    here = folder(page)
    for command in FOLLOWS.get(page, []):
        assert shell(command, here).returncode == 0
    for block in pages.blocks(ROOT / page):
        if block.note.startswith("not run: "):
            continue
        for command in block.commands:
            run = as_run(command)
            if run is None:
                continue
            done = shell(run, here)
            wanted = block.exit_code if command == block.commands[-1] else 0
            assert done.returncode == wanted, f"{page} line {block.line}: {run}\n{done.output[-6000:]}"
