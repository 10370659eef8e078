"""What a run says of its gradients while it trains is so, and to look changes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_run import GivenTask, assert_replicas_equal, build, descent, linear_batches, negative_sum

from launcher.checkpoints import CheckpointStore, Saver
from launcher.errors import UsageError
from launcher.reporting.metrics_file import read_events
from launcher.reporting.reporter import Reporter
from launcher.reporting.summary import Stopwatch
from launcher.run import session
from launcher.run.actions.base import LookAtBatches
from launcher.run.actions.precision_watch import PrecisionWatch, Sample, Watch
from launcher.run.controller import Controller
from launcher.run.start.starting_point import StartingPoint
from launcher.step.precision import FixedLossScale

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------------------------------------------- what is sampled

X = np.array([[1.0, 2.0], [3.0, 0.0], [0.5, -1.0], [8.0, 4.0]], np.float32)
SMALL = np.array([[2.0**-30], [2.0**-20]], np.float32)


def two_layers() -> keras.Model:
    """Gradients of the first layer are products with SMALL: below what float16 holds, without a scale."""

    def constant(value):
        return lambda shape, dtype=None: tf.constant(value, dtype)

    inputs = keras.Input((2,))
    hidden = keras.layers.Dense(2, use_bias=False, name="first", kernel_initializer=constant(np.eye(2)))(inputs)
    outputs = keras.layers.Dense(1, use_bias=False, name="second", kernel_initializer=constant(SMALL))(hidden)
    return keras.Model(inputs, keras.layers.Activation("linear", dtype="float32", name="wide")(outputs))


def watch_of(made: session.Session, reporter: Reporter | None = None) -> Watch:
    reporter = reporter or Reporter(model_dir="", total_steps=0, is_chief=False)
    return Watch(made.trainer, session.float32_model(made), reporter)


def sampled(made: session.Session) -> Sample:
    return watch_of(made).sample(next(made.trainer.batches(made.plan.data, 0, runtime=made.runtime.host)))


@pytest.mark.parametrize(("replicas", "scale"), [(1, 1.0), (2, 2.0**12)])
def test_a_sample_is_what_numpy_finds_in_float32(replicas, scale) -> None:
    task = GivenTask(linear_batches([X]), two_layers, negative_sum)
    loss_scale = FixedLossScale(scale=scale)
    made = build(task, replicas, precision="mixed_float16", loss_scale=loss_scale)
    found = sampled(made)

    upstream = -1 / len(X)
    tensors = {  # of one replica each: sums over its examples for weights, one row an example for outputs
        "first/kernel": [sum(upstream * np.outer(row, SMALL) for row in part) for part in np.split(X, replicas)],
        "second/kernel": [sum(upstream * row for row in part) for part in np.split(X, replicas)],
        "first:output": [np.tile(upstream * SMALL.T, (len(X), 1))],
        "second:output": [np.full(len(X), upstream)],
        "wide:output": [np.full(len(X), upstream)],
    }
    seen = {name: np.concatenate([np.ravel(part) for part in parts]) for name, parts in tensors.items()}

    def lost(values):
        nonzero = values[values != 0]
        return np.mean((nonzero * scale).astype(np.float16) == 0)

    assert set(found.event["layers"]) == set(seen)
    for name, values in seen.items():
        share, _, headroom = found.event["layers"][name]
        assert share == pytest.approx(lost(values), rel=1e-3), name
        assert headroom == pytest.approx(np.log2(65504 / (np.abs(values).max() * scale)), rel=1e-3), name
    in_float16 = np.concatenate([values for name, values in seen.items() if name != "wide:output"])
    assert found.event["lost_share"] == pytest.approx(lost(in_float16))
    assert lost(seen["first:output"]) == (0 if scale == 2.0**12 else 1 / 2)
    assert found.event["worst_layer"].startswith("first")
    assert found.event["recommended_scale"] == 2.0 ** np.floor(np.log2(65504 / np.abs(in_float16).max() / 2))
    assert found.event["loss_scale"] == scale
    assert found.exponents["activation_gradients"].sum() == sum(
        values.size for name, values in seen.items() if name.endswith(":output")
    )
    assert made.model.get_layer("first").compute_dtype == "float16", "only while it is looked at"


def test_a_cast_that_the_model_was_built_with_loses_nothing_in_the_sample() -> None:
    """A functional model keeps the dtype of a cast, whatever its layers' policies are later."""

    def model() -> keras.Model:
        inputs = keras.Input((2,))
        hidden = keras.layers.Dense(1, use_bias=False, name="narrow")(inputs)
        small = keras.ops.cast(keras.ops.cast(hidden, hidden.dtype) * 2.0**-30, "float32")
        return keras.Model(inputs, keras.layers.Dense(1, use_bias=False, dtype="float32", name="wide")(small))

    made = build(
        GivenTask(linear_batches([X]), model, negative_sum),
        precision="mixed_float16",
        loss_scale=FixedLossScale(scale=1.0),
    )
    found = sampled(made)
    assert found.event["layers"]["narrow:output"][0] == 1, "float16 has nothing this small, float32 has"


