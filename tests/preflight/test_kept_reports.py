"""A second look at a recipe: the same report without TensorFlow, and a new one as soon as anything has changed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launcher import main as entry
from launcher.errors import EXIT_DONE, EXIT_USAGE, LauncherError
from launcher.modes import preflight as mode
from launcher.preflight import inputs

MODEL = """
import gin, keras
import numpy as np
from own_sizes import UNITS

@gin.configurable
def own_model(*, image_shape, num_classes):
    keep = int(np.load("keep.npy"))
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(UNITS * keep),
                             keras.layers.Dense(num_classes)])
"""


NEW = "nothing was kept for this command"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The flags for a user's own model, in whose folder the test is."""
    (tmp_path / "own_kept_model.py").write_text(MODEL)
    (tmp_path / "own_sizes.py").write_text("UNITS = 16\n")
    np.save(tmp_path / "keep.npy", 2)
    (tmp_path / "own.gin").write_text(
        "import own_kept_model\ninclude 'mlp_fashion.gin'\nimage_data.name = 'digits'\n"
        "image_classification.model = @own_model\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    return ("--mode=preflight", "--tpu_type=v5litepod-1", "--gin_file=own.gin", f"--preflight_cache={tmp_path}/cache")


def first_look(*flags: str) -> tuple[int, str]:
    """Exit code and words of a process of its own, as what it imports and sets decides what the next one sees."""
    # Libraries also set variables that this process's own os.environ does not have.
    environ = dict(os.environ)
    command = [sys.executable, "-m", "launcher.main", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def second_look(monkeypatch, capsys):
    """second_look(*flags): exit code and words, without TensorFlow; NEW where a new report is wanted."""

    def fail() -> None:
        raise LauncherError(NEW)

    monkeypatch.setattr(mode, "require_tensorflow", fail)

    def look(*flags: str) -> tuple[int, str]:
        code = entry.main(["launcher", *flags])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return look


def body(shown: str) -> list[str]:
    """A report without what only the first or a later look says."""
    lines = [line for line in shown.splitlines() if not line.endswith(" …")]
    return [line for line in lines if "--preflight_fresh makes a new one" not in line]


@pytest.mark.heavy
def test_a_second_look_says_the_same_without_tensorflow_until_anything_changes(own, second_look, tmp_path, monkeypatch):
    code, first = first_look(*own, f"--model_dir={tmp_path / 'one'}")
    assert code == EXIT_DONE, first
    code, second = second_look(*own, f"--model_dir={tmp_path / 'two'}")
    assert code == EXIT_DONE, first + second
    assert "--preflight_fresh makes a new one" in second
    assert body(second) == [line.replace(str(tmp_path / "one"), str(tmp_path / "two")) for line in body(first)]
    reports = [json.loads((tmp_path / name / "preflight.json").read_text()) for name in ("one", "two")]
    assert reports[0] == reports[1]

    def is_kept(*flags: str) -> bool:
        code, shown = second_look(*own, *flags)
        assert code == EXIT_DONE or NEW in shown, shown
        return code == EXIT_DONE

    for flags in (
        ("--preflight_fresh",),
        ("--seed=7",),
        ("--deterministic",),
        ("--gin_param=train.global_batch_size = 512",),
        ("--tpu_type=v5litepod-4",),
    ):
        assert not is_kept(*flags), flags
    for name in ("own.gin", "own_kept_model.py", "own_sizes.py", "keep.npy"):
        path = tmp_path / name
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        assert not is_kept(), name
        path.write_bytes(before)
        assert is_kept(), name
    for name in ("data/fashion_mnist/info.json", "numpy.py"):  # prepared data, and what hides a package
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        assert not is_kept(), name
        path.unlink()
        assert is_kept(), name
    with monkeypatch.context() as patch:
        patch.setenv("OWN_UNITS", "5")
        assert not is_kept()
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "_own_sources", lambda: "another Launcher")
        assert not is_kept()
    with monkeypatch.context() as patch:
        patch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1024")
        assert not is_kept()
    assert is_kept()


@pytest.mark.heavy
def test_a_second_look_at_a_step_that_does_not_fit_ends_as_the_first(own, second_look, tmp_path):
    (tmp_path / "own_sizes.py").write_text("UNITS = 2**17\n")
    huge = (
        *own,
        "--tpu_type=v5litepod-4",
        "--gin_param=train.global_batch_size = 524288",
        "--gin_param=train.steps = 1",
    )
    code, first = first_look(*huge)
    assert code == EXIT_USAGE, first
    assert "the step fits none of 2 cases" in first
    code, second = second_look(*huge)
    assert code == EXIT_USAGE, first + second
    assert body(second) == body(first)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("table = tf.io.read_file('words.txt')", "own.py has 'io'"),
        ("import sentencepiece", "own.py imports sentencepiece"),
        ("model.load_weights('before.h5')", "own.py has 'load_weights'"),
    ],
)
def test_a_module_that_may_read_unseen_files_is_in_doubt(tmp_path, line, why):
    path = tmp_path / "own.py"
    path.write_text(f"import keras\nimport tensorflow as tf\n{line}\n")
    assert (inputs.doubt(inputs.Reads(), [f"file {path}"], []) or "").startswith(why)
    path.write_text("import keras\nimport tensorflow as tf\nx = tf.nn.relu\n")
    assert inputs.doubt(inputs.Reads(), [f"file {path}"], ["mixed_bfloat16", "tfds:wmt14_translate/de-en"]) is None
    assert "'tsv:" in (inputs.doubt(inputs.Reads(), [], ["tsv:/data/*.tsv"]) or "")


def test_reading_of_a_network_or_of_another_program_is_noticed(tmp_path):
    with inputs.recorded() as reads:
        subprocess.run(["true"], check=True)
        with socket.socket() as client:
            client.connect_ex(("127.0.0.1", 9))
        Path(tmp_path / "read.txt").write_text("x")
        Path(tmp_path / "read.txt").read_text()
        Path(__file__).read_text()
        list(tmp_path.iterdir())
    assert reads.unseen == {"it starts true", "it uses socket.connect"}
    assert str(Path(__file__).resolve()) in reads.files
    assert str(tmp_path / "read.txt") not in reads.files, "it was written here"
    assert str(tmp_path) in reads.folders
