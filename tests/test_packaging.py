"""What an installed Launcher consists of, and what it says where TensorFlow is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("launcher", "models", "gin_configs", "setup.py", "pyproject.toml")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the checkout, with the setuptools that is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, target = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(folder / "source")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def files_under(folder, pattern):
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(pattern)}


def test_the_wheel_holds_every_module_and_every_recipe_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = files_under("launcher", "*.py") | files_under("models", "*.py") | files_under("gin_configs", "*.gin")
    assert {"launcher/config.py", "models/resnet.py", "gin_configs/base/images.gin"} <= wanted
    assert wanted <= names
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"launcher", "models", "gin_configs"}


def test_an_installed_wheel_finds_its_own_recipes(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "from launcher import config\n"
        "print(config.__file__, config.find_file('base/images.gin'), config.recipes()[0][0], sep='\\n')"
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
    assert Path(module) == tmp_path / "site" / "launcher" / "config.py"
    assert (tmp_path / recipe).samefile(tmp_path / "site" / "gin_configs" / "base" / "images.gin")
    assert first == min(path.name for path in (ROOT / "gin_configs").glob("*.gin"))


def test_the_wheel_brings_tensorflow_by_extra_alone(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
    fields = metadata.PathDistribution(zipfile.Path(archive, name.removesuffix("METADATA"))).metadata
    assert fields["Name"] == "tf-launcher"
    assert set(fields["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    assert {"cpu", "cuda", "tpu", "demo", "report", "kubernetes", "preflight", "test"} <= set(
        fields.get_all("Provides-Extra")
    )
    required = [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line]
    assert required
    assert not [line for line in required if re.match(r"tensorflow(?!-datasets)", line)]
    by_extra = {
        extra: re.split(r"[<>=\[ ]", line)[0]
        for line in fields.get_all("Requires-Dist")
        if line.startswith("tensorflow")
        for extra in re.findall(r"extra == ['\"](cpu|cuda|tpu)['\"]", line)
    }
    assert by_extra == {"cpu": "tensorflow-cpu", "cuda": "tensorflow", "tpu": "tensorflow-tpu"}


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
