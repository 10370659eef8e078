"""Batches on their way to JAX's devices: each goes before the step ahead of its own, and a step waits for its way."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from launcher.runtime.traits import Training
from launcher.step_program import pjrt_runtime

STEPS = 4


class OnDevice:
    """An array of JAX that is there once `ready` has returned."""

    def __init__(self, ready=lambda: None):
        self.addressable_shards = [SimpleNamespace(data=self)]
        self.block_until_ready = ready

    def __array__(self, dtype=None, copy=None):
        return np.zeros(2, np.float32)


class Machine:
    """Devices that copy slowly: batch 1 arrives, at 9 o'clock, after step 0 has been seen to end, at 1 o'clock.

    The other steps end after that.
    """

    def __init__(self, monkeypatch):
        self.hour, self.done = 1.0, []
        self.first_step_seen, self.arrived = threading.Event(), threading.Event()
        monkeypatch.setattr(pjrt_runtime.time, "monotonic", self.now)

    def now(self):
        hour = self.hour
        if threading.current_thread().name.startswith("steps"):
            self.first_step_seen.set()
        return hour

    def arrives(self):
        assert self.first_step_seen.wait(60)
        self.hour = 9.0
        self.arrived.set()

    def put(self, number):
        self.done.append(f"put {number}")
        return {"image": OnDevice(self.arrives) if number == 1 else OnDevice()}

    def step(self, held, batch):
        number = sum(one.startswith("step") for one in self.done)
        self.done.append(f"step {number}")
        return OnDevice((lambda: self.arrived.wait(60)) if number else (lambda: None))


def test_a_batch_is_put_there_ahead_of_the_step_before_and_a_step_waits_for_its_way(monkeypatch):
    machine = Machine(monkeypatch)
    devices = SimpleNamespace(peer_failures=lambda _: contextlib.nullcontext())
    runtime = SimpleNamespace(devices=devices, arrays={"step": 0}, batch=machine.put, take_state=lambda: None)
    loop = pjrt_runtime.PjrtLoop(runtime, None, Training(microbatches=1, seed=0, clock=lambda: None))
    loop.program_for = lambda parts: machine.step
    with ThreadPoolExecutor(1, "steps") as runtime.waiting, ThreadPoolExecutor(1, "batches") as runtime.arriving:
        table = loop.begin()(iter(range(STEPS)), STEPS)
    assert machine.done == ["put 0", "put 1", "step 0", "put 2", "step 1", "put 3", "step 2", "step 3"]
    assert table[:, -1].tolist() == [0.0, 8.0, 0.0, 0.0]
