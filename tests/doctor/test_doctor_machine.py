"""The checks of packages, variables and the machine: real limits and disks, files of other machines' systems."""

from __future__ import annotations

import json
import os
import resource
import runpy
import subprocess
from pathlib import Path

import pytest
import setuptools

from launcher.doctor.environment import disk, driver, limits, package_checks, packages, processor, variables
from launcher.doctor.environment.context import Context
from launcher.doctor.environment.finding import Skip
from launcher.doctor.environment.packages import Package, Packages

ROOT = Path(__file__).resolve().parents[2]


def only(findings):
    (found,) = findings
    return found


def statuses(findings):
    return [one.status for one in findings]


# ------------------------------------------------------------------------------------------------------------ packages


def test_what_the_doctor_requires_is_what_setup_requires(monkeypatch):
    seen = {}
    monkeypatch.setattr(setuptools, "setup", lambda **keywords: seen.update(keywords))
    runpy.run_path(str(ROOT / "setup.py"))
    assert set(packages.REQUIRED) == set(seen["install_requires"])
    assert seen["python_requires"] == packages.PYTHONS
    extras = [one for extra in ("cpu", "cuda", "tpu") for one in seen["extras_require"][extra]]
    assert {one.split(">")[1] for one in extras if one.startswith("tensorflow")} == {packages.TENSORFLOWS[1:]}
    every = {one.split(";")[0] for extra in seen["extras_require"].values() for one in extra}
    assert set(packages.OPTIONAL) <= every


def test_this_environment_has_one_tensorflow_and_what_launcher_requires():
    found = packages.installed()
    assert len(found.tensorflows()) == 1
    assert only(package_checks.tensorflow_findings(found)).status == "ok"
    assert not [one for one in package_checks.package_findings(found) if one.status == "fail"]


def having(*names_and_versions, **requires):
    return Packages(
        Package(name=name, version=version, folder=f"/site{position}", requires=tuple(requires.get(name, ())))
        for position, (name, _, version) in enumerate(one.partition(" ") for one in names_and_versions)
    )


@pytest.mark.parametrize(
    ("there", "status", "said"),
    [
        (["tensorflow-cpu 2.21.0"], "ok", "2.21.0"),
        (["tensorflow 2.22.0rc1"], "ok", "2.22.0rc1"),
        ([], "fail", "tf-launcher[cpu]"),
        (["tensorflow 2.21.0", "tensorflow-cpu 2.20.0"], "fail", "pip uninstall -y tensorflow tensorflow-cpu"),
        (["tensorflow-cpu 2.21.0", "tf-nightly-cpu 2.22.0.dev1"], "fail", "overwrite"),
        (["tensorflow 2.15.1"], "fail", "too old"),
        (["tensorflow-gpu 2.12.0"], "fail", "withdrawn"),
    ],
)
def test_one_new_enough_tensorflow_is_right(there, status, said):
    found = only(package_checks.tensorflow_findings(having(*there)))
    assert found.status == status
    assert said in f"{found.seen} {found.fix}"


COMPLETE = [
    "absl-py 2.5.1", "gin-config 0.5.0", "importlib-resources 6.0", "keras 3.12.0", "ml-dtypes 0.5.3", "numpy 2.3.0",
    "packaging 25.0", "rich 14.0", "tensorflow-datasets 4.9.9", "typeguard 4.4.0", "tensorflow-cpu 2.21.0",
]  # fmt: skip


def complaints(*more, without=(), **requires):
    there = [one for one in COMPLETE if one.split()[0] not in without]
    return [
        f"{one.status}: {one.seen}: {one.fix}"
        for one in package_checks.package_findings(having(*there, *more, **requires))
        if one.status != "ok"
    ]


def test_complete_packages_are_one_line_with_their_versions():
    found = only(package_checks.package_findings(having(*COMPLETE)))
    assert found.status == "ok"
    assert "keras 3.12.0, numpy 2.3.0" in found.seen


