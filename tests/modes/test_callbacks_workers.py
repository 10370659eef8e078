"""Callbacks of `launcher.fit` on two workers, one of which is killed, from the command line."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from cases import repeated_but

PROGRAM = """
import os, signal, sys
import keras, numpy as np
import launcher

out = os.environ["OUT"]
rank = __import__("json").loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
random = np.random.default_rng(0)
x = random.normal(size=(64, 4)).astype("float32")
y = (x @ random.normal(size=(4, 3))).argmax(-1)

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3, "softmax")])
    optimizer = keras.optimizers.RMSprop(0.1, use_ema=True, ema_momentum=0.7)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

class Own(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        mark = f"{out}/killed"
        if os.environ.get("KILL") == str(rank) and self.model.optimizer.iterations == 10 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    def on_epoch_end(self, epoch, logs=None):
        rate = float(self.model.optimizer.learning_rate.numpy())
        with open(f"{out}/told{rank}", "a") as file:
            print(epoch, rate, sorted(logs.items()), self.model.predict(x[:4], verbose=0).sum() > 0, file=file)

class OfChief(Own):
    chief_only = True
    def on_epoch_end(self, epoch, logs=None):
        assert rank == 0

kinds = keras.callbacks
launcher.fit(build, (x, y), (x[:24], y[:24]), epochs=8, batch_size=16, checkpoint_every=3, shuffle=False, callbacks=[
    kinds.ReduceLROnPlateau(patience=0, min_delta=0.05, factor=0.5),
    kinds.SwapEMAWeights(),
    kinds.CSVLogger(f"{out}/log.csv"),
    kinds.ModelCheckpoint(f"{out}/best.keras", save_best_only=True),
    kinds.ModelCheckpoint(f"{out}/{{epoch}}.weights.h5", save_weights_only=True),
    kinds.TensorBoard(f"{out}/events", histogram_freq=1, update_freq=1),
    kinds.BackupAndRestore(f"{out}/backup"),
    Own(),
    OfChief(),
    kinds.EarlyStopping(patience=2, min_delta=0.02, restore_best_weights=True),
])
"""


def weights_of(folder, name):
    """Of a whole model, its optimizer's too; of weights alone, by the model that has them."""
    model = keras.saving.load_model(folder / (name if name.endswith(".keras") else "best.keras"))
    if name.endswith(".keras"):
        return [*model.get_weights(), *(one.numpy() for one in model.optimizer.variables)]
    model.load_weights(folder / name)
    return model.get_weights()


# Kills in the gate: test_callbacks.py has one of one process, test_own_train_step.py one of two.
@pytest.mark.heavy
@pytest.mark.parametrize("killed", repeated_but([""], ["", "0", "1"]))
def test_two_workers_of_which_one_may_be_killed_decide_alike_and_the_chief_writes(killed, run_launcher, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def train(name, kill=""):
        (tmp_path / name).mkdir()
        flags = ["--workers=2", f"--gin_file={program}", f"--model_dir={tmp_path / name / 'run'}"]
        done = run_launcher(*flags, module="launcher.launch", env={"OUT": str(tmp_path / name), "KILL": kill})
        assert done.returncode == 0, done.stdout + done.stderr
        return tmp_path / name

    whole = train("whole")
    assert (whole / "told0").read_text() == (whole / "told1").read_text()
    saved = [path.name for path in whole.iterdir() if path.suffix in (".keras", ".h5")]
    assert len(saved) > 2
    assert len({path.name.split(".")[-3] for path in (whole / "events").rglob("events.out*")}) == 1  # one process
    assert not (whole / "backup").exists()
    if not killed:
        return
    interrupted = train("interrupted", killed)
    assert (interrupted / "killed").exists()
    last = [(folder / "told0").read_text().splitlines()[-1] for folder in (whole, interrupted)]
    assert last[0] == last[1]
    assert (interrupted / "log.csv").read_text() == (whole / "log.csv").read_text()
    assert sorted(saved) == sorted(path.name for path in interrupted.iterdir() if path.suffix in (".keras", ".h5"))
    for name in saved:
        for found, expected in zip(weights_of(interrupted, name), weights_of(whole, name), strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=name)
