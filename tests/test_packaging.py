"""What an installed Launcher consists of, and what it says where TensorFlow is missing."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import built
import pytest
import setuptools
from built import FOLDERS, SOURCES
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from places import ROOT

from launcher.machine import installation

pytestmark = pytest.mark.slow


def files_under(root):
    files = (path.relative_to(root) for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.as_posix() for path in files}


def test_wheel_and_source_distribution_hold_every_file_of_the_packages_and_no_tests(sdist, wheel):
    wanted = {f"{folder}/{file}" for folder in FOLDERS for file in files_under(ROOT / folder)}
    assert {
        *("launcher/config/gin_bindings.py", "models/resnet.py", "models/py.typed", "launcher/py.typed"),
        *("gin_configs/base/images.gin", "gin_configs/data/spoken_numbers.py", "launcher/preflight/tpu_slices.txt"),
        "launcher/reporting/web/uplot/uPlot.iife.min.js",
    } <= wanted
    names = zipfile.ZipFile(wheel).namelist()
    installed = {name if name.startswith("launcher/") else f"launcher/{name}" for name in wanted}
    assert {name for name in names if not re.search(r"\.(dist-info|data)/", name)} == installed
    assert {name.partition(".data/data/share/")[2] for name in names} - {""} == {
        *("bash-completion/completions/launcher", "bash-completion/completions/launcher-jobs"),
        "zsh/site-functions/_launcher",
    }
    made = {"PKG-INFO", "setup.cfg"}  # by setuptools
    held = {name for name in files_under(sdist) - made if not name.startswith("tf_launcher.egg-info/")}
    shells = {f"completions/{file}" for file in files_under(ROOT / "completions")}
    assert held == wanted | shells | {name for name in SOURCES if (ROOT / name).is_file()}


def test_the_wheel_brings_its_licence_and_those_of_what_it_holds_of_others(wheel):
    names = {name.partition(".dist-info/licenses/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    assert names - {""} == {"LICENSE", "NOTICE", "launcher/reporting/web/uplot/LICENSE"}
    vendored = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "launcher").rglob("LICENSE")}
    assert vendored and all(f"\n{folder}/\n" in (ROOT / "NOTICE").read_text() for folder in vendored)


def test_the_public_names_are_those_that_python_programs_get():
    import launcher

    assert launcher.__all__ == sorted(launcher._LAZY)
    assert all(callable(getattr(launcher, name)) for name in launcher.__all__)


def test_an_installed_wheel_finds_its_own_recipes(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "from launcher.config import gin_files\n"
        "print(gin_files.__file__, gin_files.find_file('base/images.gin'), gin_files.recipes()[0][0], sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    module, recipe, first = done.stdout.splitlines()
    assert Path(module) == tmp_path / "site" / "launcher" / "config" / "gin_files.py"
    assert (tmp_path / recipe).samefile(tmp_path / "site" / "launcher" / "gin_configs" / "base" / "images.gin")
    assert first == min(path.name for path in (ROOT / "gin_configs").glob("*.gin"))


OWN_MODEL = """
import keras

def net():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
OWN_PROGRAM = """
import config, data, launcher, models, numpy as np

assert config.SAME is data and models.__file__.startswith(data.__file__.removesuffix("data.py"))
launcher.fit(models.net, (np.zeros((8, 2), "float32"), np.zeros(8, "int32")), batch_size=4)
"""


@pytest.mark.parametrize(
    ("name", "is_installed"),
    [("models.py", True), pytest.param("models/__init__.py", False, marks=pytest.mark.nightly)],
)
def test_a_program_trains_beside_modules_of_the_names_of_launchers_folders(
    run_launcher, request, tmp_path, name, is_installed
):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(OWN_MODEL)
    for file, text in {"data.py": "", "config.py": "import data as SAME", "program.py": OWN_PROGRAM}.items():
        (tmp_path / file).write_text(text)
    env = {}
    if is_installed:
        zipfile.ZipFile(request.getfixturevalue("wheel")).extractall(tmp_path / "site")
        env["PYTHONPATH"] = str(tmp_path / "site")
    done = run_launcher("--gin_file=program.py", "--model_dir=run", env=env, fresh=True)
    assert done.returncode == 0 and "note:" not in done.stderr, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 2


