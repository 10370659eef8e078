"""Users' mistakes: one message that names the value and the way out, the documented exit code, nothing written."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import os
import re
import socket
import sys
import types
import unittest.mock
from pathlib import Path

import gin
import pytest
from places import SMALL_DIGITS

from launcher import main as entry
from launcher import modes
from launcher.errors import PeerError
from launcher.worker.progress import ERROR_FILE, read_error

pytestmark = pytest.mark.slow

WORKERS = ["10.0.0.1:1234", "10.0.0.2:1234"]


def tf_config(**task):
    return json.dumps({"cluster": {"worker": WORKERS}, "task": task})


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs main(); returns its message, having checked that it is one, with exit code 64 and nothing else written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)

    def run(*args, recipe="resnet_cpu.gin", code=64, summarised=False):
        before = sorted(tmp_path.rglob("*"))
        files = [f"--gin_file={recipe}"] if recipe else []
        assert entry.main(["launcher", *files, "--model_dir=out", *args]) == code
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        assert "Traceback" not in printed.err
        written = [path for path in sorted(tmp_path.rglob("*")) if path not in before]
        if written:  # by a run that had found its place in the folder
            assert [path.name for path in written] == ["out", "attempts.jsonl", "report.html", "summary.json"]
            told = json.loads(Path("out/summary.json").read_text())
            assert (told["status"], told["exit_code"], f"error: {told['error']}\n") == ("failed", code, printed.err)
        assert bool(written) == summarised
        return printed.err

    return run


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--gin_file=resnet_cpuu.gin"], ["resnet_cpuu.gin", "resnet_cpu.gin"]),
        (["--gin_param=trian.steps = 3"], ["trian", "train"]),
        (["--gin_param=train.stepz = 3"], ["stepz", "steps"]),
        (["--gin_param=train.steps = %STEPZ"], ["STEPZ"]),
        (["--gin_param=train.steps = 'ten'"], ["train.steps", "'ten'", "int"]),
        (["--gin_param=train.steps = -3"], ["train.steps", "-3"]),
        (["--gin_param=train.steps"], ["train.steps"]),
        (["--gin_param=train.precision = 'float8'"], ["float8", "mixed_float16"]),
        (["--gin_param=train.optimizer = @momentum()"], ["train.optimizer"]),
        (["--gin_param=train.loss_scale = 'dynamic'"], ["dynamic", "DynamicLossScale"]),
        (["--gin_param=image_data.name = 'digit'"], ["digit", "digits"]),
        (["--gin_param=image_data.name = 'tfds:nonesuch'"], ["nonesuch"]),
        (["--gin_param=resnet.depth = 19"], ["19", "18"]),
        (["--strategy=tpu"], ["no TPU", "--strategy=auto"]),
        (["--strategy=mirrored"], ["mirrored", "--replicas"]),
        (["--strategy=multi_worker"], ["TF_CONFIG"]),
        (["--strategy=mirored"], ["mirored", "mirrored"]),
        (["--replicas=3"], ["128", "3 replicas", "126 or 129"]),
        (["--replicas=0"], ["--replicas=0"]),
        (["--gin_param=train.microbatches = 8"], ["norm_group_size", "16"]),
        (["--gin_param=train.microbatches = 3"], ["128", "3 microbatches"]),
        (["--gin_param=train.eval_batch_size = 9", "--replicas=2"], ["eval_batch_size", "9"]),
        (["--mode=eval"], ["no checkpoint", "out"]),
        (["--model_dri=x"], ["model_dri", "model_dir"]),
        (["stray"], ["stray"]),
    ],
)
def test_a_mistake_is_one_message_with_the_value_and_the_way_out(refused, args, said):
    recipe = None if args[0].startswith("--gin_file") else "resnet_cpu.gin"
    message = refused(*args, recipe=recipe)
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        ("adam.learning_rate = 0.1", ["adam.learning_rate", "never"]),
        ("train.best_metric = 'acuracy'", ["acuracy", "accuracy"]),
    ],
)
def test_a_mistake_that_shows_when_the_step_is_traced_is_in_the_summary_too(refused, binding, said):
    message = refused(f"--gin_param={binding}", recipe=SMALL_DIGITS, summarised=True)
    for part in said:
        assert part in message


@gin.configurable
class TaskWithoutAModel:
    def __init__(self, data):
        self.data = lambda: data

    def loss(self, model, batch, training):
        raise NotImplementedError

    def model(self):
        raise PeerError("no model today")


def test_a_failure_before_the_first_step_is_summarised_but_for_an_evaluation(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [
        "launcher", "--gin_file=resnet_cpu.gin", "--gin_param=train.task = @TaskWithoutAModel()",
        "--gin_param=TaskWithoutAModel.data = @image_data()",
    ]  # fmt: skip
    assert entry.main([*command, "--mode=eval", "--model_dir=evaluated"]) == 75
    assert entry.main([*command, "--model_dir=trained"]) == 75
    assert not Path("evaluated").exists()
    told = json.loads(Path("trained/summary.json").read_text())
    assert (told["status"], told["exit_code"], told["step"]) == ("failed", 75, 0)
    assert told["error"] == "no model today"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{not json", "not JSON"),
        (json.dumps({"cluster": {"worker": WORKERS}}), "task"),
        (tf_config(type="worker", index=2), "2"),
        (tf_config(type="chief", index=0), "chief"),
        (tf_config(type="worker", index="x"), "x"),
    ],
)
def test_malformed_tf_config_is_named(refused, monkeypatch, value, said):
    monkeypatch.setenv("TF_CONFIG", value)
    message = refused()
    assert "TF_CONFIG" in message
    assert said in message


def test_data_that_is_not_prepared_names_the_command_that_prepares_it(refused, tmp_path):
    data_dir = tmp_path / "data"
    assert "launcher.data.prepare fashion_mnist" in refused(f"--data_dir={data_dir}", recipe="resnet_fashion.gin")


def test_model_dir_in_the_way_or_not_writable(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in refused(f"--model_dir={tmp_path}/file/run")
    if os.geteuid() == 0:
        assert "/proc" in refused("--model_dir=/proc/nowhere/run")
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        assert "locked" in refused(f"--model_dir={tmp_path}/locked/run")


SMALL = (f"--gin_file={SMALL_DIGITS}", "--gin_param=train.steps = 2")


def test_checkpoint_of_another_model_is_refused_and_kept(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["launcher", "--model_dir=out", "--mode=train"]
    assert entry.main([*command, *SMALL]) == 0
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert entry.main([*command, *SMALL, "--gin_param=mlp.units = 16"]) == 64
    message = capsys.readouterr().err
    assert "mlp.units: 32 then, 16 now" in message
    assert "--model_dir" in message
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_checkpoints_that_cannot_be_read_are_a_retry_and_when_none_is_whole_nothing_is_trained(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command = ["launcher", "--model_dir=out", "--mode=train", *SMALL]
    assert entry.main(command) == 0
    metrics = Path("out/metrics.jsonl").read_bytes()
    manifest = Path("out/checkpoints/step_00000002/manifest.json")
    manifest.rename("whole")
    manifest.symlink_to("/proc/self/mem")  # answers as a disk that fails: EIO
    assert entry.main(command) == 75
    assert "step_00000002 cannot be read: Input/output error" in capsys.readouterr().err
    manifest.unlink()
    assert entry.main(command) == 70
    printed = capsys.readouterr()
    assert "No checkpoint in out/checkpoints is whole:\n  step_00000002: manifest.json is missing\n" in printed.err
    assert "Traceback" not in printed.err and "step 1/" not in printed.out
    assert Path("out/metrics.jsonl").read_bytes() == metrics
    Path("whole").rename(manifest)
    assert entry.main(command) == 0
    assert "already trained to step 2 of 2" in capsys.readouterr().out


def test_loss_that_stays_non_finite_at_the_floor_ends_the_run_with_70(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = entry.main(
        [
            "launcher", "--model_dir=out", *SMALL, "--gin_param=train.steps = 40",
            "--gin_param=train.loss_scale = @FixedLossScale()", "--gin_param=FixedLossScale.scale = 1e38",
            "--gin_param=train.precision = 'mixed_float16'", "--gin_param=train.max_consecutive_overflows = 5",
        ]
    )  # fmt: skip
    assert code == 70
    printed = capsys.readouterr()
    assert "not finite" in printed.err
    assert "Traceback" not in printed.err
    summary = json.loads(Path("out/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 70)
    assert "not finite" in summary["error"]


def test_dry_run_prints_the_plan_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bindings = ["--gin_file=resnet_tpu.gin", "--gin_param=train.log_every = 5"]
    assert entry.main(["launcher", *bindings, "--dry_run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("25,557,032", "8192 examples a step = 256 replicas x 1 microbatch x 32", "mixed_bfloat16", "14,075"):
        assert part in printed
    assert "NOT HERE: no TPU found" in printed
    compiles = "python -m launcher.main --mode=preflight --tpu_type=v5litepod-256 --gin_file=resnet_tpu.gin"
    assert f"{compiles} '--gin_param=train.log_every = 5'" in printed
    assert list(tmp_path.iterdir()) == []


def test_without_a_recipe_the_recipes_are_listed_with_their_purpose(capsys):
    assert entry.main(["launcher"]) == 0
    assert re.search(r"^  resnet_cpu\.gin +ResNet-20 on 1,797 scanned digits", capsys.readouterr().out, re.MULTILINE)


def test_help_names_every_flag_and_exit_code(capsys):
    assert entry.main(["launcher", "--help"]) == 0
    printed = capsys.readouterr().out
    for flag in modes.define_flags():
        if flag != "h":
            assert f"--{flag}" in printed
    for code in ("42", "64", "70", "75"):
        assert code in printed


@dataclasses.dataclass(frozen=True, kw_only=True)
class GreetingRequest(modes.Request):
    greeting: str = modes.flag("what is said.", "hello")


def test_a_row_of_the_table_and_a_file_are_a_mode(capsys, monkeypatch):
    file = types.ModuleType("launcher.modes.greet")
    file.run = lambda request: print(request.greeting, request.dry_run) or 0
    row = modes.Mode(
        name="greet", says="says something", request=GreetingRequest, refuses={"replicas": "speaks once"},
        needs_recipe=False, needs_tensorflow=False, shows_plan=True,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "launcher.modes.greet", file)
    monkeypatch.setitem(modes.MODES, "greet", row)

    assert entry.main(["launcher", "--mode=greet", "--greeting=good morning", "--dry_run"]) == 0
    assert capsys.readouterr().out == "good morning True\n"
    assert entry.main(["launcher", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "|greet\n" in printed and "; greet says something." in printed
    assert "  --greeting=GREETING\n      For --mode=greet: what is said. Default: hello.\n" in printed
    assert entry.main(["launcher", "--greeting=x", "--gin_file=resnet_cpu.gin"]) == 64
    assert capsys.readouterr().err == "error: --greeting is for --mode=greet, and the mode is train_and_eval\n"
    assert entry.main(["launcher", "--mode=greet", "--replicas=2"]) == 64
    assert capsys.readouterr().err == "error: --replicas=2: --mode=greet speaks once\n"


@pytest.mark.parametrize("mode", modes.MODES.values(), ids=lambda mode: mode.name)
def test_every_row_names_a_file_and_flags_that_exist(mode):
    assert importlib.util.find_spec(mode.module or f"launcher.modes.{mode.name}")
    assert set(mode.refuses) <= {field.name for field in dataclasses.fields(mode.request)}


@gin.configurable
def losing_a_peer():
    raise PeerError("a peer went away")


def test_the_supervisor_is_told_a_message_without_what_gin_adds(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error"))
    monkeypatch.setattr("launcher.modes.run", lambda options: losing_a_peer())
    assert entry.main(["launcher", "--gin_file=resnet_cpu.gin"]) == 75
    told = read_error(tmp_path / "error")
    assert (told.type, told.message, told.exit_code) == ("PeerError", "a peer went away", 75)
    assert capsys.readouterr().err == "error: a peer went away\n"


@pytest.mark.skipif(os.name != "posix", reason="a listener that gRPC's server runs into")
def test_a_port_that_somebody_else_has_taken_is_named_and_worth_a_retry(run_launcher, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = {"cluster": {"worker": [WORKERS[0], address]}, "task": {"type": "worker", "index": 1}}
        environ = {"TF_CONFIG": json.dumps(cluster), ERROR_FILE: str(tmp_path / "error")}
        finished = run_launcher("--gin_file=resnet_cpu.gin", f"--model_dir={tmp_path}/run", env=environ)
    assert finished.returncode == 75, finished.stderr
    assert f"error: worker 1 cannot listen on the port of {address}: another process has it" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert read_error(tmp_path / "error").type == "PortTakenError"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EIO, "Input/output error"), 75),
        (OSError(errno.ENOSPC, "No space left on device"), 75),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 75),
        (TimeoutError("timed out"), 75),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), 70),
        (PermissionError(errno.EACCES, "Permission denied"), 70),
        (OSError("of a library that gives no number"), 70),
        (ValueError("a bug"), 70),
    ],
    ids=repr,
)
def test_a_retry_is_worth_it_after_failures_of_disks_and_networks_only(monkeypatch, capsys, error, code):
    # Raised by a library that Launcher calls: what this file raises would be a user's mistake.
    monkeypatch.setattr("launcher.modes.run", unittest.mock.Mock(side_effect=error))
    assert entry.main(["launcher", "--gin_file=resnet_cpu.gin"]) == code
    # A disk that gives errors is known, and needs none.
    assert ("Traceback" in capsys.readouterr().err) == (getattr(error, "errno", None) != errno.EIO)
