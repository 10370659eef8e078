"""--mode=verify: what it calls equal, what it calls different, and that no process outlives it."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import sys

import convolutions  # noqa: F401
import numpy as np
import psutil
import pytest
from building import build_session

from launcher.errors import TrainingError, UsageError
from launcher.reporting.console import make_console
from launcher.verify import control, processes, table, verification
from launcher.verify.compare import QUANTITIES, Record, compare, digest, load_record, not_finite
from launcher.verify.processes import Died, Refused, TrainingJob
from launcher.verify.settings import Tolerances, Topology, VerifySettings, for_policy

pytestmark = pytest.mark.slow

TOLERANCES = Tolerances(loss=1e-5, gradient_norm=1e-4, weights=1e-3, slots=1e-2, moving_statistics=1e-3)
STEPS = 4


def made(**changes) -> Record:
    """A record of four steps in which nothing happens."""
    plain = Record(
        loss=np.array([2.0, 1.5, 1.2, 1.0]),
        gradient_norm=np.array([4.0, 3.0, 2.0, 1.0]),
        loss_scale=np.full(STEPS, 1024.0),
        finite=np.ones(STEPS),
        state={
            "counters/step": np.array(STEPS),
            "counters/skipped": np.array(0),
            "loss_scale/scale": np.array(1024.0, np.float32),
            "model/dense/kernel": np.array([[0.5, -0.25]], np.float32),
            "model/norm/moving_mean": np.array([100.0, 1.0], np.float32),
            "optimizer/adam/dense_kernel_momentum": np.array([[2.0, 1.0]], np.float32),
            "optimizer/adam/dense_bias_momentum": np.array([1e-9], np.float32),
            "optimizer/adam/dense_kernel_velocity": np.array([[1e-6, 2e-6]], np.float32),
            "ema/dense/kernel": np.array([[0.5, -0.25]], np.float32),
            "metrics/accuracy": np.array(0.5),
            "metrics/val_loss": np.array(4.0),
        },
        trained=("model/dense/kernel",),
        digests=({"model/dense/kernel": "a", "steps/loss": "b"},),
    )
    return dataclasses.replace(plain, **changes)


def state(**changes) -> Record:
    """The same with other values at the end."""
    return made(state={**made().state, **{name: np.asarray(value) for name, value in changes.items()}})


def failing(found: Record, baseline: Record | None = None, tolerances: Tolerances = TOLERANCES):
    """The deviations out of tolerance, by quantity."""
    deviations = compare(baseline or made(), found, tolerances)
    assert tuple(one.quantity for one in deviations) == QUANTITIES
    return {one.quantity: one for one in deviations if not one.within}


# ------------------------------------------------------------------------------------------------------- the comparison


def test_a_run_equals_itself():
    assert failing(made()) == {}


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("field", ["loss", "gradient_norm"])
def test_every_step_of_a_curve_is_held_to_the_tolerance(field, step):
    tolerance = getattr(TOLERANCES, field)
    curve = getattr(made(), field)
    for factor, outside in ((0.9, False), (1.1, True)):
        changed = curve.copy()
        changed[step] *= 1 + factor * tolerance
        found = failing(made(**{field: changed}))
        assert set(found) == ({field.replace("_", " ")} if outside else set())
        if outside:
            assert f"at step {step + 1} " in found[field.replace("_", " ")].sentence
            assert found[field.replace("_", " ")].first_step == step + 1


def test_the_first_step_out_of_tolerance_is_named_beside_the_worst():
    found = failing(made(loss=np.array([2.0, 1.6, 2.4, 1.0])))
    assert found["loss"].sentence == "loss off by 1 at step 3 (tolerance 1e-05, out of tolerance from step 2 on)"


def test_a_loss_near_zero_is_judged_by_where_it_came_from():
    baseline = made(loss=np.array([2.0, 1.0, 1e-2, 1e-7]))
    assert failing(made(loss=np.array([2.0, 1.0, 1e-2, 2e-7])), baseline) == {}
    assert set(failing(made(loss=np.array([2.0, 1.0, 1e-2, 1e-4])), baseline)) == {"loss"}


@pytest.mark.parametrize(
    ("name", "quantity", "scale", "tolerance"),
    [
        ("model/dense/kernel", "weights", 1.0, TOLERANCES.weights),
        ("ema/dense/kernel", "weights", 1.0, TOLERANCES.weights),
        ("metrics/accuracy", "metrics", 0.5, TOLERANCES.gradient_norm),
        ("metrics/val_loss", "metrics", 4.0, TOLERANCES.gradient_norm),
        ("model/norm/moving_mean", "moving statistics", 100.0, TOLERANCES.moving_statistics),
        ("optimizer/adam/dense_kernel_momentum", "optimizer slots", 2.0, TOLERANCES.slots),
        ("optimizer/adam/dense_bias_momentum", "optimizer slots", 2.0, TOLERANCES.slots),
        ("optimizer/adam/dense_kernel_velocity", "optimizer slots", 2e-6, TOLERANCES.slots),
    ],
)
def test_final_state_is_held_to_the_tolerance_of_its_kind(name, quantity, scale, tolerance):
    value = made().state[name]
    assert failing(state(**{name: value + 0.9 * tolerance * scale})) == {}
    found = failing(state(**{name: value + 1.1 * tolerance * scale}))
    assert set(found) == {quantity}
    assert name in found[quantity].sentence


def test_a_step_skipped_on_one_side_only_is_found_whatever_the_tolerances():
    finite = np.array([1.0, 1.0, 0.0, 1.0])
    loose = Tolerances(loss=9, gradient_norm=9, weights=9, slots=9, moving_statistics=9)
    found = failing(made(finite=finite), tolerances=loose)
    assert set(found) == {"skipped steps"}
    assert "step 3" in found["skipped steps"].sentence


def test_another_sequence_of_loss_scales_is_found():
    found = failing(made(loss_scale=np.array([1024.0, 1024.0, 512.0, 512.0])))
    assert set(found) == {"loss scale"}
    assert "step 3 has 512, on one replica 1024" in found["loss scale"].sentence
    found = failing(state(**{"loss_scale/scale": np.float32(512)}))
    assert "loss_scale/scale" in found["loss scale"].sentence


def test_replicas_that_differ_in_a_bit_are_found():
    same, other = {"model/dense/kernel": "a"}, {"model/dense/kernel": "c"}
    assert failing(made(digests=(same, same, same))) == {}
    found = failing(made(digests=(same, same, other)))
    assert set(found) == {"replicas"}
    assert "model/dense/kernel on replica 2" in found["replicas"].sentence
    assert digest(np.array([0.0])) != digest(np.array([-0.0]))
    assert digest(np.array([math.nan])) == digest(np.array([math.nan]))


def test_what_overflowed_and_was_skipped_on_both_sides_is_equal():
    loss, norm = np.array([2.0, math.nan, 1.2, 1.0]), np.array([4.0, math.inf, 2.0, 1.0])
    skipped = {"finite": np.array([1.0, 0.0, 1.0, 1.0])}
    both = made(loss=loss, gradient_norm=norm, **skipped)
    assert failing(both, both) == {}
    assert set(failing(made(**skipped), both)) == {"loss", "gradient norm"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_on_both_sides_yet_applied_is_no_agreement(value):
    both = made(loss=np.array([2.0, 1.5, value, 1.0]))
    assert set(failing(both, both)) == {"loss"}
    assert not_finite(both) == "the loss or gradient of step 3"
    both = state(**{"model/dense/kernel": np.float32([[value, 1]])})
    assert set(failing(both, both)) == {"weights"}
    assert not_finite(both) == "model/dense/kernel"
    assert not_finite(made()) is None


def test_a_variable_that_is_missing_or_of_another_shape_is_found():
    less = dict(made().state)
    del less["model/norm/moving_mean"]
    assert set(failing(made(state=less))) == {"moving statistics"}
    assert set(failing(made(), made(state=less))) == {"weights"}
    assert set(failing(state(**{"model/dense/kernel": np.zeros([3])}))) == {"weights"}


def test_records_of_several_processes_come_back_as_one(tmp_path):
    chief = made(digests=({"x": "1"},))
    chief.save(tmp_path / "0.npz")
    made(state={}, digests=({"x": "2"},)).save(tmp_path / "1.npz")
    loaded = load_record([tmp_path / "0.npz", tmp_path / "1.npz"])
    assert loaded.digests == ({"x": "1"}, {"x": "2"})
    assert failing(dataclasses.replace(loaded, digests=({},))) == {}
    assert loaded.trained == chief.trained


# ------------------------------------------------------------------------------------------------ table, outcome, exit


def results(*records: Record):
    return [
        table.Result(topology=Topology(replicas=index), seconds=1.0, deviations=compare(made(), one, TOLERANCES))
        for index, one in enumerate(records, start=2)
    ]


def test_the_worst_offender_is_named_with_topology_quantity_and_place():
    slight = made(loss=made().loss * (1 + 2e-5))
    bad = state(**{"model/dense/kernel": np.float32([[0.5, 7.0]])})
    verification.check(results(made(), made()))
    with pytest.raises(TrainingError, match=r"1 of 2 .*mirrored 3: loss off by 2e-05 at step 1"):
        verification.check(results(made(), slight))
    with pytest.raises(TrainingError, match=r"worst offender is mirrored 2: weights .*model/dense/kernel"):
        verification.check(results(bad, slight, made()))


def test_a_topology_that_died_fails_and_one_that_does_not_apply_passes():
    died = table.Result(topology=Topology(workers=2), seconds=1.0, failure=Died("worker 1 ended with exit code 3"))
    refused = table.Result(topology=Topology(microbatches=3), seconds=1.0, failure=Refused("128 cannot be split"))
    verification.check([*results(made()), refused])
    with pytest.raises(TrainingError, match="workers 2"):
        verification.check([*results(made()), died])
    with pytest.raises(UsageError, match="nothing was verified"):
        verification.check([refused])


def checked(found: Record, other_rounding: Record) -> table.Result:
    """The result of a topology beside a control."""
    (result,) = results(found)
    own = control.of(compare(made(), other_rounding, TOLERANCES), made())
    return dataclasses.replace(result, control=own)


def late(share: float) -> Record:
    """A record whose loss deviates in the last step."""
    return made(loss=made().loss * np.array([1.0, 1.0, 1.0, 1.0 + share]))


def test_a_deviation_that_one_replica_has_from_itself_is_amplified_rounding_and_passes():
    for own in (3e-5, 6e-6):  # within its tolerance or not
        result = checked(late(2e-5), late(own))
        assert result.outcome == "amplified rounding"
        verification.check([result])
    (remark,) = result.remarks
    assert remark.startswith("mirrored 2: amplified rounding: loss off by 2e-05 at step 4")
    assert remark.endswith("the control is off by 6.0e-06")


def test_a_larger_one_or_one_in_another_quantity_stays_exceeded_and_says_what_to_do():
    weights = state(**{"model/dense/kernel": np.float32([[0.5, 7.0]])})
    for result in (checked(late(1.3e-4), late(3e-5)), checked(weights, late(3e-5)), checked(late(2e-5), made())):
        assert result.outcome == "EXCEEDED"
        with pytest.raises(TrainingError, match=r"Rounding does not explain it: .* fewer verify.steps, or with train"):
            verification.check([result])


def test_only_what_may_have_grown_from_rounding_is_put_to_the_control():
    at_once = made(loss=made().loss * (1 + 2e-5))
    other_skips = made(finite=np.array([1.0, 1.0, 0.0, 1.0]))
    other_bits = made(digests=({"model/dense/kernel": "a"}, {"model/dense/kernel": "b"}))
    infinite = state(**{"model/dense/kernel": np.float32([[np.inf, 1]])})
    for found in (at_once, other_skips, other_bits, infinite):
        (result,) = results(found)
        assert not verification.may_be_rounding(result, made())
    assert verification.may_be_rounding(results(late(2e-5))[0], made())
    # Where the first step is skipped, nothing has been updated before the second.
    skipped = made(finite=np.array([0.0, 1.0, 1.0, 1.0]))
    second = made(loss=made().loss * np.array([1.0, 1.001, 1.0, 1.0]), finite=skipped.finite)
    assert not control.may_be_rounding(compare(skipped, second, TOLERANCES), skipped)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (made(loss=made().loss * 1.1), "depend on an example's place in its batch"),
        (made(finite=np.array([1.0, 1.0, 0.0, 1.0])), "rounding decides there which steps overflow"),
    ],
)
def test_a_control_with_the_defect_in_it_excuses_nothing(own, why):
    result = checked(late(2e-5), own)
    assert result.outcome == "EXCEEDED"
    with pytest.raises(TrainingError, match=f"the control cannot be used: .*{why}"):
        verification.check([result])


@pytest.mark.parametrize("groups", [(), (4,), (2, 4), (4, 6)])
def test_the_rows_of_a_group_stay_together_in_the_control(groups):
    order = np.asarray(control.legal_order(24, groups, [0, 7]))
    assert sorted(order) == list(range(24))
    assert order.tolist() != list(range(24))
    for size in groups:
        for rows in order.reshape(-1, size):
            assert len({row // size for row in rows}) == 1
    assert order.tolist() != np.asarray(control.legal_order(24, groups, [0, 8])).tolist()


@pytest.mark.nightly  # a whole verification: test_verify_command.py
def test_the_first_step_of_the_control_is_that_of_the_recipe_also_with_groups():
    params = ["train.steps = 2", "train.global_batch_size = 32"]
    params += ["image_classification.model = @two_convolutions", "two_convolutions.group_size = 8"]
    plain = build_session("resnet_cpu.gin", params)
    expected = plain.trainer.train(plain.trainer.batches(plain.plan.data), 2)
    built = build_session("resnet_cpu.gin", params)
    data = control.install(built)
    found = built.trainer.train(built.trainer.batches(data), 2)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
    np.testing.assert_allclose(found.gradient_norm, expected.gradient_norm, rtol=1e-4)
    first, other = (next(built.trainer.batches(one, start_step=0))["label"] for one in (built.plan.data, data))
    assert not np.array_equal(first, other), "else this test shows nothing"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["plain", "terminal"])
def test_the_table_shows_every_topology_and_says_what_is_wrong(stream, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    refused = table.Result(topology=Topology(microbatches=3), seconds=1.0, failure=Refused("128 cannot be split"))
    shown = [*results(made(), made(finite=np.zeros(STEPS))), refused]
    console = make_console(total_steps=STEPS, stream=stream)
    table.show(shown, TOLERANCES, console, stream)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    for expected in ("tolerance", "1.0e-05", "mirrored 2", "differ !", "EXCEEDED", "128 cannot be split", *QUANTITIES):
        assert expected in text, expected
    assert "mirrored 3: skipped steps: step 1 has 1, on one replica 0" in text


# ------------------------------------------------------------------------------------------------------------ settings


def test_topologies_follow_the_settings_and_the_recipes_own_microbatches():
    assert [one.name for one in VerifySettings(replicas=2, workers=(2, 3), microbatches=()).topologies(4)] == [
        "mirrored 2",
        "workers 2",
        "workers 3",
        "microbatches 4",
    ]
    for settings in ({"replicas": 1}, {"steps": 0}, {"timeout_seconds": 0.0}, {"devices": "tpu"}):
        with pytest.raises(UsageError, match=f"verify.{next(iter(settings))}"):
            VerifySettings(**settings)
    with pytest.raises(UsageError, match="nothing to verify"):
        VerifySettings(replicas=(), workers=(), microbatches=()).topologies(1)


def test_sixteen_bits_get_wider_tolerances_than_float32_and_float16_no_wider_than_bfloat16():
    exact, half, brain = (
        dataclasses.astuple(for_policy(policy)) for policy in ("float32", "mixed_float16", "mixed_bfloat16")
    )
    assert all(a < b <= c for a, b, c in zip(exact, half, brain, strict=True))
    assert for_policy("float32").loss <= 1e-5


# ----------------------------------------------------------------------------------------------------------- processes


def job(tmp_path, **changes) -> TrainingJob:
    plain = TrainingJob(
        gin_files=("absent.gin",),
        gin_params=(),
        seed=0,
        deterministic=False,
        topology=Topology(workers=2),
        steps=1,
        folder=str(tmp_path),
    )
    return dataclasses.replace(plain, **changes)


def test_workers_get_addresses_and_gpus_of_their_own_and_nothing_of_an_outer_cluster():
    outer = {"TF_CONFIG": "{}", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "4,7"}
    (alone,) = processes.environments(Topology(replicas=2), outer, num_gpus=0)
    assert alone == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "-1"}
    first, second = processes.environments(Topology(workers=2), outer, num_gpus=2)
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("4", "7")
    clusters = [json.loads(one["TF_CONFIG"]) for one in (first, second)]
    assert [one["task"]["index"] for one in clusters] == [0, 1]
    assert len(set(clusters[0]["cluster"]["worker"])) == 2
    with pytest.raises(Refused, match="2 workers need a GPU each"):
        processes.environments(Topology(workers=2), outer, num_gpus=1)


def children() -> set[psutil.Process]:
    return {*psutil.Process().children(recursive=True)}


def test_a_process_that_ends_badly_takes_the_others_along_and_its_last_lines_are_kept(tmp_path, monkeypatch):
    script = "import os, sys, time; index = os.environ['TF_CONFIG'].rindex('1') > os.environ['TF_CONFIG'].rindex('x')"
    worker = tmp_path / "worker"
    worker.write_text(
        f"#!{sys.executable}\n{script}\nprint('the reason', flush=True)\nif index: sys.exit(3)\nsys.stdin.read()\n"
    )
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    before = children()
    with pytest.raises(Died, match=r"worker 1 ended with exit code 3\n  \| the reason"):
        processes.run(job(tmp_path), num_gpus=0, timeout_seconds=60)
    assert children() <= before


def test_processes_that_do_not_end_in_time_are_ended(tmp_path, monkeypatch):
    worker = tmp_path / "worker"
    worker.write_text(f"#!{sys.executable}\nimport sys\nsys.stdin.read()\n")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    before = children()
    with pytest.raises(Died, match=r"worker 0 did not end within verify\.timeout_seconds = 0\.2, without a word"):
        processes.run(job(tmp_path), num_gpus=0, timeout_seconds=0.2)
    assert children() <= before
