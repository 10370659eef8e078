"""Workers that strangers can reach are named before they start."""

from __future__ import annotations

import json
from types import SimpleNamespace

import psutil
import pytest

from launcher.machine import strategy
from launcher.machine.cluster import resolve
from launcher.machine.devices import Devices
from launcher.machine.ports import public_address_notes


@pytest.mark.parametrize(
    ("workers", "interfaces", "named"),
    [
        (["10.0.0.7:2222", "10.0.0.8:2222"], [], None),
        (["10.0.0.7:2222", "8.8.8.8:2222"], [], "8.8.8.8"),
        (["[2001:4860:4860::8888]:2222", "[fd00::1]:2222"], [], "2001:4860:4860::8888"),
        (["127.0.0.1:2222", "127.0.0.1:2223"], ["8.8.4.4"], "8.8.4.4"),
        (["a:2222", "b:2222"], ["2001:4860:4860::8844"], "2001:4860:4860::8844"),
        (["a.example.com:2222", "b.example.com:2222"], [], None),
        (["8.8.8.8:2222"], ["8.8.4.4"], None),
    ],
)
def test_public_addresses_of_workers_and_of_this_host_are_named(monkeypatch, workers, interfaces, named):
    addresses = ["127.0.0.1", "10.0.0.7", "fe80::1%eth0", "02:fc:00:00:00:01", *interfaces]
    own = {"eth0": [SimpleNamespace(address=address) for address in addresses]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: own)
    notes = public_address_notes(workers)
    assert len(notes) == (named is not None)
    assert all(named in note and "firewall" in note for note in notes)


def test_the_plan_says_so():
    config = {"cluster": {"worker": ["8.8.8.8:2222", "10.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}
    environ = {"TF_CONFIG": json.dumps(config)}
    plan = strategy.plan(
        requested="auto", replicas=None, tpu=None, cluster=resolve(environ), environ=environ, devices=Devices()
    )
    assert any("8.8.8.8" in note and "firewall" in note for note in plan.notes)
