"""Loss scales against the published update rules, written again in plain Python."""

from __future__ import annotations

import random

import keras
import pytest
import tensorflow as tf

from launcher.errors import UsageError
from launcher.step.precision import (
    DynamicLossScale,
    FixedLossScale,
    of_optimizer,
    resolve_loss_scale,
    resolve_reduce_dtype,
)


def scales_of(loss_scale, pattern):
    state = loss_scale.initial()
    scales = []
    for finite in pattern:
        state = loss_scale.update(state, tf.constant(finite))
        scales.append(float(state.scale))
    return scales, state


def grad_scaler(pattern, *, scale, growth, backoff, interval):
    """torch.amp.GradScaler's rule (amp_update_scale_cuda_kernel), without floor and ceiling."""
    tracker, scales = 0, []
    for finite in pattern:
        if not finite:
            scale, tracker = scale * backoff, 0
        else:
            tracker += 1
            if tracker == interval:
                scale, tracker = scale * growth, 0
        scales.append(scale)
    return scales


def megatron(pattern, *, scale, growth, backoff, interval, hysteresis, floor):
    """Megatron-LM's DynamicGradScaler.update."""
    growth_tracker, hysteresis_tracker, scales = 0, hysteresis, []
    for finite in pattern:
        if not finite:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(scale * backoff, floor)
        else:
            growth_tracker += 1
            if growth_tracker == interval:
                growth_tracker, hysteresis_tracker = 0, hysteresis
                scale *= growth
        scales.append(scale)
    return scales


def patterns():
    source = random.Random(0)
    return [[source.random() > rate for _ in range(60)] for rate in (0.0, 0.1, 0.3, 0.6)]


@pytest.mark.parametrize("pattern", patterns())
def test_dynamic_scale_moves_as_grad_scaler_does(pattern):
    ours, _ = scales_of(
        DynamicLossScale(initial_scale=2.0**12, growth_interval=5, min_scale=2.0**-60, max_scale=2.0**60), pattern
    )
    assert ours == grad_scaler(pattern, scale=2.0**12, growth=2.0, backoff=0.5, interval=5)


@pytest.mark.parametrize("pattern", patterns())
def test_hysteresis_is_that_of_megatron(pattern):
    ours, _ = scales_of(
        DynamicLossScale(initial_scale=2.0**12, growth_interval=4, hysteresis=3, min_scale=1.0, max_scale=2.0**60),
        pattern,
    )
    assert ours == megatron(pattern, scale=2.0**12, growth=2.0, backoff=0.5, interval=4, hysteresis=3, floor=1.0)


def test_scale_stays_between_floor_and_ceiling():
    down, _ = scales_of(DynamicLossScale(initial_scale=8.0, min_scale=2.0), [False] * 200)
    up, _ = scales_of(DynamicLossScale(initial_scale=8.0, max_scale=64.0, growth_interval=1), [True] * 200)
    assert min(down) == 2.0
    assert max(up) == 64.0


def test_only_consecutive_skips_at_the_floor_are_counted():
    scale = DynamicLossScale(initial_scale=4.0, min_scale=1.0)
    _, state = scales_of(scale, [False] * 5)  # 4 -> 2 -> 1, then three at the floor
    assert int(state.skips_at_floor) == 3
    _, state = scales_of(scale, [False] * 5 + [True])
    assert int(state.skips_at_floor) == 0


def test_fixed_scale_never_moves_and_counts_every_consecutive_skip():
    scales, state = scales_of(FixedLossScale(scale=128.0), [True, False, False, True, False])
    assert set(scales) == {128.0}
    assert int(state.skips_at_floor) == 1


def test_auto_scales_float16_only():
    assert isinstance(resolve_loss_scale("auto", "mixed_float16"), DynamicLossScale)
    for policy in ("float32", "mixed_bfloat16"):
        assert resolve_loss_scale("auto", policy) == FixedLossScale(scale=1.0)


@pytest.mark.parametrize("arguments", [{}, {"initial_scale": 8.0}, {"initial_scale": 4.0, "dynamic_growth_steps": 2}])
def test_the_scale_of_a_keras_optimizer_moves_as_kerass_own(arguments):
    weight = keras.Variable(1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), **arguments)
    optimizer.build([weight])
    expected, pattern = [], [True, True, True, False, True, True]
    for finite in pattern:
        optimizer.apply([tf.constant(1.0 if finite else float("inf"))], [weight])
        expected.append(float(optimizer.dynamic_scale.numpy()))
    assert scales_of(of_optimizer(optimizer, FixedLossScale()), pattern)[0] == expected
    assert of_optimizer(optimizer.inner_optimizer, FixedLossScale()) == FixedLossScale()


def test_auto_wire_is_float16_under_mixed_float16_only():
    assert resolve_reduce_dtype("auto", "mixed_float16") == tf.float16
    assert resolve_reduce_dtype("auto", "mixed_bfloat16") == tf.float32
    assert resolve_reduce_dtype("bfloat16", "float32") == tf.bfloat16


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"initial_scale": 0.5}, "initial_scale=0.5"),
        ({"backoff_factor": 1.5}, "backoff_factor=1.5"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"hysteresis": 0}, "hysteresis=0"),
    ],
)
def test_impossible_scales_are_refused_with_the_value_seen(arguments, said):
    with pytest.raises(UsageError, match=said):
        DynamicLossScale(**arguments)


def test_unknown_loss_scale_and_reduce_dtype_name_the_choices():
    with pytest.raises(UsageError, match="DynamicLossScale"):
        resolve_loss_scale("dynamic", "float32")
    with pytest.raises(UsageError, match="bfloat16"):
        resolve_reduce_dtype("fp8", "float32")


@pytest.mark.parametrize("pattern", patterns())
def test_dynamic_scale_moves_as_the_real_grad_scaler_does(pattern):
    torch = pytest.importorskip(
        "torch", reason="torch is no dependency; with it installed, its GradScaler is an oracle"
    )
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
    theirs = []
    for finite in pattern:
        scaler.scale(weight.sum()).backward()
        if not finite:
            weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        theirs.append(scaler.get_scale())
    ours, _ = scales_of(
        DynamicLossScale(initial_scale=2.0**12, growth_interval=5, min_scale=2.0**-60, max_scale=2.0**60), pattern
    )
    assert ours == theirs