def test_the_wheel_brings_tensorflow_by_extra_alone(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
    fields = metadata.PathDistribution(zipfile.Path(archive, name.removesuffix("METADATA"))).metadata
    assert (fields["Name"], fields["License-Expression"]) == ("tf-launcher", "Apache-2.0")
    assert set(fields["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    # A wheel writes gpu_preflight with a hyphen; pip takes either.
    extras = {"cpu", "cuda", "tpu", "demo", "kubernetes", "preflight", "gpu-preflight", "test"}
    assert extras <= set(fields.get_all("Provides-Extra"))
    required = [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line]
    assert required
    assert not [line for line in required if re.match(r"tensorflow(?!-(datasets|metadata))", line)]
    required_by_extras = [line for line in fields.get_all("Requires-Dist") if line not in required]
    by_extra = {
        extra: {
            Requirement(line).name
            for line in required_by_extras
            if line.startswith("tensorflow") and f'extra == "{extra}"' in line.replace("'", '"')
        }
        for extra in ("cpu", "cuda", "tpu")
    }
    cpu = {"tensorflow-cpu", "tensorflow"}  # which of them, the machine says
    assert by_extra == {"cpu": cpu, "cuda": {"tensorflow"}, "tpu": {"tensorflow-tpu"}}


def test_tensorflow_datasets_needs_no_tensorflow():
    required = metadata.requires("tensorflow-datasets") or []
    names = {re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line}
    assert names
    assert not names & {"tensorflow", "tensorflow-cpu", "tf-nightly"}


@pytest.fixture
def without_tensorflow(tmp_path):
    """Environment of a machine on which nobody installed TensorFlow."""
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'tensorflow':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    return {"PYTHONPATH": f"{tmp_path / 'shim'}:{ROOT}"}


def test_without_tensorflow_one_message_names_the_extras(run_launcher, without_tensorflow, tmp_path):
    done = run_launcher("--gin_file=resnet_cpu.gin", "--model_dir=run", env=without_tensorflow, timeout=60)
    assert done.returncode == 64, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    for part in ("TensorFlow", "pip install", "[cpu]", "[cuda]", "[tpu]"):
        assert part in done.stderr
    assert not (tmp_path / "run").exists()


def test_without_tensorflow_help_and_the_list_of_recipes_still_come(run_launcher, without_tensorflow):
    assert "--gin_file" in run_launcher("--help", env=without_tensorflow, timeout=60).stdout
    listed = run_launcher(env=without_tensorflow, timeout=60)
    assert listed.returncode == 0, listed.stderr
    assert "resnet_cpu.gin" in listed.stdout


def setup_arguments() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **keywords: seen.update(keywords))
        runpy.run_path(str(ROOT / "setup.py"))
    return seen


def installs(command: str) -> None:
    """Fails where pip would refuse the command, which is not run to its end and needs no network."""
    words = shlex.split(command)
    assert words[words.index("install") - 1] == "pip"
    dry = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words[words.index("install") :], *dry],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_checkout_is_told_to_install_more_of_itself():
    said = installation.command("text")
    assert shlex.split(said)[-3:] == ["install", "-e", f"{ROOT}[text]"]
    assert f"{ROOT}[cpu]" in installation.tensorflow_command()


def test_an_installed_copy_is_told_to_install_the_packages_of_an_extra(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", "from launcher.machine import installation; print(installation.command('text'))"],
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = setup_arguments()["extras_require"]["text"]
    assert shlex.split(done.stdout)[-len(wanted) - 1 :] == ["install", *wanted]
    installs(done.stdout)


def test_extras_name_what_has_wheels_for_the_machine():
    required = [Requirement(line) for line in setup_arguments()["extras_require"]["test"]]

    def names(**machine):
        return {one.name for one in required if one.marker is None or one.marker.evaluate(machine)}

    linux = names(sys_platform="linux", platform_machine="x86_64", python_version="3.11")
    assert "tensorflow-cpu" in linux and "libtpu" in linux and "tensorflow" not in linux
    for system, machine in (("linux", "aarch64"), ("darwin", "arm64")):
        there = names(sys_platform=system, platform_machine=machine, python_version="3.11")
        assert "tensorflow" in there and "jax" in there
        assert not there & {"tensorflow-cpu", "libtpu"}


def test_the_versions_in_constraints_are_ones_that_setup_admits():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    arguments = setup_arguments()
    for line in (*arguments["install_requires"], *arguments["extras_require"]["test"]):
        wanted = Requirement(line)
        assert wanted.specifier.contains(pinned[wanted.name.lower()]), line


def rows(page: str, first: str) -> list[dict[str, str]]:
    """The rows of the table whose first column has this head, by the heads of its columns."""
    head, _, *lines = page[page.index(f"| {first} |") :].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def test_the_page_on_installing_says_what_setup_requires():
    page, arguments = (ROOT / "docs" / "install.md").read_text(), setup_arguments()
    table, pythons = rows(page, "TensorFlow"), SpecifierSet(arguments["python_requires"])
    required = {Requirement(line).name: Requirement(line).specifier for line in arguments["install_requires"]}
    extras = {
        extra: {Requirement(line).name: Requirement(line) for line in lines}
        for extra, lines in arguments["extras_require"].items()
    }
    for extra, name in (("cpu", "tensorflow-cpu"), ("cuda", "tensorflow"), ("tpu", "tensorflow-tpu")):
        assert str(extras[extra][name].specifier) == f">={table[0]['TensorFlow']}"
    for row in table:
        first, last = (int(text.partition(".")[2]) for text in row["Python"].split(" to "))
        assert all(f"3.{minor}" in pythons for minor in range(first, last + 1)) and f"3.{first - 1}" not in pythons
        keras, *without = re.findall(r"3\.\d+", row["Keras"])
        assert keras in required["keras"] and not [one for one in without if f"{one}.1" in required["keras"]]
        assert row["`tensorflow-tpu`"].startswith(row["TensorFlow"]) or row["TensorFlow"] == "2.21"
        goes = tuple(map(int, row["TensorFlow"].split("."))) >= installation._TENSORFLOW_OF_JAX
        assert row["JAX 0.10.2 beside it"] == ("yes" if goes else "no")
    for extra, name in (("preflight", "jax"), ("gpu_preflight", "jax")):
        assert "0.10.2" in extras[extra][name].specifier
        assert extras[extra][name].marker.evaluate({"python_version": ".".join(map(str, installation._PYTHON_OF_JAX))})
        assert not extras[extra][name].marker.evaluate({"python_version": "3.10"})
    listed = {name for row in rows(page, "extra") for name in re.findall(r"`(\w+)`", row["extra"])}
    assert listed == set(extras)


def test_both_programs_have_a_command_that_tells_their_version():
    commands = dict(line.split("=") for line in setup_arguments()["entry_points"]["console_scripts"])
    assert set(commands) == {"launcher", "launcher-jobs"}
    for entry in commands.values():
        module, name = entry.split(":")
        program = f"import sys; sys.argv = ['x', '--version']; from {module} import {name}; sys.exit({name}())"
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        assert (
            done.stdout.startswith(f"launcher {setup_arguments()['version']} (Python 3.") and "keras 3." in done.stdout
        )


def test_version_is_that_of_the_changelog_and_of_the_page_on_installing():
    version = setup_arguments()["version"]
    (newest, *_) = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest in (version, "Unreleased")
    assert f"tf_launcher-{version}-py3-none-any.whl" in (ROOT / "docs" / "install.md").read_text()


@pytest.mark.nightly  # by network: all that the wheel requires comes from the index
def test_the_wheel_works_where_nothing_else_is(wheel, tmp_path):
    command = ["bash", str(ROOT / "scripts" / "try_wheel.sh"), str(wheel)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the wheel works where nothing else is\n") and "restored step 10" in done.stdout


def test_an_installed_wheel_brings_both_commands_and_their_completion(wheel, tmp_path):
    python = built.environment(tmp_path / "env", wheel)
    listed = subprocess.run([python.with_name("launcher")], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "resnet_cpu.gin" in listed.stdout
    share = tmp_path / "env" / "share"
    for file in ("bash-completion/completions/launcher", "zsh/site-functions/_launcher"):
        assert "--gin_file" in (share / file).read_text()
    assert python.with_name("launcher-jobs").is_file()
