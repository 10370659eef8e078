"""Ports are given out only if a server on all addresses can have them."""

from __future__ import annotations

import contextlib
import socket

import pytest

from launcher.errors import UsageError
from launcher.machine import ports


def test_ports_are_different_and_can_be_listened_on():
    found = ports.free_ports(5)
    assert len(set(found)) == 5
    with contextlib.ExitStack() as stack:
        for port in found:
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", port))
            listener.listen()


def test_a_port_that_somebody_listens_on_is_not_free(monkeypatch):
    (port,) = ports.free_ports(1)
    monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(UsageError, match="1 workers need a port each, and 0 are free"):
            ports.free_ports(1)
