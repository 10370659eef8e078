"""The checks of the machine: real limits and disks, files of other machines' systems."""

from __future__ import annotations

import os
import resource
import subprocess

import psutil
import pytest

from launcher.doctor import host, nvidia
from launcher.doctor.check import Context, Skip
from launcher.modes import DoctorRequest


def only(findings):
    (found,) = findings
    return found


def statuses(findings):
    return [one.status for one in findings]


# ------------------------------------------------------------------------------------------------- processor and limits


def system(root, **files):
    """A folder with files of /proc and /sys; __ in a name stands for /."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Context(environ={}, root=root)


def test_the_quota_of_a_container_is_that_of_its_control_group_or_of_one_above(tmp_path):
    second = system(tmp_path / "2", proc__self__cgroup="0::/pod/app\n", sys__fs__cgroup__pod__app__x="")
    (second.root / "sys/fs/cgroup/pod/app/cpu.max").write_text("max 100000")
    assert host.cpu_quota(second) is None
    (second.root / "sys/fs/cgroup/pod/cpu.max").write_text("150000 100000")
    assert host.cpu_quota(second) == 1.5
    own_root = system(tmp_path / "root", proc__self__cgroup="0::/somewhere/above\n", sys__fs__cgroup__x="")
    (own_root.root / "sys/fs/cgroup/cpu.max").write_text("50000 100000")
    assert host.cpu_quota(own_root) == 0.5


def test_more_threads_than_the_quota_allows_are_warned_of(tmp_path):
    context = system(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__x="")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 1000000")
    found = only(host.cores(context))
    assert found.status == "warn"
    assert "TF_NUM_INTRAOP_THREADS=1" in found.fix
    many = str(len(os.sched_getaffinity(0)) + 1)
    found = only(host.cores(Context(environ={"OMP_NUM_THREADS": many}, root=tmp_path)))
    assert f"OMP_NUM_THREADS={many} is more than there are" in found.seen


def test_memory_is_what_the_container_leaves_without_files_that_can_be_dropped(tmp_path, monkeypatch):
    gib = 2**30
    monkeypatch.setattr(psutil, "virtual_memory", lambda: (32 * gib, 24 * gib))
    context = system(tmp_path, proc__self__cgroup="0::/app\n", sys__fs__cgroup__app__x="")
    assert only(host.memory(context)).status == "ok"
    group = tmp_path / "sys/fs/cgroup/app"
    (group / "memory.max").write_text(str(4 * gib))
    (group / "memory.current").write_text(str(3 * gib))
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {2 * gib}\n")
    found = only(host.memory(context))
    assert found.status == "ok"
    assert "limit is 4.0 GiB, 3.0 of it free" in found.seen
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {gib // 2}\n")
    assert only(host.memory(context)).status == "warn"
    (group / "memory.stat").write_text("anon 1\ninactive_file 0\n")
    (group / "memory.current").write_text(str(4 * gib - 1))
    assert only(host.memory(context)).status == "fail"


def test_few_open_files_are_warned_of_with_the_command_that_raises_them():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, before[1]))
        found = next(host.open_files(Context(environ={})))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found.status == "warn"
    assert "1,000" in found.seen
    assert "ulimit" in found.fix or "nofile" in found.fix


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
    for place in folders:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_shared_memory_of_a_container_is_too_small_for_nccl_between_gpus_only(mounted, tmp_path):
    mounted(tmp_path / "dev/shm", "size=64m")
    assert only(host.shared_memory(Context(environ={}, root=tmp_path))).status == "ok"
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    found = only(host.shared_memory(Context(environ={}, root=tmp_path)))
    assert found.status == "warn"
    assert "between 2 GPUs" in found.seen
    assert "--shm-size" in found.fix
    assert only(host.shared_memory(Context(environ={}, root=tmp_path / "empty"))).status == "warn"


# ------------------------------------------------------------------------------------------------------------ model_dir


def check_dir(path):
    return only(host.model_dir(Context(environ={}, request=DoctorRequest(model_dir=str(path)))))


def test_a_folder_that_can_be_written_has_its_room_told_and_is_left_as_it_was(tmp_path):
    found = check_dir(tmp_path / "a" / "run")
    assert "GB free in" in found.seen and str(tmp_path) in found.seen
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
    disk = mounted(tmp_path / "disk", "ro,size=1m")
    found = check_dir(disk / "run")
    assert (found.status, found.exit_code) == ("fail", 64)
    assert "run" in found.seen


def test_a_full_disk_may_have_room_later(mounted, tmp_path):
    found = check_dir(mounted(tmp_path / "disk", "size=1m"))
    assert (found.status, found.exit_code) == ("fail", 75)
    assert "0.0 GB free" in found.seen
    assert "make room" in found.fix


# -------------------------------------------------------------------------------------------------------------- driver

GPU = "0, NVIDIA H200, 570.124.06, 4, 143771, 9.0, GPU-8932f937"
FINE = "0, 0, No, No, Not Active"


@pytest.fixture
def nvidia_smi(tmp_path):
    """nvidia_smi(output, code=0, faults="", log=""): stands for a driver, and the kernel's log.

    Returns the doctor's findings.
    """

    def answers(output, code=0, faults="", log=""):
        of_ecc = f"case \"$*\" in *ecc*) echo '{faults}'; exit 0;; esac\n" if faults else ""
        written = {"nvidia-smi": f"{of_ecc}cat <<'END'\n{output}\nEND\nexit {code}\n", "dmesg": f"echo '{log}'\n"}
        for name, script in written.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}")
            (tmp_path / name).chmod(0o755)
        return list(host.driver(Context(environ={"PATH": f"{tmp_path}:/usr/bin:/bin"}, root=tmp_path)))

    return answers


def test_the_driver_and_the_memory_that_others_hold(nvidia_smi):
    fine = nvidia_smi(f"{GPU}\n{GPU.replace('0', '1', 1)}", faults=FINE)
    assert [(one.status, one.seen) for one in fine] == [("ok", "NVIDIA 570.124.06 with 2 GPUs")]
    held = nvidia_smi(
        "0, Tesla V100, 525.60.13, 4, 16384, 7.0, GPU-1\n1, Tesla V100, 525.60.13, 9000, 16384, 7.0, GPU-2",
        faults=FINE,
    )
    assert statuses(held) == ["ok", "warn"]
    assert "GPU 1 (Tesla V100): 9,000 of 16,384 MiB" in held[1].seen
    assert statuses(nvidia_smi("0, Tesla V100, 470.82.01, 4, 16384, 7.0, GPU-1", faults=FINE)) == ["fail"]
    assert statuses(nvidia_smi("0, NVIDIA A100, 570.124.06, [N/A], [N/A], 8.0, GPU-1", faults=FINE)) == ["ok"]


@pytest.mark.parametrize(
    ("counted", "status", "says"),
    [
        ("0, 0, No, No, Not Active", [], ""),
        ("0, [N/A], [N/A], [N/A], [N/A]", [], ""),
        ("0, 3, No, No, Not Active", ["fail"], "GPU 0: ecc.errors.uncorrected.volatile.total 3"),
        ("0, 0, Yes, No, Not Active", ["fail"], "remapped_rows.pending Yes"),
        ("0, 0, No, No, Active", ["fail"], "hw_slowdown Active"),
        ("0, [Insufficient Permissions], No, No, Not Active", ["warn"], "not read of GPUs' faults: ecc.errors"),
        ("0, 0, No, No", ["warn"], "not read of GPUs' faults: 0, 0, No, No"),
        ("Unable to determine the device handle for GPU0: GPU is lost", ["warn"], "GPU is lost"),
        ("0, [GPU requires reset], No, No, Not Active", ["fail"], "requires reset"),
    ],
)
def test_memory_errors_that_the_driver_counts(nvidia_smi, counted, status, says):
    _, *found = nvidia_smi(GPU, faults=counted)
    assert statuses(found) == status
    assert all(says in one.seen for one in found)


def test_a_field_that_a_driver_refuses_leaves_the_others_to_be_read(tmp_path):
    """As drivers before 535 and after 590 answer, which know other names."""
    for known, values, seen in (
        ("ecc throttle", "0, 7, Active", "volatile.total 7, clocks_throttle_reasons.hw_slowdown Active"),
        ("remapped event", "0, Yes, No, Not Active", "remapped_rows.pending Yes"),
    ):
        refuse = f"""for field in $(echo "$1" | sed 's/.*=//; s/,/ /g'); do case "$field" in *_*|*.*)
          kind="${{field%%[._]*}}"; known=
          case "$field" in *event*) kind=event;; *throttle*) kind=throttle;; esac
          for one in {known}; do [ "$one" = "$kind" ] && known=1; done
          [ "$known" ] || {{ echo "Field \\"$field\\" is not a valid field to query."; exit 2; }};; esac; done"""
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{refuse}\necho '{values}'\n")
        program.chmod(0o755)
        (tmp_path / "dmesg").write_text("#!/bin/sh\n")
        (tmp_path / "dmesg").chmod(0o755)
        found = list(nvidia.faults(Context(environ={"PATH": f"{tmp_path}:/usr/bin:/bin"}, root=tmp_path)))
        assert statuses(found) == ["fail", "warn"] and seen in found[0].seen, found
        assert found[1].seen.startswith("not read of GPUs' faults: ") and found[1].seen.count(",") < 2


def test_a_gpu_that_the_driver_cannot_tell_of_is_told_and_a_name_may_hold_a_comma(nvidia_smi):
    lost, fine = nvidia_smi(
        f"{GPU.replace('H200', 'H200, 141 GB')}\nUnable to determine the device: GPU is lost", faults=FINE
    )
    assert (lost.status, fine.status) == ("fail", "ok")
    assert "it is not read: Unable to determine" in lost.seen and fine.seen == "NVIDIA 570.124.06 with 1 GPU"


@pytest.mark.parametrize(("number", "status"), [(31, "warn"), (79, "fail")])
def test_errors_of_the_driver_in_the_kernels_log(nvidia_smi, number, status):
    line = f"[ 12.3] NVRM: Xid (PCI:0000:3b:00): {number}, pid=7, GPU has a word to say"
    _, found = nvidia_smi(GPU, faults=FINE, log=f"usual\n{line}\nusual")
    assert (found.status, f": {number}, pid=7" in found.seen) == (status, True)


def test_a_driver_that_does_not_work_fails_in_its_own_words(nvidia_smi):
    (found,) = nvidia_smi("Failed to initialize NVML: Driver/library version mismatch", code=18)
    assert found.status == "fail"
    assert "Driver/library version mismatch" in found.seen
    assert statuses(nvidia_smi("")) == ["fail"]


def test_without_a_gpu_there_is_no_driver_to_look_at(tmp_path):
    with pytest.raises(Skip):
        next(host.driver(Context(environ={"PATH": str(tmp_path)}, root=tmp_path)))