def test_missing_old_doubled_and_conflicting_packages_are_named_with_the_way_out():
    assert "pip install 'importlib-resources'" in only(complaints(without=["importlib-resources"]))
    assert "keras>=3.10, and 2.15.0 is installed" in only(complaints("keras 2.15.0", without=["keras"]))
    assert "gin-config<0.6,>=0.5.0" in only(complaints("gin-config 0.6.1", without=["gin-config"]))
    assert "jax>=0.10.2, and 0.4.30" in complaints("jax 0.4.30", "jaxlib 0.4.30")[0]
    assert "without jaxlib" in only(complaints("jax 0.10.2"))
    assert "fail" in only(complaints("keras-nightly 3.13.0"))
    assert "tensorflow-addons" in only(complaints("tensorflow-addons 0.23.0"))
    hidden = only(complaints("numpy 1.26.4"))
    assert "2.3.0 in /site5 hides 1.26.4 in /site11" in hidden


def test_requirements_of_tensorflow_itself_are_held_against_what_is_installed():
    unmet = ["numpy<2.0", "protobuf>=6; python_version < '3'", "pandas; extra == 'more'", "keras>=3.10"]
    said = only(complaints(**{"tensorflow-cpu": unmet}))
    assert "tensorflow-cpu 2.21.0 requires numpy<2.0, and 2.3.0 is installed" in said


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
    found = only(variables.variables(Context(environ={name: value, "KERAS_HOME": str(tmp_path)})))
    assert found.status == status
    assert status == "ok" or name in found.seen


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        ('{"floatx": "float32", "backend": "jax"}', "ok", ""),
        ('{"floatx": "float16"}', "warn", "float16"),
        ('{"image_data_format": "channels_first"}', "warn", "channels_first"),
        ("{", "fail", "delete"),
        ("[]", "fail", "delete"),
    ],
)
def test_settings_that_keras_reads_at_its_import(content, status, said, tmp_path):
    (tmp_path / "keras.json").write_text(content)
    found = only(variables.variables(Context(environ={"KERAS_HOME": str(tmp_path)})))
    assert found.status == status
    assert said in f"{found.seen} {found.fix}"


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_proxy_between_workers_fails_unless_no_proxy_names_them(name, tmp_path):
    def found(*hosts, **more):
        workers = json.dumps([f"{host}:1" for host in hosts])
        config = f'{{"cluster": {{"worker": {workers}}}, "task": {{"type": "worker", "index": 0}}}}'
        environ = {"KERAS_HOME": str(tmp_path), name: "http://proxy:3128", "TF_CONFIG": config, **more}
        return only(variables.variables(Context(environ=environ)))

    hidden = found("a.lan", "b.lan")
    assert (hidden.status, hidden.exit_code) == ("fail", 64)
    assert hidden.fix == "export no_proxy=a.lan,b.lan"
    assert found("a.lan", "b.lan", no_proxy="x, .lan").status == "ok"
    assert found("a.lan", "b.lan", no_proxy="a.lan").status == "fail"
    assert found("10.1.2.3", "10.1.2.4", no_proxy="10.0.0.0/8").status == "ok"
    assert found("10.1.2.3", "11.1.2.4", no_proxy="10.0.0.0/8").status == "fail"
    assert found("a.lan", "b.lan", TF_CONFIG="").status == "ok"  # no peers, nothing to find


# ------------------------------------------------------------------------------------------------- processor and limits


