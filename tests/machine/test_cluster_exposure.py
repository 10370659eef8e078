"""Workers that strangers can reach are named before they start."""

from __future__ import annotations

import json

import pytest

from launcher.machine import strategy
from launcher.machine.cluster import resolve
from launcher.machine.devices import Devices
from launcher.machine.ports import public_address_notes

FIB_TRIE = """\
Local:
  +-- 0.0.0.0/0 3 0 5
     |-- 127.0.0.1
        /32 host LOCAL
     |-- {0}
        /32 host LOCAL
     |-- 9.9.9.9
        /32 link BROADCAST
"""


@pytest.fixture
def proc(tmp_path):
    """proc(ipv4, ipv6): what a kernel with these interfaces lists."""

    def make(ipv4="10.0.0.7", ipv6="fe800000000000000000000000000001"):
        (tmp_path / "fib_trie").write_text(FIB_TRIE.format(ipv4))
        (tmp_path / "if_inet6").write_text(f"{ipv6} 02 40 20 80     eth0\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("workers", "interfaces", "named"),
    [
        (["10.0.0.7:2222", "10.0.0.8:2222"], {}, None),
        (["10.0.0.7:2222", "8.8.8.8:2222"], {}, "8.8.8.8"),
        (["[2001:4860:4860::8888]:2222", "[fd00::1]:2222"], {}, "2001:4860:4860::8888"),
        (["127.0.0.1:2222", "127.0.0.1:2223"], {"ipv4": "8.8.4.4"}, "8.8.4.4"),
        (["a:2222", "b:2222"], {"ipv6": "20014860486000000000000000008844"}, "2001:4860:4860::8844"),
        (["a.example.com:2222", "b.example.com:2222"], {}, None),
        (["8.8.8.8:2222"], {"ipv4": "8.8.4.4"}, None),
    ],
)
def test_public_addresses_of_workers_and_of_this_host_are_named(proc, workers, interfaces, named):
    notes = public_address_notes(workers, proc(**interfaces))
    assert len(notes) == (named is not None)
    assert all(named in note and "firewall" in note and "9.9.9.9" not in note for note in notes)


def test_the_plan_says_so():
    config = {"cluster": {"worker": ["8.8.8.8:2222", "10.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}
    environ = {"TF_CONFIG": json.dumps(config)}
    plan = strategy.plan(
        requested="auto", replicas=None, tpu=None, cluster=resolve(environ), environ=environ, devices=Devices()
    )
    assert any("8.8.8.8" in note and "firewall" in note for note in plan.notes)
