"""Penalties by layer type: their value, and that a topology does not change how often they count."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from building import build_session
from places import SMALL_DIGITS

from launcher.errors import UsageError
from launcher.step.regularization import Penalty


def small_model():
    inner = keras.Sequential([keras.Input((4, 4, 2)), keras.layers.Conv2D(3, 2), keras.layers.BatchNormalization()])
    return keras.Sequential([keras.Input((4, 4, 2)), inner, keras.layers.Flatten(), keras.layers.Dense(5)])


def test_penalty_is_the_sum_over_kernels_of_the_named_types_also_inside_nested_models():
    model = small_model()
    kernels = {variable.path: variable.numpy() for variable in model.trainable_variables if "kernel" in variable.path}
    conv, dense = sorted(kernels.values(), key=np.ndim, reverse=True)
    found = Penalty(l2={"Conv2D": 0.3, "Dense": 0.1}, l1={"Dense": 0.01})(model)
    expected = 0.3 * np.sum(conv**2) + 0.1 * np.sum(dense**2) + 0.01 * np.sum(np.abs(dense))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_layer_type_the_model_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(UsageError, match=r"'Conv1D'.*Conv2D, Dense"):
        Penalty(l2={"Conv1D": 1e-4}).check(small_model())
    with pytest.raises(UsageError, match=r"l2\['Dense'\] = -1"):
        Penalty(l2={"Dense": -1})


def first_steps(replicas, microbatches, penalty):
    params = ["train.steps = 4", "train.global_batch_size = 32"]
    params.append(f"train.microbatches = {microbatches}")
    if penalty:
        params += ["train.penalty = @penalty()", "penalty.l2 = {'Dense': 0.02}"]
    made = build_session(SMALL_DIGITS, params, replicas)
    value = float(Penalty(l2={"Dense": 0.02})(made.model))
    records = made.trainer.train(made.trainer.batches(made.plan.data), 4)
    return records.loss / records.weight, made.trainer.state.snapshot(), value


def test_penalty_is_part_of_the_loss_once_on_every_topology():
    plain, _, value = first_steps(1, 1, penalty=False)
    losses, state, _ = first_steps(1, 1, penalty=True)
    np.testing.assert_allclose(losses[0] - plain[0], value, rtol=1e-4)
    other_losses, other, _ = first_steps(2, 2, penalty=True)
    np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
    for name, expected in state.items():
        np.testing.assert_allclose(other[name], expected, atol=1e-5, err_msg=name)
