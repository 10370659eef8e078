"""The Dockerfiles in docker/: what they copy and install exists, and their steps make a launcher that trains."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from places import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
SMALL = ("--gin_file=resnet_cpu.gin", "--gin_param=train.steps = 2", "--gin_param=resnet.depth = 8")


def instructions(path):
    """The instructions of a Dockerfile, in order: name and what follows."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def of(path, name):
    return [arguments for instruction, arguments in instructions(path) if instruction == name]


def installed(path):
    """The requirement that pip gets, which is `/src[EXTRA,EXTRA]`."""
    (words,) = (shlex.split(step) for step in of(path, "RUN") if "pip install" in step)
    (found,) = (word for word in words if word.startswith("/src["))
    return words, re.fullmatch(r"/src\[([\w,]+)\]", found)[1].split(",")


@pytest.fixture
def metadata(monkeypatch):
    kept = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: kept.update(given))
    runpy.run_path(str(ROOT / "setup.py"))
    return kept


def test_there_is_one_for_each_kind_of_machine():
    assert [path.name for path in DOCKERFILES] == [
        "cpu.Dockerfile", "cuda.Dockerfile", "nvidia.Dockerfile", "tpu.Dockerfile"
    ]  # fmt: skip


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_a_dockerfile_names_exists(path, metadata):
    known = {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "VOLUME", "ENTRYPOINT"}
    assert {name for name, _ in instructions(path)} <= known
    (base,) = of(path, "FROM")
    plain = re.fullmatch(r"python:3\.(\d+)-slim-bookworm", base)
    minor = int(plain[1]) if plain else {"nvcr.io/nvidia/tensorflow:25.02-tf2-py3": 12}[base]
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", metadata["python_requires"]).groups()
    assert int(low) <= minor < int(high)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for copied in of(path, "COPY"):
        *sources, target = copied.split()
        assert target.startswith("/src/")
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, f".dockerignore leaves {source} out"
    copied = {source for line in of(path, "COPY") for source in line.split()[:-1]}
    folders = [name.replace(".", "/") for name in metadata["packages"]]
    assert [folder for folder in folders if not {folder, folder.split("/")[0]} & copied] == []
    assert {"setup.py", "pyproject.toml"} <= copied
    words, extras = installed(path)
    assert set(extras) <= set(metadata["extras_require"])
    # A TensorFlow of its own on plain Python, none beside the vendor's.
    assert len({"cpu", "cuda", "tpu", "test"} & set(extras)) == (1 if plain else 0)
    assert "--no-cache-dir" in words
    for word in words:
        if word.startswith("--constraint=") and plain:
            assert word.removeprefix("--constraint=/src/") in copied
    (entry,) = of(path, "ENTRYPOINT")
    (program,) = json.loads(entry)
    assert program in {script.split("=")[0] for script in metadata["entry_points"]["console_scripts"]}
    assert of(path, "USER") == ([] if path.name == "tpu.Dockerfile" else ["launcher"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_the_constraints_admit_what_a_dockerfile_installs(path, metadata):
    words, extras = installed(path)
    if "--constraint=/src/constraints.txt" not in words:
        return
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if re.match(r"[\w.-]+==", line)
    )
    wanted = [*metadata["install_requires"], *(one for extra in extras for one in metadata["extras_require"][extra])]
    for requirement in map(Requirement, wanted):
        version = pinned.get(requirement.name.lower().replace("_", "-"))
        assert version is None or version in requirement.specifier, requirement


# A part of what `pip list --format=freeze` has in nvcr.io/nvidia/tensorflow:25.02-tf2-py3, as users published it.
VENDORS = """absl-py==1.0.0
grpcio==1.62.1
h5py==3.10.0
keras==3.3.2
ml-dtypes==0.3.2
numpy==1.26.4
protobuf==4.25.3
tensorboard==2.17.1
tensorflow==2.17.0+nv25.2
tensorflow-datasets==4.9.9
tf_keras==2.17.0
typeguard==2.13.3
"""


@pytest.mark.parametrize("listed", [VENDORS, VENDORS.replace("+nv25.2", "")])
def test_the_vendors_tensorflow_is_kept_by_a_constraint_that_admits_what_launcher_needs(listed, metadata, tmp_path):
    """`docker build` ends where the base has no TensorFlow of NVIDIA's."""
    path = ROOT / "docker" / "nvidia.Dockerfile"
    (step,) = (one for one in of(path, "RUN") if "pip list" in one)
    (tmp_path / "list").write_text(listed)
    (tmp_path / "python").write_text(f"#!/bin/sh\ncat {tmp_path}/list\n")
    (tmp_path / "python").chmod(0o755)
    environ = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["/bin/sh", "-c", step.replace("/src/", f"{tmp_path}/")], env=environ, check=False)
    assert (done.returncode == 0) == ("+nv" in listed)
    kept = dict(line.split("==") for line in (tmp_path / "vendor.txt").read_text().splitlines())
    assert set(kept) == {"grpcio", "h5py", "ml-dtypes", "numpy", "protobuf", "tensorflow"}
    words, extras = installed(path)
    assert "--constraint=/src/vendor.txt" in words and "PIP_CONSTRAINT=/src/vendor.txt" in words
    wanted = [*metadata["install_requires"], *(one for extra in extras for one in metadata["extras_require"][extra])]
    for requirement in map(Requirement, wanted):
        assert requirement.name not in kept or kept[requirement.name] in requirement.specifier, requirement


def execute(path, folder):
    """Runs a Dockerfile's COPY and RUN lines with `folder` as the root of the image, and this Python's packages as what
    pip would fetch; returns the environment of a container."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = sysconfig.get_path("purelib", vars={"base": str(venv)})
    Path(site, "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    environ = {"PATH": f"{venv}/bin{os.pathsep}{os.environ['PATH']}", "HOME": str(folder), "TF_CPP_MIN_LOG_LEVEL": "2"}
    for name, arguments in instructions(path):
        inside = re.sub(r"(?<![\w/.])/(src|runs|data|recipes)\b", rf"{folder}/\1", arguments)
        if name == "ENV":
            environ |= dict(word.split("=", 1) for word in shlex.split(inside))
        elif name == "COPY":
            *sources, target = inside.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    Path(target).mkdir(exist_ok=True)
                    shutil.copy(ROOT / source, target)
        elif name == "RUN":
            offline = re.sub(
                r"pip install", "pip install --no-index --no-build-isolation --ignore-installed --no-deps", inside
            )
            as_here = re.sub(r"useradd \S+ \S+ launcher", "true", offline).replace("--owner=launcher ", "")
            subprocess.run(["/bin/sh", "-c", as_here], cwd=folder, env=environ, check=True)
    return environ


@pytest.mark.nightly
@pytest.mark.heavy
def test_steps_of_the_cpu_image_make_a_launcher_that_trains(tmp_path):
    path = ROOT / "docker" / "cpu.Dockerfile"
    environ = execute(path, tmp_path)
    (program,) = json.loads(of(path, "ENTRYPOINT")[0])
    run = [tmp_path / "venv" / "bin" / program, *SMALL, f"--model_dir={tmp_path}/runs/first"]
    done = subprocess.run(run, cwd=tmp_path / "recipes", env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/first/summary.json").read_text())
    assert summary["status"] == "completed" and summary["step"] == 2
    # What the pods of a JobSet run, which begin with `python`.
    module = subprocess.run(
        ["python", "-c", "import launcher; print(launcher.__file__)"],
        cwd=tmp_path / "recipes", env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert fnmatch.fnmatch(module.stdout.strip(), f"{tmp_path}/venv/lib/*/site-packages/launcher/__init__.py")
