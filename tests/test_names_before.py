"""Modules by the names they had until 0.1.0, `models` and `gin_configs`: what was written with them goes on."""

from __future__ import annotations

import json
import os
import shutil

import keras
import numpy as np
from places import ROOT

import launcher

# As the version before the names wrote them: a recipe and step 2 of its run; another one and its sweep, of which the
# second trial was interrupted after step 2. The metrics are those of all four steps.
WRITTEN = ROOT / "tests" / "written_before"


def losses(folder):
    with (folder / "metrics.jsonl").open() as lines:
        return [json.loads(line)["loss"] for line in lines]


def test_a_run_with_the_old_names_goes_on_as_it_would_have_gone(run_launcher, tmp_path):
    shutil.copytree(WRITTEN, tmp_path, dirs_exist_ok=True)
    before = losses(tmp_path / "run")
    done = run_launcher("--gin_file=old.gin", "--model_dir=run", "--data_dir=data", "--strategy=one_device")
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "run"), before, rtol=1e-5)
    for name in ("models", "gin_configs"):
        assert done.stderr.count(f"note: {name} is launcher.{name} now") == 1
    config = (tmp_path / "run" / "config.gin").read_text()
    assert "import gin_configs.data.python_docs" in config and "lstm_language_model.width = 2" in config


def test_a_sweep_by_an_old_name_knows_what_it_has_done_and_goes_on_with_the_rest(run_launcher, tmp_path):
    shutil.copytree(WRITTEN, tmp_path, dirs_exist_ok=True)
    whole, cut = (tmp_path / "sweep" / f"units={units}" for units in (2, 3))
    began = json.loads((whole / "run.json").read_text())["started"]
    os.utime(tmp_path / "swept.gin", (began - 1, began - 1))
    before, untouched = losses(cut), (whole / "metrics.jsonl").read_bytes()
    sweep = ("--sweep=models.mlp.mlp.units = 2, 3", "--model_dir=sweep", "--strategy=one_device")
    done = run_launcher("--gin_file=swept.gin", *sweep, module="launcher.launch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 1 of 2, units=2: done before" in done.stdout and (whole / "metrics.jsonl").read_bytes() == untouched
    assert "trial 2 of 2, units=3: goes on" in done.stdout and "restored step 2 from" in done.stdout
    np.testing.assert_allclose(losses(cut), before, rtol=1e-5)
    assert json.loads((cut / "summary.json").read_text())["step"] == 4


def test_a_model_that_was_saved_with_the_old_names_is_loaded(tmp_path):
    for name in ("config.gin", "model.keras"):
        shutil.copy(WRITTEN / "run" / name, tmp_path)
    model = launcher.load(tmp_path)
    assert type(model).__module__ == "launcher.models.lstm"
    answer = model({"tokens": np.arange(8)[None]}, training=False)
    assert keras.ops.shape(answer) == (1, 8, 280)


def test_old_names_in_a_program_are_the_same_modules(run_launcher, tmp_path):
    (tmp_path / "program.py").write_text(
        "import launcher, models.mlp, launcher.models.mlp\n"
        "from models import resnet\n"
        "from gin_configs.data import debian\n"
        "import launcher.models.resnet as same, launcher.gin_configs.data.debian\n"
        "assert models.mlp is launcher.models.mlp and resnet is same\n"
        "assert debian is launcher.gin_configs.data.debian\n"
        "try:\n"
        "    import models.none\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
    )
    done = run_launcher(module="program", fresh=True)
    assert (done.returncode, done.stdout) == (0, "No module named 'models.none'\n"), done.stderr
