"""What earlier versions wrote goes on: runs, checkpoints, models and programs, by the names that things had then."""

from __future__ import annotations

import json
import os
import re
import shutil

import keras
import numpy as np
import pytest
from packaging.version import Version
from places import ROOT

import launcher
from launcher.config import gin_files, old_bindings
from launcher.errors import UsageError, deprecation
from launcher.run.programs import GROUPS
from launcher.run.recipe import Checkpoints
from launcher.step.clipping import Clipping

# As the version before the names wrote them: a recipe and step 2 of its run; another one and its sweep, of which the
# second trial was interrupted after step 2. The metrics are those of all four steps.
WRITTEN = ROOT / "tests" / "written_before"
# As the first version wrote them, with its names of bindings: runs of a recipe, of texts and of a program, each whole.
FIRST = WRITTEN / "0.1.0"
GOES = f"now; its old name goes in Launcher {deprecation.GOES_IN}"


def losses(folder, split=""):
    with (folder / "metrics.jsonl").open() as lines:
        return [event["loss"] for event in map(json.loads, lines) if event["split"].endswith(split)]


def test_a_run_with_the_old_names_goes_on_as_it_would_have_gone(run_launcher, tmp_path):
    shutil.copytree(WRITTEN, tmp_path, dirs_exist_ok=True)
    before = losses(tmp_path / "run")
    done = run_launcher("--gin_file=old.gin", "--model_dir=run", "--data_dir=data", "--strategy=one_device")
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "run"), before, rtol=1e-5)
    for name in ("models", "gin_configs"):
        assert done.stderr.count(f"note: {name} is launcher.{name} {GOES}") == 1
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
    done = run_launcher(module="program")
    assert (done.returncode, done.stdout) == (0, "No module named 'models.none'\n"), done.stderr


# -------------------------------------------------------------------------------------------------- written by 0.1.0


def cut(folder):
    """The run as it was when it had saved step 2."""
    shutil.rmtree(folder / "checkpoints" / "step_00000004")
    for name in ("summary.json", "checkpoints/best.json"):
        (folder / name).unlink()


def test_a_run_of_the_first_version_goes_on_with_its_own_recipe_and_compares_with_what_it_was(run_launcher, tmp_path):
    shutil.copytree(FIRST, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    cut(tmp_path / "cut")
    done = run_launcher("--gin_file=recipe.gin", "--model_dir=cut", "--strategy=one_device")
    assert done.returncode == 0 and "restored step 2 from cut" in done.stdout, done.stderr
    assert f"note: recipe.gin line 7: train.keep_checkpoints is Checkpoints.keep {GOES}" in done.stderr
    np.testing.assert_allclose(losses(tmp_path / "cut"), losses(tmp_path / "run"), rtol=1e-5)
    written = (tmp_path / "cut" / "config.gin").read_text()
    assert "Checkpoints.keep = 5" in written and "train.shard = 'none'" in written and "keep_checkpoints" not in written
    done = run_launcher("--mode=compare", "run", "cut")
    assert done.returncode == 0 and "Checkpoints.keep" not in done.stdout, done.stderr


def test_a_run_on_texts_of_the_first_version_is_told_what_its_bindings_are_now_and_evaluates(run_launcher, tmp_path):
    shutil.copytree(FIRST, tmp_path, dirs_exist_ok=True)
    command = ("--gin_file=text.gin", "--model_dir=text", "--mode=eval", "--strategy=one_device", "--data_dir=data")
    done = run_launcher(*command)
    assert done.returncode == 64 and "what says it now is text_corpus.name = 'lines:FILE'" in done.stderr, done.stderr
    text = (tmp_path / "text.gin").read_text()
    now = re.sub(r"text_corpus.train_file.*|text_corpus.name.*", "", text).replace(
        "text_corpus.eval_file", "lines_corpus.eval_files"
    )
    (tmp_path / "text.gin").write_text(now + "text_corpus.name = 'lines:train.txt'\n")
    before = losses(tmp_path / "text")
    done = run_launcher(*command)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "text")[-1], before[-1], rtol=1e-5)


def test_a_program_of_the_first_version_goes_on_with_its_settings(run_launcher, tmp_path):
    shutil.copytree(FIRST, tmp_path, dirs_exist_ok=True)
    before = losses(tmp_path / "fit", "eval")
    cut(tmp_path / "fit")
    done = run_launcher("--gin_file=program.py", "--model_dir=fit", "--strategy=one_device")
    assert done.returncode == 0 and "restored step 2 from fit" in done.stdout, done.stderr
    assert f"note: keep_checkpoints is 'keep' in checkpoints {GOES}" in done.stderr
    np.testing.assert_allclose(losses(tmp_path / "fit", "eval"), before, rtol=1e-5)
    rows = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    np.save(tmp_path / "rows.npy", rows)
    command = ("--gin_file=program.py", "--model_dir=fit", "--mode=predict", "--input=rows.npy", "--output=answers.npy")
    done = run_launcher(*command, "--strategy=one_device")
    assert done.returncode == 0, done.stderr
    expected = keras.saving.load_model(FIRST / "fit" / "model.keras").predict(rows, verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "answers.npy"), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"keep_checkpoints": 1, "checkpoints": {"keep": 2}},
        {"checkpoints": Checkpoints(keep=2), "keep_checkpoints": 1},
        {"clip_global_norm": 1.0, "clipping": Clipping(value=1.0)},
        {"reduce_dtype": "float32", "wire_dtype": "float16"},
    ],
)
def test_a_setting_of_fit_by_its_old_name_beside_its_new_one_is_refused_and_none_is_lost(settings):
    for given in (settings, dict(reversed(settings.items()))):
        with pytest.raises(UsageError, match=f"fit: ({'|'.join(settings)}) and .* are given, and say the same"):
            launcher.fit(lambda: None, [0], [0], **given)
    both = {"keep_checkpoints": 1, "checkpoints": {"every_minutes": 2}}
    for given in (both, dict(reversed(both.items()))):
        assert old_bindings.of_fit(given, GROUPS) == {"checkpoints": {"keep": 1, "every_minutes": 2}}


def test_models_of_the_first_version_are_loaded_from_their_file_and_from_a_config_of_its_names():
    of_texts, of_fit, built = (launcher.load(str(FIRST / name)) for name in ("text", "fit", "run"))
    assert keras.ops.shape(of_texts({"tokens": np.arange(8)[None]}, training=False)) == (1, 8, 280)
    assert of_fit.predict(np.zeros((1, 4)), verbose=0).shape == (1, 2) and built.output_shape == (None, 10)


def test_old_bindings_are_read_until_the_version_that_the_notes_name():
    assert Version(launcher.__version__) < Version(deprecation.GOES_IN), "take out what deprecation.tell is called for"
    table = json.loads((ROOT / "launcher" / "config" / "old_bindings.json").read_text())
    surface = (ROOT / "tests" / "golden" / "surface.txt").read_text().replace(": ", "\n").splitlines()
    known = {name for name in table["names"].values() if re.match("train|Checkpoints|Clipping|StartFrom|Spikes", name)}
    assert known <= set(surface) and not {*table["names"], *table["gone"]} & set(surface)
    assert old_bindings.as_now("train.steps", 3) == ("train.steps", 3)
    assert str(gin_files.read_param("scope/lars.eeta = 1")) == "--gin_param: scope/lars.trust_coefficient = 1"
