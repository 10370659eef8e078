"""The outer loop goes on while a checkpoint is being written, and what is written is the state of its step."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import small_run

from launcher.checkpoints import CheckpointStore, CheckpointWriteError, Saver, store
from launcher.errors import Preempted
from launcher.reporting.reporter import Reporter
from launcher.reporting.summary import Stopwatch
from launcher.run.actions.base import Action
from launcher.run.controller import Controller
from launcher.run.loop import Loop
from launcher.run.start.starting_point import StartingPoint

pytestmark = pytest.mark.slow

STEPS, EVERY, EXAMPLES, FEATURES = 12, 3, 4, 5
DEADLINE_SECONDS = 60


def session(replicas: int = 1, **recipe):
    rows = np.random.default_rng(0).standard_normal((STEPS, EXAMPLES, FEATURES))
    task = small_run.GivenTask(
        small_run.linear_batches(rows), lambda: small_run.linear_model(FEATURES), small_run.negative_sum
    )
    return small_run.build(
        task,
        replicas,
        optimizer=lambda: small_run.descent(0.1, momentum=0.9),
        checkpoint_every=EVERY,
        checkpoints={"every_minutes": 0, "keep": 100},
        steps_per_loop=1,
        **recipe,
    )


def controller(made, model_dir: Path, **options):
    """A controller that saves under `model_dir`, and the store it saves to."""
    stop_requested = options.pop("stop_requested", lambda: False)
    evaluate = options.pop("evaluate", False)
    actions = options.pop("actions", ())
    checkpoints = CheckpointStore(str(model_dir / "checkpoints"), keep=100)
    reporter = Reporter(model_dir=str(model_dir), total_steps=STEPS, is_chief=True)
    made_controller = Controller(
        made,
        StartingPoint(),
        saver=Saver(checkpoints, warn=reporter.note, **options),
        reporter=reporter,
        stopwatch=Stopwatch(),
        evaluates=evaluate,
        actions=actions,
        stop_requested=stop_requested,
    )
    made_controller.prepare()
    return made_controller, checkpoints


def assert_same_checkpoints(found: CheckpointStore, expected: CheckpointStore) -> None:
    assert found.steps() == expected.steps()
    for step in expected.steps():
        wanted, got = expected.read(step), found.read(step)
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert got[name].tobytes() == value.tobytes(), f"{name} at step {step}"


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_go_on_while_a_slow_disk_writes_the_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    undisturbed, expected = controller(session(replicas), tmp_path / "undisturbed", asynchronous=False)
    undisturbed.train()

    made = session(replicas)
    ahead, write = threading.Condition(), store.write_checkpoint
    train = made.trainer.train
    steps_when_written = {}

    def train_and_tell(*arguments):
        records = train(*arguments)
        with ahead:
            ahead.notify_all()
        return records

    def write_when_training_has_gone_on(directory, step, *rest):
        with ahead:
            goes_on = ahead.wait_for(lambda: made.trainer.step >= min(step + 2, STEPS), DEADLINE_SECONDS)
        assert goes_on, "no step was taken while the disk was writing"
        steps_when_written[step] = made.trainer.step
        return write(directory, step, *rest)

    monkeypatch.setattr(made.trainer, "train", train_and_tell)
    monkeypatch.setattr(store, "write_checkpoint", write_when_training_has_gone_on)
    disturbed, found = controller(made, tmp_path / "disturbed", asynchronous=True)
    disturbed.train()
    assert list(steps_when_written) == [3, 6, 9, 12]
    assert all(steps_when_written[step] >= step + 2 for step in (3, 6, 9))
    assert_same_checkpoints(found, expected)


def test_a_failed_write_stops_training_before_its_end(tmp_path: Path) -> None:
    made = session()
    run, _ = controller(made, tmp_path)
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match=r"step 3 .*run the same command again"):
        run.train()
    assert 3 <= made.trainer.step <= 6, "the next save comes at step 6, and no later may the failure show"


def test_a_failed_write_may_let_training_go_on_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = session()
    run, _ = controller(made, tmp_path, on_error="continue")
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match="step 12"):
        run.train()
    assert made.trainer.step == STEPS
    printed = capsys.readouterr().out
    assert [f"checkpoint of step {step} " in printed for step in (3, 6, 9)] == [True] * 3


def test_a_run_asked_to_stop_ends_when_its_step_is_whole(tmp_path: Path) -> None:
    made = session()
    run, checkpoints = controller(made, tmp_path, stop_requested=lambda: made.trainer.step >= 5)
    with pytest.raises(Preempted, match="step 5 of 12 is saved"):
        run.train()
    assert checkpoints.latest() == 5


def test_a_run_asked_to_stop_does_not_wait_where_freeing_an_iterator_waits_for_data(
    tmp_path: Path, monkeypatch
) -> None:
    run, _ = controller(session(), tmp_path, stop_requested=lambda: True)
    data_comes, freed_by = threading.Event(), []

    class Batches:
        def __del__(self):
            assert data_comes.wait(DEADLINE_SECONDS)
            freed_by.append(threading.current_thread())

    asked = run._agree

    def agree(seconds: float) -> float:
        batches = Batches()  # as an evaluation's frame holds an iterator
        return asked(seconds) if batches else seconds

    monkeypatch.setattr(run, "_agree", agree)
    with pytest.raises(Preempted):
        run.train()
    assert not freed_by
    (freeing,) = (thread for thread in threading.enumerate() if thread.name == "iterators")
    data_comes.set()
    freeing.join(DEADLINE_SECONDS)
    assert freed_by == [freeing]


def test_in_the_middle_of_steps_a_request_waits_for_their_end_but_not_for_ever(tmp_path: Path) -> None:
    made, answers = session(), []

    class Ask(Action):
        def took(self, records) -> None:
            answers.append([bool(run.leave(seconds)) for seconds in (0.0, 14.0, 16.0)])

    run, checkpoints = controller(made, tmp_path, actions=[Ask()])
    run.train()
    # Before the first step has ended there is nothing to lose.
    assert answers == [[True, True, True], *[[False, False, True]] * (STEPS - 1)]
    assert checkpoints.latest() == STEPS and run.leave(1e6) is None


def test_the_best_checkpoint_is_the_one_a_synchronous_run_finds(tmp_path: Path) -> None:
    records = {}
    for asynchronous in (False, True):
        made = session(evaluate_every=2)
        run, checkpoints = controller(made, tmp_path / str(asynchronous), asynchronous=asynchronous, evaluate=True)
        run.train()
        records[asynchronous] = checkpoints.best_record()
        assert checkpoints.best() == records[asynchronous].step
    assert records[True] == records[False]


def test_loops_grow_with_quick_steps_and_end_at_every_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 130
    rows = np.random.default_rng(0).standard_normal((steps, EXAMPLES, FEATURES))

    def trained(steps_per_loop) -> tuple[list[int], np.ndarray]:
        task = small_run.GivenTask(
            small_run.linear_batches(rows), lambda: small_run.linear_model(FEATURES), small_run.negative_sum
        )
        made = small_run.build(
            task,
            optimizer=lambda: small_run.descent(0.1, momentum=0.9),
            log_every=60,
            checkpoint_every=40,
            checkpoints={"every_minutes": 0},
            steps_per_loop=steps_per_loop,
        )
        train, ends = made.trainer.train, []

        def train_and_note(batches, num_steps):
            records = train(batches, num_steps)
            ends.append(made.trainer.step)
            return records

        monkeypatch.setattr(made.trainer, "train", train_and_note)
        run, _ = controller(made, tmp_path / str(steps_per_loop), asynchronous=False)
        run.train()
        return ends, made.model.trainable_variables[0].numpy()

    ends, weights = trained("auto")
    assert {40, 60, 80, 120, steps} <= set(ends)
    assert len(ends) < len(trained(10)[0])
    _, one_by_one = trained(1)
    assert weights.tobytes() == one_by_one.tobytes()


def test_the_length_of_loops_follows_what_all_workers_took() -> None:
    loop = Loop("auto")
    lengths = []
    for seconds in (0.0, 0.1, 0.1, 0.2, 0.4, 1.0, 3.0, 3.0):
        loop.choose(seconds)
        lengths.append(loop.steps)
    assert lengths == [1, 2, 4, 8, 16, 16, 8, 4]
    bound = Loop(7)
    for _ in range(4):
        bound.choose(0.1)
    assert bound.steps == 7
