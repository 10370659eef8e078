"""What the doctor has TensorFlow say, in processes of its own that may crash, hang or find nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os

import psutil
import pytest
from places import ROOT

from launcher.doctor import child, collective, tensorflow_checks
from launcher.doctor import packages as packages_lib
from launcher.doctor.check import Context
from launcher.doctor.child import Answer, ChildResult
from launcher.machine import accelerators

TENSORFLOW = "tensorflow,devices,gpus,recipe,data"


def read(done):
    report = json.loads(done.stdout)
    lines = {}
    for one in report["findings"]:
        lines.setdefault(one["check"], []).append(one)
    return lines, {one["check"]: one["why"] for one in report["not_checked"]}


def doctor(*checks):
    return ["--mode=doctor", "--json", f"--doctor_checks={','.join(checks)}"]


# --------------------------------------------------------------------------------------------------- as a user meets it


@pytest.mark.heavy
def test_a_machine_whose_data_set_is_not_prepared(run_launcher, tmp_path):
    done = run_launcher(
        *doctor(TENSORFLOW, "model_dir", "collective"),
        "--gin_file=resnet_fashion.gin",
        f"--data_dir={tmp_path}/empty",
        f"--model_dir=file://{tmp_path}/run",
        fresh=True,
    )
    lines, skipped = read(done)
    assert done.returncode == 64, done.stdout
    (data,) = lines.pop("data")
    assert data["status"] == "fail"
    assert "launcher.data.prepare fashion_mnist" in data["seen"]
    assert {one["status"] for found in lines.values() for one in found} == {"ok"}, lines
    assert set(lines) | set(skipped) == {*TENSORFLOW.split(","), "model_dir", "collective"} - {"data"}
    assert skipped == {"gpus": "no GPU"}
    assert importlib.metadata.version("keras") in lines["tensorflow"][0]["seen"]
    assert "2 replicas on cpu: sums are right" in lines["collective"][0]["seen"]
    assert "can be written" in lines["model_dir"][0]["seen"]
    assert not list(tmp_path.glob("**/.doctor-*"))


TRAPPED = """
import keras, launcher, numpy as np
keras.config.set_dtype_policy("mixed_bfloat16")

def build():
    body = [keras.layers.Masking(-9999.0, name="mask"), keras.layers.LSTM(4), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((6, 2)), *body])
    model.compile("sgd", "mse")
    return model

