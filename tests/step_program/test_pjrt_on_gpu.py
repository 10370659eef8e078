"""`--engine=pjrt` with CUDA, played by CPU devices that have a GPU's two names; TensorFlow is the oracle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import played
import pytest
import text_run
from places import SMALL_DIGITS

pytestmark = pytest.mark.slow

PJRT = "--engine=pjrt"
FLOAT32 = "--gin_param=train.precision = 'float32'"


def flags(model_dir: Path, steps: int, *bindings: str, recipe: str = SMALL_DIGITS) -> list[str]:
    bound = [f"--gin_param={text}" for text in (f"train.steps = {steps}", *bindings)]
    return [f"--gin_file={recipe}", f"--model_dir={model_dir}", *bound]


def events(model_dir: Path) -> list[dict]:
    path = model_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_alike(ours: Path, theirs: Path) -> None:
    for mine, wanted in zip(events(ours), events(theirs), strict=True):
        assert (mine["split"], mine["step"]) == (wanted["split"], wanted["step"])
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def answers(run_launcher, given: list[str], written: Path, on: dict) -> Iterator[Path]:
    """Where a file is answered on the played machine, and then by TensorFlow."""
    for more in ({"env": on}, {}):
        engine, path = (PJRT,) if more else (), written.with_name(f"answers{written.suffix}")
        done = run_launcher(*given, "--mode=predict", f"--input={written}", f"--output={path}", *engine, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        yield path


@pytest.mark.parametrize(
    "is_compared", [False, pytest.param(True, marks=pytest.mark.nightly)]
)  # test_pjrt_engine.py is
def test_two_gpus_that_tensorflow_cannot_use_train_and_evaluate_as_it_does(run_launcher, tmp_path, is_compared):
    ours, theirs, on = tmp_path / "ours", tmp_path / "theirs", played.machine(2)
    given = (*flags(ours, 6, "train.microbatches = 2"), FLOAT32)
    done = run_launcher(*given, env=on)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "2 replicas" in done.stdout
        and " 2 GPU(s) " in done.stdout
        and ", and JAX can, as with --engine=pjrt" in done.stdout
    )
    assert "images as bytes" in done.stdout
    assert [one["step"] for one in events(ours)][-1] == 6
    if not is_compared:
        return
    done = run_launcher(*given, f"--model_dir={theirs}", "--replicas=2")
    assert done.returncode == 0 and "images as bytes" not in done.stdout, done.stdout + done.stderr
    assert_alike(ours, theirs)


def test_a_step_that_does_not_fit_the_share_of_a_gpu_is_refused_before_it_is_run(run_launcher, tmp_path):
    on = played.machine(1, PLAYED_GPU_BYTES=str(2**20))
    size = ("train.global_batch_size = 1024", "mlp.units = 1024", "gpu.memory_share = 0.5", "gpu.tf32 = False")
    done = run_launcher(*flags(tmp_path, 3, *size), FLOAT32, "--deterministic", env=on)
    assert done.returncode == 64 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"needs [\d.]+ MiB of each device's memory.*JAX has 1 MiB", done.stderr)
    assert "--strategy=one_device, or CUDA_VISIBLE_DEVICES=-1, trains on the CPU" in done.stderr
    assert "gpu.memory_share = 0.5" in done.stdout and not events(tmp_path)


@pytest.mark.nightly  # each half: tests/run/test_memory_trial.py, test_device_memory.py
def test_the_fewest_microbatches_that_fit_the_share_of_a_gpu_are_found_by_compiling(run_launcher, tmp_path):
    on = played.machine(1, PLAYED_GPU_BYTES="2000000")
    size = ("train.global_batch_size = 1024", "mlp.units = 256", "train.microbatches = 'auto'")
    done = run_launcher(*flags(tmp_path, 3, *size), FLOAT32, env=on)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 microbatches x 256, images as bytes (auto: 1, 2 did not fit)" in done.stdout


@pytest.mark.nightly  # training and evaluation: above
def test_a_gpu_answers_decodes_and_verifies_and_is_not_shared(run_launcher, run_workers, tmp_path):
    text_run.write_pairs(tmp_path)
    bindings = (*text_run.pair_bindings(tmp_path), "translation.beam_size = 2", "train.epochs = None")
    given = [*flags(tmp_path / "text", 3, *bindings, recipe="transformer_cpu.gin"), FLOAT32]
    done = run_launcher(*given, PJRT, env=played.machine(1))
    assert done.returncode == 0 and "runs in TensorFlow" not in done.stdout, done.stdout + done.stderr
    written = tmp_path / "records.txt"
    written.write_text("ab\ncd\n")
    first, second = (path.read_text() for path in answers(run_launcher, given, written, played.machine(1)))
    assert first == second
    few = ("verify.replicas = (2,)", "verify.workers = ()", "verify.microbatches = ()", "verify.steps = 3")
    done = run_launcher(*flags(tmp_path / "verify", 6, *few), "--mode=verify", PJRT, env=played.machine(2))
    assert done.returncode == 0 and "2 GPU(s)" in done.stdout, done.stdout + done.stderr
    given = [*flags(tmp_path / "workers", 4), PJRT]
    refused = run_workers(2, *given, env=played.machine(2))
    assert [one.returncode for one in refused] == [64, 64]
    assert "2 workers share this host" in refused[0].stderr


def test_another_accelerator_is_refused_in_one_message(run_launcher, tmp_path):
    done = run_launcher(*flags(tmp_path / "run", 3), PJRT, env={"JAX_PLATFORMS": "rocm"})
    assert done.returncode == 64 and "JAX_PLATFORMS=rocm" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.nightly  # of the kernels: tests/run/test_profile_of_jax.py
def test_the_doctor_examines_the_gpus_through_jax_and_a_trace_is_written(run_launcher, tmp_path):
    done = run_launcher("--mode=doctor", "--doctor_checks=gpus", env=played.machine(2))
    assert done.returncode == 0 and "2 x cpu, 16.0 GiB offered" in done.stdout, done.stdout
    done = run_launcher(*flags(tmp_path, 4), PJRT, "--profile_steps=2:3", env=played.machine(1))
    assert done.returncode == 0 and "a trace of steps 2 to 3" in done.stdout, done.stdout + done.stderr
    assert [*tmp_path.glob("tensorboard/plugins/profile/*/*.xplane.pb")]
