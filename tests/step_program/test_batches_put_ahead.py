"""Batches on their way to JAX's devices: each goes before the step ahead of its own, and a step waits for its way."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from launcher.data.pipeline import WEIGHT
from launcher.runtime.traits import Training
from launcher.step_program import device_arrays, pjrt_runtime

STEPS = 4


class OnDevice:
    """An array of JAX, on one device, that is there once `ready` has returned, or `seen` is set."""

    def __init__(self, ready=None, seen=None):
        self.ready, self.seen, self.addressable_shards = ready, seen, [SimpleNamespace(data=self)]

    def is_ready(self):
        return self.ready is None if self.seen is None else self.seen.is_set()

    def block_until_ready(self):
        if self.ready is not None:
            self.ready()

    def addressable_data(self, _):
        return np.zeros(2, np.float32)


class Machine:
    """Devices that copy slowly: batch 1 arrives, at 9 o'clock, after step 0 has been seen to end, at 1 o'clock.

    The other steps end after that.
    """

    def __init__(self, monkeypatch):
        self.hour, self.done = 1.0, []
        self.step_seen, self.arrived = threading.Event(), threading.Event()
        monkeypatch.setattr(device_arrays.time, "monotonic", self.now)

    def now(self):
        hour = self.hour
        if threading.current_thread().name.startswith("steps"):
            self.step_seen.set()
        return hour

    def arrives(self):
        assert self.step_seen.wait(60)
        self.hour = 9.0
        self.arrived.set()

    def put(self, number):
        self.done.append(f"put {number}")
        return {"image": OnDevice(self.arrives if number == 1 else None)}

    def step(self, number):
        return OnDevice(lambda: self.arrived.wait(60)) if number else OnDevice(lambda: None)


class SlowData(Machine):
    """Batches take an hour each to be made, and steps half of one; the devices have the host's memory."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.ends = [threading.Event() for _ in range(STEPS)]
        for last in self.ends[-2:]:  # behind which no batch is made
            last.set()

    def batches(self):
        for number in range(STEPS):
            if number > 1:
                self.step_seen.clear()
                self.hour += 0.5
                self.ends[number - 2].set()
                assert self.step_seen.wait(60)
            self.hour += 0.5 if number > 1 else 1.0
            yield number

    def put(self, number):
        return {"image": np.zeros(1)}

    def step(self, number):
        return OnDevice(lambda: self.ends[number].wait(60), self.ends[number])


class _Program:
    """What a machine does at each step."""

    changed = ()

    def __init__(self, machine):
        self.machine, self.steps = machine, itertools.count()

    def state(self, held):
        return [[], []]

    def taken_by(self, parts):
        return parts[0]["number"]

    def __call__(self, state, batch):
        number = next(self.steps)
        self.machine.done.append(f"step {number}")
        return self.machine.step(number)


def trained(machine, batches):
    """The numbers of `STEPS` steps, the last of each being the time that it waited for its batch."""
    devices = SimpleNamespace(peer_failures=lambda _: contextlib.nullcontext())
    state = SimpleNamespace(arrays={"step": 0}, take=lambda: None)
    runtime = SimpleNamespace(devices=devices, state=state, batch=machine.put)
    loop = pjrt_runtime.PjrtLoop(runtime, None, Training(microbatches=1, seed=0, clock=lambda: None))
    program = _Program(machine)
    loop.program_for = lambda parts: program
    with ThreadPoolExecutor(1, "steps") as runtime.waiting, ThreadPoolExecutor(1, "batches") as runtime.arriving:
        return loop.begin()(([{WEIGHT: np.ones(1), "number": number}] for number in batches), STEPS)


def test_a_batch_is_put_there_ahead_of_the_step_before_and_a_step_waits_for_its_way(monkeypatch):
    machine = Machine(monkeypatch)
    table = trained(machine, iter(range(STEPS)))
    assert machine.done == ["put 0", "put 1", "step 0", "put 2", "step 1", "put 3", "step 2", "step 3"]
    assert table[:, -1].tolist() == [0.0, 8.0, 0.0, 0.0]


def test_a_step_waits_for_a_batch_that_is_being_made_from_the_end_of_the_last_step(monkeypatch):
    machine = SlowData(monkeypatch)
    table = trained(machine, machine.batches())
    assert table[:, -1].tolist() == [1.0, 1.0, 0.5, 0.5]