x = np.zeros((8, 6, 2), np.float32)
x[:, 4:] = -9999.0
launcher.fit(build, (x, x[:, :1, 0]), batch_size=8)
"""


@pytest.mark.heavy
def test_the_traps_of_a_programs_model_are_warnings_with_the_number_in_its_data(run_launcher, tmp_path):
    (tmp_path / "program.py").write_text(TRAPPED)
    done = run_launcher(*doctor("model"), "--gin_file=program.py")
    (line,) = read(done)[0].pop("model")
    assert done.returncode == 0 and line["status"] == "warn", done.stdout
    assert line["seen"].startswith("sequential/mask: ") and "0 of the 16 steps in a batch" in line["seen"]
    assert line["fix"] == "give the layer dtype='float32'"


@pytest.mark.heavy
def test_two_doctors_side_by_side_reduce_over_both(run_workers):
    checks = doctor("cluster", "peers", "agreement", "collective")
    for done in run_workers(2, *checks, "--doctor_wait=120"):
        lines, skipped = read(done)
        assert done.returncode == 0, done.stdout
        assert not skipped
        assert {name: [one["status"] for one in found] for name, found in lines.items()} == {
            "cluster": ["ok"],
            "peers": ["ok"],
            "agreement": ["ok"],
            "collective": [lines["collective"][0]["status"]],  # a slow machine may warn of its speed
        }
        assert "multi_worker, 2 replicas on cpu: sums are right" in lines["collective"][0]["seen"]


def test_a_machine_without_tensorflow(run_launcher, tmp_path):
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'tensorflow':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    done = run_launcher(*doctor("python", TENSORFLOW), env={"PYTHONPATH": f"{tmp_path / 'shim'}:{ROOT}"}, timeout=120)
    lines, skipped = read(done)
    assert done.returncode == 64, done.stderr
    assert "Traceback" not in done.stderr
    (found,) = lines["tensorflow"]
    assert "No module named 'tensorflow'" in found["seen"]
    assert "[cpu]" in found["fix"]
    assert set(lines) == {"python", "tensorflow"}
    assert skipped["devices"] == "TensorFlow did not get so far"


# ------------------------------------------------------------------------------------------------ processes, answers


def test_a_process_that_does_not_end_is_ended():
    outcome = child.run("tensorflow_child", {"gin_file": []}, environ=os.environ, timeout_seconds=0.3)
    assert outcome.returncode is None
    assert "was stopped" in outcome.how
    names = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline", "ppid"])]
    assert not [
        name for name, one in zip(names, psutil.Process().children(), strict=False) if "tensorflow_child" in name
    ]


def context(outcome, tmp_path, **environ):
    made = Context(environ=environ, root=tmp_path)
    made.__dict__["tensorflow"] = outcome  # as if it had been asked
    return made


def outcome(*answers, log="", returncode=0, seconds=1.0):
    return ChildResult(answers={one.topic: one for one in answers}, log=log, returncode=returncode, seconds=seconds)


def test_a_crash_after_the_import_is_told_from_one_within_it(tmp_path):
    imported = {"tensorflow": "2.21.0", "keras": "3.12.0", "tf_keras": "3.12.0", "seconds": 5.0}
    answer = Answer(topic="import", values={**imported, "resident_bytes": 2**29, "file": "/site/tensorflow/init.py"})
    after = list(tensorflow_checks.tensorflow(context(outcome(answer, CPU, returncode=-11, log="driver"), tmp_path)))
    assert [(one.status, one.exit_code) for one in after] == [("ok", 0), ("fail", 70)]
    assert "after 'build' its process ended with signal SIGSEGV\n  | driver" in after[1].seen
    (within,) = tensorflow_checks.tensorflow(context(outcome(returncode=-4), tmp_path))
    assert (within.status, within.exit_code) == ("fail", 64)
    assert "SIGILL" in within.seen
    legacy = Answer(topic="import", values={**answer.values, "tf_keras": "2.20.1"})
    (old,) = tensorflow_checks.tensorflow(context(outcome(legacy), tmp_path))
    assert "tf.keras is 2.20.1" in old.seen
    assert old.fix == "unset TF_USE_LEGACY_KERAS"


def devices(*gpus, tpus=(), chips=()):
    listed = [{"model": model, "compute_capability": capability} for model, capability in gpus]
    return Answer(topic="devices", values={"gpus": listed, "tpus": list(tpus), "tpu_chips": list(chips)})


# As tf.sysconfig.get_build_info() has it in the wheels of 2.18.1.
CUDA = Answer(
    topic="build",
    values={
        "is_cuda_build": True,
        "cuda_version": "12.5.1",
        "cudnn_version": "9",
        "cuda_compute_capabilities": "['sm_60', 'sm_70', 'sm_80', 'sm_89', 'compute_90']",
    },
)
IMPORT = Answer(topic="import", values={"tensorflow": "2.18.1"})
CPU = Answer(topic="build", values={"is_cuda_build": False})


@pytest.mark.parametrize(
    ("capability", "policy"),
    [
        ([6, 1], "float32: mixed_float16 pays from 7.0"),
        ([7, 0], "mixed_float16"),
        ([7, 5], "mixed_float16"),
        ([8, 0], "mixed_float16 or mixed_bfloat16; float32 as TF32"),
        ([8, 9], "mixed_float16 or mixed_bfloat16; float32 as TF32"),
        ([9, 0], "mixed_float16 or mixed_bfloat16; float32 as TF32"),
        (None, "float32"),
    ],
)
def test_the_policy_for_a_gpu_follows_from_its_compute_capability(capability, policy, tmp_path):
    (found,) = tensorflow_checks.devices(context(outcome(CUDA, devices(("Some GPU", capability))), tmp_path))
    assert found.status == "ok"
    assert found.seen.endswith(f"use it; {policy}")


@pytest.fixture
def nvidia_smi(tmp_path):
    """nvidia_smi(lines): a PATH with a stand-in that lists such GPUs, of a driver that knows `compute_cap`, or not."""

    def make(*lines, knows_capability=True):
        unknown = (
            ""
            if knows_capability
            else """case "$*" in *compute_cap*)
          echo 'Field "compute_cap" is not a valid field to query.'; exit 2;; esac"""
        )
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n" + unknown + "\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
        program.chmod(0o755)
        return f"{program.parent}:/usr/bin:/bin"

    return make


@pytest.fixture
def cudnn(monkeypatch):
    """cudnn(version): has nvidia-cudnn-cu12 of this version installed; None for none."""

    def install(version):
        packages = {} if version is None else {"nvidia-cudnn-cu12": version}
        monkeypatch.setattr(packages_lib, "installed", lambda: packages)

    return install


@pytest.mark.parametrize(
    ("capability", "driver", "package", "status", "says", "fix"),
    [
        ([9, 0], "550.54.15", "9.3.0.75", "ok", "GPU:0 Card, compute capability 9.0, driver 550.54.15: "
         "TensorFlow 2.18.1 (CUDA 12.5.1, cuDNN 9.3.0.75) can use it; ", ""),
        ([7, 5], "525.60.13", None, "ok", "cuDNN 9) can use it", ""),
        # Blackwell: none of TensorFlow's own wheels has kernels for it.
        ([12, 0], "575.51.03", None, "warn", "half an hour or longer", "docker/nvidia.Dockerfile"),
        ([10, 0], "575.51.03", None, "warn", "CUDA_ERROR_INVALID_PTX", "no wheel of TensorFlow from 2.16 on"),
        # Maxwell: 2.16 was the last with kernels for it.
        ([5, 2], "550.54.15", None, "fail", "cannot use it: it is built for sm_60", "'tensorflow[and-cuda]==2.16.*'"),
        ([3, 7], "550.54.15", None, "fail", "cannot use it", "another GPU or the CPU"),
        ([9, 0], "470.82.01", None, "fail", "too old for CUDA 12.5.1", "525.60.13"),
        ([9, 0], "550.54.15", "8.9.7.29", "fail", "built for cuDNN 9.3", "[cuda]"),
        ([9, 0], "550.54.15", "9.1.0.70", "fail", "built for cuDNN 9.3", "[cuda]"),
        ([9, 0], "550.54.15", "9.10.2.21", "ok", "can use it", ""),
        (None, "550.54.15", None, "ok", "compute capability not known", ""),
    ],
)  # fmt: skip
def test_one_line_says_whether_this_tensorflow_can_use_this_gpu(
    nvidia_smi, cudnn, tmp_path, capability, driver, package, status, says, fix
):
    cudnn(package)
    path = nvidia_smi(f"0, Card, {driver}, 4, 81559, 9.0, GPU-1")
    seen = outcome(IMPORT, CUDA, devices(("Card", capability)))
    (found,) = tensorflow_checks.devices(context(seen, tmp_path, PATH=path))
    assert found.status == status, found
    assert says in found.seen and fix in found.fix


@pytest.mark.parametrize("knows_capability", [True, False])
def test_a_gpu_beside_a_tensorflow_for_cpus_is_told_of_with_what_to_install(nvidia_smi, tmp_path, knows_capability):
    row = "NVIDIA H100, 550.54.15, 4, 81559" + (", 9.0" if knows_capability else "") + ", GPU-1"
    path = nvidia_smi(f"0, {row}", f"1, {row}", knows_capability=knows_capability)
    (found,) = tensorflow_checks.devices(context(outcome(IMPORT, CPU, devices()), tmp_path, PATH=path))
    capability = "9.0" if knows_capability else "not known"
    assert found.seen == (
        f"2 NVIDIA GPU(s); NVIDIA H100, compute capability {capability}, driver 550.54.15; "
        "this TensorFlow 2.18.1 is built for CPUs only"
    )
    assert found.status == "warn"
    assert found.fix.startswith("pip uninstall -y tensorflow-cpu, then ") and "[cuda]" in found.fix


def test_what_no_wheel_can_use_is_not_advised_to_install_wheels(nvidia_smi, tmp_path):
    path = nvidia_smi("0, NVIDIA GeForce RTX 5090, 575.51.03, 4, 32607, 12.0, GPU-1")
    (found,) = tensorflow_checks.devices(context(outcome(IMPORT, CPU, devices()), tmp_path, PATH=path))
    assert found.fix.startswith("no wheel of TensorFlow") and "docker/nvidia.Dockerfile" in found.fix


def test_a_driver_that_is_too_old_is_why_tensorflow_lists_no_gpu(nvidia_smi, tmp_path):
    path = nvidia_smi("0, Tesla V100, 470.82.01, 4, 16384, 7.0, GPU-1")
    (found,) = tensorflow_checks.devices(context(outcome(IMPORT, CUDA, devices()), tmp_path, PATH=path))
    assert found.status == "fail" and found.fix == "install a driver from 525.60.13 on"


@pytest.mark.parametrize(
    ("kernels", "capability", "how"),
    [
        # CUDA C++ Programming Guide: within a major version upwards, and PTX for whatever comes later.
        (["sm_80"], (8, 6), accelerators.KERNELS),
        (["sm_86"], (8, 0), None),
        (["sm_80", "compute_90"], (9, 0), accelerators.KERNELS),
        (["sm_80", "compute_90"], (8, 9), accelerators.KERNELS),
        (["sm_80", "compute_90"], (7, 5), None),
        (["sm_80", "compute_90"], (12, 0), accelerators.PTX),
        (["sm_90", "compute_120"], (10, 0), None),
        (["sm_100", "sm_120"], (12, 0), accelerators.KERNELS),
    ],
)
def test_how_a_build_runs_on_a_gpu(kernels, capability, how):
    assert accelerators.how_it_runs(kernels, capability) == how


def test_the_page_on_installing_shows_the_table_of_wheels():
    page = (ROOT / "docs/install.md").read_text()
    rows: dict[tuple[str, ...], list[str]] = {}
    for version, wheels in accelerators.CUDA_WHEELS.items():
        *_, newest = kernels = [f"{name[:-1].rpartition('_')[2]}.{name[-1]}" for name in wheels.kernels]
        assert [name.startswith("compute") for name in wheels.kernels] == [one == newest for one in kernels]
        driver = accelerators.OLDEST_DRIVERS[int(wheels.cuda.partition(".")[0])]
        rows.setdefault((wheels.cuda, wheels.cudnn, driver, f"{', '.join(kernels)} and PTX"), []).append(version)
    for cells, versions in rows.items():
        assert f"\n| {', '.join(versions)} | {' | '.join(cells)} |\n" in page


def test_gpus_that_tensorflow_does_not_see_are_told_apart_by_what_hides_them(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    log = "Could not load dynamic library 'libcudnn.so.9'; dlerror: no such file"

    def found(build, **environ):
        (one,) = tensorflow_checks.devices(context(outcome(build, devices(), log=log), tmp_path, **environ))
        return one

    assert "built for CPUs only" in found(CPU).seen
    assert "hidden by CUDA_VISIBLE_DEVICES='-1'" in found(CUDA, CUDA_VISIBLE_DEVICES="-1").seen
    broken = found(CUDA)
    assert broken.status == "fail"
    assert "libcudnn.so.9 missing" in broken.seen
    assert "[cuda]" in broken.fix
    (tmp_path / "dev" / "nvidia0").unlink()
    assert found(CPU).status == "ok"


def test_a_collective_that_stands_still_says_how_far_it_got_and_may_be_tried_again():
    built = Answer(topic="build", values={"kind": "multi_worker", "accelerator": "cpu", "replicas": 4})
    small = Answer(topic="small", values={"bytes": 4096, "seconds": 0.001})
    stuck = collective.collective_finding(
        outcome(built, small, returncode=None, seconds=120, log="last words"), workers=4
    )
    assert (stuck.status, stuck.exit_code) == ("fail", 75)
    for part in ("with 4 replicas", "did not end within 120 s", "last words", "4 KiB in 1 ms"):
        assert part in stuck.seen
    never = collective.collective_finding(outcome(returncode=-9), workers=4)
    assert "before the strategy was made, the test ended with signal SIGKILL" in never.seen


def test_the_bandwidth_is_counted_as_nccl_tests_do_and_warned_of_below_gigabit_ethernet():
    built = Answer(topic="build", values={"kind": "multi_worker", "accelerator": "cpu", "replicas": 4})

    def found(seconds, workers=4):
        sizes = [
            Answer(topic=name, values={"bytes": size, "seconds": seconds * size / 2**25})
            for name, size in (("small", 4096), ("medium", 2**20), ("large", 2**25))
        ]
        return collective.collective_finding(outcome(built, *sizes), workers=workers)

    # 32 MiB in 33.554432 ms are 1 GB/s; in a ring of four each replica sends 2 x 3/4 of it.
    assert "1.5 GB/s a replica" in found(0.033554432).seen
    assert found(0.033554432).status == "ok"
    assert found(0.4).status == "ok"
    slow = found(0.5)
    assert slow.status == "warn"
    assert "NCCL_SOCKET_IFNAME" in slow.fix
    wrong = collective.collective_finding(
        outcome(built, Answer(topic="small", error="RuntimeError: the sum over 4 replicas is wrong")), workers=4
    )
    assert (wrong.status, wrong.exit_code) == ("fail", 75)
