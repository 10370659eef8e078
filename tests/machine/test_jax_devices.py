"""What JAX raises is a peer's failure where there are peers, and JAX names what broke between them."""

from __future__ import annotations

import pytest

from launcher.errors import PeerError
from launcher.machine.jax_devices import JaxDevices


def raised(error, num_processes):
    devices = JaxDevices(jax=None, all=(), local=(), num_processes=num_processes)
    with pytest.raises(Exception) as caught, devices.peer_failures(" in a step"):
        raise error
    return caught.value


def test_a_broken_connection_between_processes_is_a_peers_failure():
    found = raised(RuntimeError("UNAVAILABLE: Gloo all-reduce failed\nmore"), 2)
    assert isinstance(found, PeerError)
    assert str(found) == "another worker went away in a step: UNAVAILABLE: Gloo all-reduce failed"


@pytest.mark.parametrize(
    ("message", "num_processes"), [("UNAVAILABLE: the device is gone", 1), ("RESOURCE_EXHAUSTED: out of memory", 2)]
)
def test_nobody_else_is_blamed_for_what_is_this_process_own(message, num_processes):
    error = RuntimeError(message)
    assert raised(error, num_processes) is error
