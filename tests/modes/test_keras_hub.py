"""LoRA on a base of keras-hub in parts; docs/fine_tuning.md says how keras-hub is installed."""

from __future__ import annotations

import json
import re

import pytest
from places import PYTHONPATH

pytest.importorskip("keras_hub", reason="keras-hub is not installed: docs/fine_tuning.md")
pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.nightly]

PROGRAM = """\
import json, os, signal, sys
import keras, keras_hub, numpy as np
import launcher

tokens = np.random.default_rng(0).integers(0, 512, (16, 17)).astype("int32")
x, y = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((16, 16), "int32")}, tokens[:, 1:]

def build():
    wide = dict(vocabulary_size=512, num_layers=1, num_query_heads=4, num_key_value_heads=2, hidden_dim=64)
    if sys.argv[1] == "Gemma":
        wide["head_dim"] = 16
    base = getattr(keras_hub.models, sys.argv[1] + "Backbone")(intermediate_dim=128, **wide)
    model = getattr(keras_hub.models, sys.argv[1] + "CausalLM")(backbone=base, preprocessor=None)
    base.enable_lora(4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, weighted_metrics=[])
    return model

class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

dies = [Dies()] if "dies" in sys.argv else []
how = json.loads(sys.argv[2])
told = launcher.fit(build, x, y, epochs=4, batch_size=8, seed=1, callbacks=dies, **how)
np.save("answers.npy", told.model.predict(x, verbose=0))
print("FOUND", json.dumps(told.history["loss"]))
"""

PLAIN = """\
import sys
import keras, keras_hub, numpy as np

tokens = np.random.default_rng(0).integers(0, 512, (16, 17)).astype("int32")
model = keras.saving.load_model("run/model.keras")
found = model.predict({"token_ids": tokens[:, :-1], "padding_mask": np.ones((16, 16), "int32")}, verbose=0)
np.testing.assert_allclose(found, np.load("answers.npy"), rtol=1e-5, atol=1e-6)
assert "launcher" not in sys.modules
"""


@pytest.mark.parametrize("name", ["Gemma", "Llama3"])
def test_lora_on_a_base_in_parts_is_killed_goes_on_and_its_file_is_plain_keras(name, run_launcher, tmp_path):
    (tmp_path / "own.py").write_text(PROGRAM)
    (tmp_path / "plain.py").write_text(PLAIN)
    environ = {"PYTHONPATH": f"{PYTHONPATH}:{tmp_path}"}

    def ran(*argv, module="own"):
        return run_launcher(*argv, module=module, env=environ, cwd=tmp_path, fresh=True)

    def losses(done):
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(re.search(r"FOUND (.*)", done.stdout)[1])

    in_parts = json.dumps({"engine": "pjrt", "replicas": 4, "shard": "all", "model_dir": "run", "checkpoint_every": 2})
    assert ran(name, in_parts, "dies").returncode == -9
    resumed = ran(name, in_parts, "dies")
    found = losses(resumed)
    assert re.search(r"restored step [24] ", resumed.stdout)
    assert float(re.search(r"\((\d+\.\d)%\) stay whole", resumed.stdout)[1]) < 5
    assert ran(module="plain").returncode == 0
    again = ran(name, in_parts, "dies")
    assert "already trained" in again.stdout and losses(again) == found
    assert losses(ran(name, "{}")) == pytest.approx(found, rel=1e-6)