def system(root, **files):
    """A folder with files of /proc and /sys; __ in a name stands for /."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Context(environ={}, root=root)


def test_the_quota_of_a_container_is_read_from_both_versions_of_control_groups(tmp_path):
    second = system(tmp_path / "2", proc__self__cgroup="0::/pod/app\n", sys__fs__cgroup__pod__app__x="")
    (second.root / "sys/fs/cgroup/pod/app/cpu.max").write_text("max 100000")
    assert processor.cpu_quota(second) is None
    (second.root / "sys/fs/cgroup/pod/cpu.max").write_text("150000 100000")
    assert processor.cpu_quota(second) == 1.5
    own_root = system(tmp_path / "root", proc__self__cgroup="0::/somewhere/above\n", sys__fs__cgroup__x="")
    (own_root.root / "sys/fs/cgroup/cpu.max").write_text("50000 100000")
    assert processor.cpu_quota(own_root) == 0.5
    first = system(tmp_path / "1", proc__self__cgroup="4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n")
    folder = first.root / "sys/fs/cgroup/cpu/docker/abc"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("-1")
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert processor.cpu_quota(first) is None
    (folder / "cpu.cfs_quota_us").write_text("250000")
    assert processor.cpu_quota(first) == 2.5


def test_more_threads_than_the_quota_allows_are_warned_of(tmp_path):
    context = system(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__x="")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 1000000")
    found = only(processor.cores(context))
    assert found.status == "warn"
    assert "TF_NUM_INTRAOP_THREADS=1" in found.fix
    many = str(len(os.sched_getaffinity(0)) + 1)
    found = only(processor.cores(Context(environ={"OMP_NUM_THREADS": many}, root=tmp_path)))
    assert f"OMP_NUM_THREADS={many} is more than there are" in found.seen


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        ("fpu avx avx2 avx512_bf16", "ok", "mixed_bfloat16 may be faster"),
        ("fpu avx amx_bf16 avx512f", "ok", "amx_bf16"),
        ("fpu avx avx2", "ok", "float32 is the policy"),
        ("fpu sse4_2", "fail", "AVX"),
    ],
)
def test_the_policy_for_a_cpu_follows_from_its_instructions(flags, status, said, tmp_path, monkeypatch):
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    context = system(tmp_path, proc__cpuinfo=f"processor : 0\nmodel name : Some CPU\nflags\t\t: {flags}\n")
    found = only(processor.processor(context))
    assert found.status == status
    assert said in found.seen
    assert "Some CPU" in found.seen


def test_memory_is_what_the_container_leaves_without_files_that_can_be_dropped(tmp_path):
    gib, meminfo = 2**30, "MemTotal: 33554432 kB\nMemAvailable: 25165824 kB\n"
    context = system(tmp_path, proc__meminfo=meminfo, proc__self__cgroup="0::/app\n", sys__fs__cgroup__app__x="")
    assert only(limits.memory(context)).status == "ok"
    group = tmp_path / "sys/fs/cgroup/app"
    (group / "memory.max").write_text(str(4 * gib))
    (group / "memory.current").write_text(str(3 * gib))
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {2 * gib}\n")
    found = only(limits.memory(context))
    assert found.status == "ok"
    assert "limit is 4.0 GiB, 3.0 of it free" in found.seen
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {gib // 2}\n")
    assert only(limits.memory(context)).status == "warn"
    (group / "memory.stat").write_text("anon 1\ninactive_file 0\n")
    (group / "memory.current").write_text(str(4 * gib - 1))
    assert only(limits.memory(context)).status == "fail"


def test_few_open_files_are_warned_of_with_the_command_that_raises_them():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, before[1]))
        found = next(limits.open_files(Context(environ={})))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found.status == "warn"
    assert "1,000" in found.seen
    assert "ulimit" in found.fix or "nofile" in found.fix


def test_a_limit_on_the_size_of_files_is_found():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 2**20, before[1]))
        found = list(limits.open_files(Context(environ={})))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "64 MiB (ulimit -f)" in found[-1].seen


@pytest.fixture
def mounted(tmp_path):
    """mounted(folder, options): mounts a small file system; skips where this user may not."""
    folders = []

    def mount(folder, options):
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.call(command, stderr=subprocess.DEVNULL) != 0:
            pytest.skip("file systems can only be mounted by root")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_shared_memory_of_a_container_is_too_small_for_nccl_between_gpus_only(mounted, tmp_path):
    mounted(tmp_path / "dev/shm", "size=64m")
    assert only(limits.shared_memory(Context(environ={}, root=tmp_path))).status == "ok"
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    found = only(limits.shared_memory(Context(environ={}, root=tmp_path)))
    assert found.status == "warn"
    assert "between 2 GPUs" in found.seen
    assert "--shm-size" in found.fix
    assert only(limits.shared_memory(Context(environ={}, root=tmp_path / "empty"))).status == "warn"


# ------------------------------------------------------------------------------------------------------------ model_dir


def check_dir(path):
    return only(disk.model_dir(Context(environ={}, model_dir=str(path))))


def test_a_folder_that_can_be_written_is_measured_and_left_as_it_was(tmp_path):
    found = check_dir(tmp_path / "a" / "run")
    assert found.status in ("ok", "warn")  # a slow disk, or a full one, is no failure
    assert "MB/s" in found.seen
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_fails(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", "/proc/nowhere/run"):
        found = check_dir(path)
        assert (found.status, found.exit_code) == ("fail", 64)
        assert "choose another --model_dir" in found.fix


def test_rights_of_a_folder_fail_for_whoever_they_concern(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("rights do not stop root")
    (tmp_path / "locked").mkdir(mode=0o500)
    assert check_dir(tmp_path / "locked" / "run").exit_code == 64


def test_a_file_system_that_is_read_only_fails_also_for_root(mounted, tmp_path):
    folder = mounted(tmp_path / "disk", "ro,size=1m")
    found = check_dir(folder / "run")
    assert (found.status, found.exit_code) == ("fail", 64)
    assert "run" in found.seen


def test_a_full_disk_may_have_room_later(mounted, tmp_path):
    folder = mounted(tmp_path / "disk", "size=1m")
    found = check_dir(folder)
    assert (found.status, found.exit_code) == ("fail", 75)
    assert "No space left" in found.seen
    assert "make room" in found.fix
    assert list(folder.iterdir()) == []


# -------------------------------------------------------------------------------------------------------------- driver


@pytest.fixture
def nvidia_smi(tmp_path):
    """nvidia_smi(output, code=0): stands for the program of machines with GPUs; returns the doctor's findings."""

    def answers(output, code=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
        program.chmod(0o755)
        return list(driver.driver(Context(environ={"PATH": f"{tmp_path}:/usr/bin:/bin"}, root=tmp_path)))

    return answers


def test_the_driver_and_the_memory_that_others_hold(nvidia_smi):
    fine = nvidia_smi("0, NVIDIA H200, 570.124.06, 4, 143771\n1, NVIDIA H200, 570.124.06, 4, 143771")
    assert [(one.status, one.seen) for one in fine] == [("ok", "NVIDIA 570.124.06 with 2 GPUs")]
    held = nvidia_smi("0, Tesla V100, 525.60.13, 4, 16384\n1, Tesla V100, 525.60.13, 9000, 16384")
    assert statuses(held) == ["ok", "warn"]
    assert "GPU 1 (Tesla V100): 9,000 of 16,384 MiB" in held[1].seen
    assert statuses(nvidia_smi("0, Tesla V100, 470.82.01, 4, 16384")) == ["fail"]
    assert statuses(nvidia_smi("0, NVIDIA A100, 570.124.06, [N/A], [N/A]")) == ["ok"]


def test_a_driver_that_does_not_work_fails_in_its_own_words(nvidia_smi):
    (found,) = nvidia_smi("Failed to initialize NVML: Driver/library version mismatch", code=18)
    assert found.status == "fail"
    assert "Driver/library version mismatch" in found.seen
    assert statuses(nvidia_smi("")) == ["fail"]


def test_without_a_gpu_there_is_no_driver_to_look_at(tmp_path):
    with pytest.raises(Skip):
        next(driver.driver(Context(environ={"PATH": str(tmp_path)}, root=tmp_path)))
