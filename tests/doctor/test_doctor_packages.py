"""The checks of packages, of variables and of the settings of Keras."""

from __future__ import annotations

import subprocess
import sys

import pytest
from places import ROOT

from launcher.doctor import packages
from launcher.doctor.check import Context


def only(findings):
    (found,) = findings
    return found


# ------------------------------------------------------------------------------------------------------------ packages


def test_this_environment_has_one_tensorflow_and_what_launcher_requires():
    found = packages.installed()
    assert only(packages.tensorflow_findings(found)).status == "ok"
    assert not [one for one in packages.packages(Context(environ={})) if one.status == "fail"]


def having(*names_and_versions):
    return dict(one.split(" ") for one in names_and_versions)


@pytest.mark.parametrize(
    ("there", "status", "said"),
    [
        (["tensorflow-cpu 2.21.0"], "ok", "2.21.0"),
        (["tensorflow 2.22.0rc1"], "ok", "2.22.0rc1"),
        ([], "fail", "[cpu]"),
        (["tensorflow 2.21.0", "tensorflow-cpu 2.20.0"], "fail", "pip uninstall -y tensorflow tensorflow-cpu"),
        (["tensorflow-cpu 2.21.0", "tf-nightly-cpu 2.22.0.dev1"], "fail", "overwrite"),
        (["tensorflow 2.15.1"], "fail", "too old"),
        (["tensorflow-gpu 2.12.0"], "fail", "withdrawn"),
    ],
)
def test_one_new_enough_tensorflow_is_right(there, status, said):
    found = only(packages.tensorflow_findings(having(*there)))
    assert found.status == status
    assert said in f"{found.seen} {found.fix}"


COMPLETE = [
    "absl-py 2.5.1", "gin-config 0.5.0", "importlib-resources 6.0", "keras 3.12.0", "ml-dtypes 0.5.3", "numpy 2.3.0",
    "packaging 25.0", "rich 14.0", "tensorflow-datasets 4.9.9", "typeguard 4.4.0", "tensorflow-cpu 2.21.0",
    "tensorflow-metadata 1.17.3",
]  # fmt: skip


def complaints(*more, without=(), told=()):
    there = [one for one in COMPLETE if one.split()[0] not in without]
    return [
        f"{one.status}: {one.seen}: {one.fix}"
        for one in packages.package_findings(having(*there, *more), told)
        if one.status != "ok"
    ]


def test_complete_packages_are_one_line_with_their_versions():
    found = only(packages.package_findings(having(*COMPLETE), ["No broken requirements found."]))
    assert found.status == "ok"
    assert "keras 3.12.0, numpy 2.3.0" in found.seen


def test_conflicting_packages_are_named_with_the_way_out():
    assert "fail" in only(complaints("keras-nightly 3.13.0"))


@pytest.mark.parametrize(
    ("tensorflow", "libtpu", "fails"),
    [
        ("tensorflow-tpu 2.20.0", "0.0.52", True),
        ("tensorflow-tpu 2.20.0", "0.0.42", True),
        ("tensorflow-tpu 2.20.0", "0.0.21", False),
        ("tensorflow-tpu 2.18.0", "2.18.0", False),  # of Google's storage
        ("tensorflow-cpu 2.21.0", "0.0.52", False),  # preflight's
    ],
)
def test_a_libtpu_with_which_tensorflow_ends_at_its_import_is_named(tensorflow, libtpu, fails):
    said = complaints(tensorflow, f"libtpu {libtpu}", without=["tensorflow-cpu"])
    assert [one.endswith("pip install 'libtpu<0.0.22'") for one in said if one.startswith("fail")] == [True] * fails
    assert fails or not said


@pytest.mark.parametrize(
    ("told", "status", "fix"),
    [
        ("tf-launcher 0.1.0 requires importlib-resources, which is not installed.", "fail", "'importlib-resources'"),
        ("tf-launcher 0.1.0 has requirement keras>=3.8, but you have keras 2.15.0.", "fail", "'keras>=3.8'"),
        ("tensorflow-cpu 2.21.0 has requirement numpy<2.0, but you have numpy 2.3.0.", "warn", "anew in one command"),
        ("jax 0.10.2 requires jaxlib, which is not installed.", "warn", "anew in one command"),
    ],
)
def test_what_pip_finds_of_the_packages_that_a_training_is_made_of(told, status, fix):
    others = ["pandas 2.2 requires pytz, which is not installed.", "WARNING: something else"]
    said = only(complaints(told=[*others, told]))
    assert said.startswith(f"{status}: {told}") and fix in said


def test_a_package_that_is_missing_is_found_by_pip_itself(tmp_path):
    (tmp_path / "tf_launcher-0.1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: tf-launcher\nVersion: 0.1.0\nRequires-Dist: no-such-package\n"
    (tmp_path / "tf_launcher-0.1.0.dist-info" / "METADATA").write_text(metadata)
    program = "from launcher.doctor import packages; print(*packages.packages(None), sep='\\n')"
    environ = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert "requires no-such-package, which is not installed." in done.stdout
    assert "pip install 'no-such-package'" in done.stdout


# ----------------------------------------------------------------------------------------------------------- variables


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("TF_USE_LEGACY_KERAS", "1", "fail"),
        ("TF_USE_LEGACY_KERAS", "0", "ok"),
        ("KERAS_BACKEND", "jax", "fail"),
        ("KERAS_BACKEND", "tensorflow", "ok"),
        ("NVIDIA_TF32_OVERRIDE", "0", "warn"),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "false", "warn"),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "true", "ok"),
        ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python", "warn"),
        ("TF_XLA_FLAGS", "--tf_xla_auto_jit=2", "warn"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warn"),
        ("PATH", "/bin", "ok"),
    ],
)
def test_variables_that_get_in_the_way(name, value, status, tmp_path):
    found = only(packages.variables(Context(environ={name: value})))
    assert found.status == status
    assert status == "ok" or name in found.seen
