"""Only the chief has storage: the other workers get its values bit for bit, and its errors."""

from __future__ import annotations

import json
import signal

import from_chief_run
import pytest
from places import PYTHONPATH, SMALL_DIGITS

from launcher import main as entry
from launcher.checkpoints import CheckpointStore
from launcher.models.mlp import mlp

MORE_STEPS = 8
FLAGS = (
    f"--gin_file={SMALL_DIGITS}",
    "--restore_from_chief",
    "--gin_param=train.evaluate_every = 30",
    "--gin_param=train.checkpoint_every = 5",
    "--gin_param=train.log_every = 1",
    "--gin_param=train.steps_per_loop = 2",
    "--gin_param=train.global_batch_size = 32",
    "--gin_param=cosine.decay_steps = 100000",
)
NOWHERE = "/proc/launcher/run"  # where not even root can make a folder


@pytest.mark.heavy
def test_every_kind_of_array_arrives_bit_for_bit_in_chunks_of_any_size(run_workers, tmp_path):
    workers = run_workers(2, f"{tmp_path}/", module="from_chief_run", env={"PYTHONPATH": PYTHONPATH})
    assert [worker.returncode for worker in workers] == [0, 0], workers[0].stderr + workers[1].stderr
    expected = {"message": from_chief_run.MESSAGE, "arrays": from_chief_run.written(from_chief_run.arrays())}
    for index in range(2):
        answers = json.loads((tmp_path / f"{index}.json").read_text())
        assert answers == [expected] * len(from_chief_run.CHUNKS)


def start_two(start_launcher, free_ports, model_dir, *flags):
    """Two workers, of which only the chief has a model_dir."""
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    return [
        start_launcher(
            *FLAGS, *flags, f"--model_dir={place}",
            env={"TF_CONFIG": json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})},
        )
        for index, place in enumerate((model_dir, NOWHERE))
    ]  # fmt: skip


def rows_of(model_dir):
    rows = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["split"] == "train"]


def assert_exit_codes(workers, code):
    finished = [worker.wait() for worker in workers]
    assert [one.returncode for one in finished] == [code, code], finished[0].stderr + finished[1].stderr
    return finished


@pytest.mark.heavy
# Of more starts: tests/test_main.py has another model, tests/test_own_files.py what workers refuse together.
@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_run_whose_other_worker_has_no_storage_resumes_bitwise(start_launcher, free_ports, tmp_path, again):
    undisturbed, interrupted = tmp_path / "undisturbed", tmp_path / "interrupted"
    # Weights to start with, which the chief hands over as it does a checkpoint.
    pretrained = tmp_path / "pretrained.weights.h5"
    mlp(image_shape=(8, 8, 1), num_classes=10, units=32, layers=1).save_weights(pretrained)
    # With the optimizer's state shared out, nobody has all of it alone.
    start = (
        f"--gin_param=StartFrom.path = '{pretrained}'",
        "--gin_param=train.freeze = ('logits',)",
        "--gin_param=train.shard = 'optimizer'",
    )
    workers = start_two(start_launcher, free_ports, interrupted, "--gin_param=train.steps = 100000", *start)
    store = CheckpointStore(str(interrupted / "checkpoints"))
    workers[0].wait_until(lambda: len(store.steps()) >= 1)
    workers[1].send(signal.SIGTERM)
    assert_exit_codes(workers, 42)
    step = store.latest()

    total = step + MORE_STEPS
    steps = f"--gin_param=train.steps = {total}"
    assert f"started from {pretrained}: 4 weights" in workers[0].stdout
    # Two replicas of one process read the weights themselves, and come to the same bits as two workers.
    alone = (*FLAGS, *start, steps, "--replicas=2", f"--model_dir={undisturbed}")
    assert entry.main(["launcher", *alone]) == 0
    pretrained.unlink()
    resumed = assert_exit_codes(start_two(start_launcher, free_ports, interrupted, steps, *start), 0)
    assert f"restored step {step}" in resumed[0].stdout
    expected, found = CheckpointStore(str(undisturbed / "checkpoints")).read(total), store.read(total)
    assert found.keys() == expected.keys()
    assert [row["loss"] for row in rows_of(interrupted)] == [row["loss"] for row in rows_of(undisturbed)]
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes(), name
    if not again:
        return

    finished = assert_exit_codes(start_two(start_launcher, free_ports, interrupted, steps, *start), 0)
    assert f"already trained to step {total} of {total}" in finished[0].stdout

    other = ("--gin_param=mlp.units = 16", "--gin_param=Checkpoints.on_changed_program = 'continue'")
    another_model = start_two(start_launcher, free_ports, interrupted, steps, *other, *start)
    refused = assert_exit_codes(another_model, 64)
    for one in refused:
        assert "holds a checkpoint of another model" in one.stderr
        assert "Traceback" not in one.stderr
    assert "the chief cannot start" in refused[1].stderr
