"""A user's program, for type checkers alone: each `type: ignore` has to be one, and there is no other mistake."""

import keras
import numpy as np

import launcher


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


x, y = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")
history = launcher.fit(build, (x, y), epochs=2, model_dir="run", checkpoint_every=10, microbatches="auto")
folder: str | None = history.model_dir
launcher.fit(build, (x, y), clipping={"global_norm": 1.0}, start={"path": "other", "averaged": False}, seed=1)
launcher.load(folder or "run", which="last")

launcher.fit(build, (x, y), epoch=3)  # type: ignore[call-arg]
launcher.fit(build, (x, y), checkpoint_every="often")  # type: ignore[arg-type]
launcher.fit(build, (x, y), clipping={"norm": 1.0})  # type: ignore[arg-type]
launcher.fit(build, (x, y), model_dir=3)  # type: ignore[arg-type]
launcher.load("run", newest=True)  # type: ignore[call-arg]
launcher.fitt(build, (x, y))  # type: ignore[attr-defined]
