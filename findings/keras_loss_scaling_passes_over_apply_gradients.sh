#!/usr/bin/env bash
# Keras's LossScaleOptimizer never calls the apply_gradients of the optimizer that it wraps: mixed_float16 trains another way, silently.
#
# An optimizer of one's own that changes gradients in apply_gradients (centralised, clipped, averaged or masked ones: the
# place that papers' code and older guides use) works in float32 and in mixed_bfloat16, where compile leaves it as it
# is and the training step calls its apply_gradients. Under mixed_float16 compile wraps it in a LossScaleOptimizer, which
# hands gradients to the inner optimizer's apply. The override is passed over without an error or a warning: in the
# program below an optimizer that multiplies all gradients by zero keeps its weights in two policies, and trains in the third.
#
# What helps: override apply, which both ways go through (and apply_gradients calls).
#
# Seen with tensorflow-cpu 2.21.0 and keras 3.15.1 on Linux x86-64, Python 3.11.
#
# Output seen:
#   apply_gradients: {'float32': (2, False), 'mixed_bfloat16': (2, False), 'mixed_float16': (0, True)}
#   apply: {'float32': (2, False), 'mixed_bfloat16': (2, False), 'mixed_float16': (2, False)}
# (how often the override was called in two steps, run eagerly; whether the weights moved)
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0 keras==3.15.1
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" - <<'PY'
import sys

import keras
import numpy as np


class Frozen(keras.optimizers.SGD):
    """Multiplies all gradients by zero, in one of two places."""

    def __init__(self, place):
        super().__init__(0.1)
        self.place, self.calls = place, 0

    def apply_gradients(self, grads_and_vars):
        if self.place == "apply_gradients":
            self.calls += 1
            grads_and_vars = [(gradient * 0, variable) for gradient, variable in grads_and_vars]
        return super().apply_gradients(grads_and_vars)

    def apply(self, grads, trainable_variables=None):
        if self.place == "apply":
            self.calls += 1
            grads = [gradient * 0 for gradient in grads]
        return super().apply(grads, trainable_variables)


def trained(place, policy):
    """How often the override was called in two steps, and whether the weights moved."""
    keras.mixed_precision.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = Frozen(place)
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=True)
    before = model.get_weights()
    model.fit(np.full((8, 3), 0.1), np.full((8, 1), 0.1), batch_size=4, verbose=0)
    moved = any((one != other).any() for one, other in zip(before, model.get_weights()))
    return optimizer.calls, moved


found = {
    place: {policy: trained(place, policy) for policy in ("float32", "mixed_bfloat16", "mixed_float16")}
    for place in ("apply_gradients", "apply")
}
for place, by_policy in found.items():
    print(f"{place}: {by_policy}")
same = dict.fromkeys(("float32", "mixed_bfloat16", "mixed_float16"), (2, False))
sys.exit(found != {"apply_gradients": {**same, "mixed_float16": (0, True)}, "apply": same})
PY
