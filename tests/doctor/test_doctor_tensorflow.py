"""What the doctor has TensorFlow say, in processes of its own that may crash, hang or find nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os

import psutil
import pytest
from places import ROOT

from launcher.doctor import child, collective, tensorflow_checks
from launcher.doctor.check import Context
from launcher.doctor.child import Answer, ChildResult

TENSORFLOW = "tensorflow,build,devices,gpus,xla,recipe,data,strategy"


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
    assert "'auto' is float32" in lines["strategy"][0]["seen"]
    assert "2 replicas on cpu: sums are right" in lines["collective"][0]["seen"]
    assert "MB/s" in lines["model_dir"][0]["seen"]
    assert not list(tmp_path.glob("**/.doctor-*"))


@pytest.mark.heavy
def test_a_tensorflow_that_crashes_takes_no_doctor_with_it(run_launcher):
    done = run_launcher(
        *doctor(TENSORFLOW), "--gin_file=resnet_cpu.gin", env={"XLA_FLAGS": "--xla_no_such_flag_as_this=1"}
    )
    lines, skipped = read(done)
    assert done.returncode == 64, done.stdout
    assert [one["status"] for one in lines["tensorflow"]] == ["ok", "fail"]
    assert "in XLA_FLAGS: --xla_no_such_flag_as_this=1" in lines["tensorflow"][1]["seen"]
    assert lines["tensorflow"][1]["fix"].startswith("unset XLA_FLAGS")
    assert "xla" in skipped
    assert lines["recipe"][0]["status"] == lines["data"][0]["status"] == "ok"
    assert "1,437 training examples" in lines["data"][0]["seen"]


@pytest.mark.heavy
def test_two_doctors_side_by_side_reduce_over_both(run_workers):
    checks = doctor("cluster", "peers", "clock", "agreement", "collective")
    for done in run_workers(2, *checks, "--doctor_wait=120"):
        lines, skipped = read(done)
        assert done.returncode == 0, done.stdout
        assert not skipped
        assert {name: [one["status"] for one in found] for name, found in lines.items()} == {
            "cluster": ["ok"],
            "peers": ["ok"],
            "clock": ["ok"],
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
    outcome = child.run("tensorflow_child", {"gin_files": []}, environ=os.environ, timeout_seconds=0.3)
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
    assert "after 'build' its process was ended by SIGSEGV\n| driver" in after[1].seen
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


CUDA = Answer(topic="build", values={"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"})
CPU = Answer(topic="build", values={"is_cuda_build": False})


@pytest.mark.parametrize(
    ("capability", "policy"),
    [
        ([6, 1], "6.1: float32: mixed_float16 pays from 7.0"),
        ([7, 0], "7.0: mixed_float16"),
        ([7, 5], "7.5: mixed_float16"),
        ([8, 0], "8.0: mixed_float16 or mixed_bfloat16; float32 as TF32"),
        ([10, 0], "10.0: mixed_float16 or mixed_bfloat16; float32 as TF32"),
        (None, "not known: float32"),
    ],
)
def test_the_policy_for_a_gpu_follows_from_its_compute_capability(capability, policy, tmp_path):
    made = context(outcome(CUDA, devices(("Some GPU", capability))), tmp_path)
    (found,) = tensorflow_checks.devices(made)
    assert found.status == "ok"
    assert found.seen.endswith(policy)


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
    assert "before the strategy was made, the test was ended by SIGKILL" in never.seen


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