# ------------------------------------------------------------------------------------------------ beside the training

STEPS, EXAMPLES, FEATURES = 6, 8, 5


def noisy_task() -> GivenTask:
    """Everything that a forward pass moves: dropout's seeds and moving statistics."""

    def model() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(8, "relu", name="one"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dropout(0.5, name="drop"),
                keras.layers.Dense(1, name="two"),
            ]
        )

    rows = np.random.default_rng(0).standard_normal((STEPS, EXAMPLES, FEATURES))
    return GivenTask(linear_batches(rows), model, negative_sum)


def trained(model_dir: Path, replicas: int, steps: int = STEPS, watch: PrecisionWatch | None = None):
    """A run of `noisy_task` from the newest checkpoint in `model_dir` on."""
    made = build(
        noisy_task(), replicas, steps=STEPS, precision="mixed_float16", precision_watch=watch,
        loss_scale=FixedLossScale(scale=256.0), steps_per_loop=4, log_every=3,
        optimizer=lambda: descent(0.01),
    )  # fmt: skip
    store = CheckpointStore(str(model_dir / "checkpoints"), keep=3)
    if store.steps():
        made.trainer.state.restore(store.read(store.steps()[-1]))
    reporter = Reporter(model_dir=str(model_dir), total_steps=STEPS, is_chief=True)
    reporter.truncate_after(made.trainer.step)
    made = dataclasses.replace(made, plan=dataclasses.replace(made.plan, total_steps=steps))
    looks = [LookAtBatches(made.trainer, made.plan.data, watch.every, watch_of(made, reporter).look)] if watch else []
    loop = Controller(
        made, StartingPoint(), saver=Saver(store, asynchronous=False), reporter=reporter, stopwatch=Stopwatch(),
        evaluates=False, actions=looks,
    )  # fmt: skip
    loop.prepare()
    loop.train()
    reporter.close()
    return made


def samples(model_dir: Path) -> list[dict]:
    return [
        {name: value for name, value in event.items() if name != "time"}
        for event in read_events(str(model_dir))
        if event["split"] == "precision"
    ]


def test_weights_are_the_same_to_the_bit_on_two_replicas_and_over_a_resume(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", 2).trainer.state.snapshot()
    trained(tmp_path / "watched", 2, steps=3, watch=PrecisionWatch(every=2))
    watched = trained(tmp_path / "watched", 2, watch=PrecisionWatch(every=2))
    assert_replicas_equal(watched)
    found = watched.trainer.state.snapshot()
    for name, value in alone.items():
        assert found[name].tobytes() == value.tobytes(), name

    assert samples(tmp_path / "alone") == []
    assert [event["step"] for event in samples(tmp_path / "watched")] == [2, 4, 6]
    for event in samples(tmp_path / "watched"):
        assert 0 <= event["lost_share"] <= 1
        assert event["worst_layer"] in event["layers"]
    shown = [event for event in read_events(str(tmp_path / "watched")) if event["split"] == "train"]
    assert [event["step"] for event in shown] == [3, 6], "the cadence of the log is the recipe's"


@pytest.mark.nightly  # test_tensorboard.py has the histograms
def test_tensorboard_shows_the_exponents_that_were_counted(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained(tmp_path, 1, watch=PrecisionWatch(every=3))
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard/precision"), size_guidance={"histograms": 0})
    board.Reload()
    found = samples(tmp_path)
    assert [point.value for point in board.Scalars("lost_share")] == pytest.approx(
        [event["lost_share"] for event in found]
    )
    assert set(board.Tags()["histograms"]) == {"exponents/weight_gradients", "exponents/activation_gradients"}
    (first, _) = board.Histograms("exponents/activation_gradients")
    histogram = first.histogram_value
    # Bins are exponents, so what lies below 2^-25 / 256 can be read off.
    assert sum(histogram.bucket) == histogram.num > 0
    assert -127 < histogram.min < histogram.max < 16


def test_a_cadence_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"PrecisionWatch.every = 0: must be 1 or more"):
        PrecisionWatch(every=0)
