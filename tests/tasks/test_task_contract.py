"""Any object with three methods is a task: it gets the defaults of the rest, and a slip in a name is told."""

from __future__ import annotations

import dataclasses
import types

import pytest

from launcher.errors import UsageError
from launcher.tasks.base import Task, complete


class Three:
    def data(self):
        return "data"

    def model(self):
        return "model"

    def loss(self, model, batch, training):
        return "loss"


def test_a_plain_class_gets_the_defaults_and_keeps_what_it_has():
    class Own(Three):
        nominal_weight_per_example = 7.0

        def notes(self, model, accelerator):
            return [accelerator]

    task = Own()
    assert complete(task) is task
    assert (task.nominal_weight_per_example, task.notes(None, "cpu")) == (7.0, ["cpu"])
    assert task.finish_metrics({"loss": 1.0}) == {"loss": 1.0}
    assert (task.callbacks(), task.assets(), task.served(None), task.logits_shape) == ((), {}, None, None)
    assert task.check() is None
    assert complete(task).data() == "data"


def test_objects_of_any_kind_are_tasks():
    three = Three()
    methods = {name: getattr(three, name) for name in ("data", "model", "loss")}
    assert complete(types.SimpleNamespace(**methods)).callbacks() == ()
    assert complete(dataclasses.make_dataclass("Frozen", [], bases=(Three,), frozen=True)()).callbacks() == ()
    slotted = type("Slotted", (), {"__slots__": (), **{name: vars(Three)[name] for name in methods}})
    with pytest.raises(UsageError, match=r"have it inherit launcher.tasks.base.Task"):
        complete(slotted())


def test_a_property_is_not_asked_for_its_value_before_its_time():
    class Later(Three):
        @property
        def result_names(self):
            raise RuntimeError("not yet")

    complete(Later())


def test_what_stands_for_another_task_has_what_that_one_has():
    class Wrapper(Three):
        def __init__(self, task):
            self._task = task

        def __getattr__(self, name):
            return getattr(self._task, name)

    inner = Three()
    inner.evaluation_metrics = ("bleu",)
    assert complete(Wrapper(inner)).evaluation_metrics == ("bleu",)


@pytest.mark.parametrize("base", [Three, type("Inheriting", (Three, Task), {})])
@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("finish_metric", lambda self, means: means, "finish_metrics"),
        ("optimiser", lambda self: None, "optimizer"),
        ("evaluation_metric", ("bleu",), "evaluation_metrics"),
        ("logit_shape", (3, 4), "logits_shape"),
    ],
)
def test_a_name_that_is_nearly_one_of_a_tasks_is_refused_with_the_right_one(base, name, value, meant):
    with pytest.raises(UsageError, match=f"asks for '{name}'; did you mean '{meant}'.*call it '_{name}'"):
        complete(type("Own", (base,), {name: value})())
    complete(type("Own", (base,), {f"_{name}": value})())


def test_names_of_ones_own_are_nobodys_business():
    own = {"losses": 1, "models": 2, "units": 3, "sample": lambda self: None, "vocabulary": 4}
    complete(type("Own", (Three,), own)())


def test_a_capability_that_is_begun_is_spelt_right():
    with pytest.raises(UsageError, match="did you mean 'samples'"):
        complete(type("Own", (Three,), {"num_samples": 3, "sample": lambda self, model, batch: ()})())


def test_a_task_without_one_of_the_three_is_none():
    with pytest.raises(UsageError, match=r"no method model\(\)"):
        complete(type("Own", (Task,), {"data": Three.data, "loss": Three.loss})())
