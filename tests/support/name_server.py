"""A name server that never answers for one host, as what looks names up meets it: a call that does not return."""

from __future__ import annotations

import contextlib
import socket
import threading
from unittest import mock


@contextlib.contextmanager
def silent(host):
    """A block in which the host is looked up without end; gives the event that somebody has begun to."""
    look_up, asked, over = socket.getaddrinfo, threading.Event(), threading.Event()

    def getaddrinfo(name, *arguments, **named):
        if name == host:
            asked.set()
            over.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return look_up(name, *arguments, **named)

    with mock.patch.object(socket, "getaddrinfo", getaddrinfo):
        try:
            yield asked
        finally:
            over.set()
