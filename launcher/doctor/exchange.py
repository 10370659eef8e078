"""The doctors of all workers talk to each other, each on the port of its worker while nothing else runs there.

They find out who can be reached, how far the clocks are apart (as NTP does, RFC 5905 section 8), and whether all of
them have the same cluster and the same versions. In the end each knows whether all reached all, so that all or none
go on to a collective, which waits for everyone.

A conversation is lines of JSON: "hello" (who are you), some "time", and "bye" with whether the asker reached all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from launcher.machine.cluster import Cluster

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_SAMPLES = 8
_LONGEST_LINE = 2**20
_PROTOCOL = "launcher doctor 1"

ANSWERED = "answered"
REFUSED = "refused"
TIMED_OUT = "timed out"
NOT_RESOLVED = "not resolved"
UNREACHABLE = "unreachable"
STRANGER = "stranger"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """What became of one worker, this one included.

    Attributes:
      index, address: which one.
      state: one of the constants above.
      detail: the system's words where it is not ANSWERED.
      offset_seconds: its clock minus this one's.
      delay_seconds: round trip of the best sample; the offset is right to half of it.
      facts: versions, as its doctor has them.
      workers: the cluster, as its doctor has it.
      claims_index: the rank that it gives itself.
      nonce: its doctor's own random name.
    """

    index: int
    address: str
    state: str
    detail: str = ""
    offset_seconds: float = 0.0
    delay_seconds: float = 0.0
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workers: tuple[str, ...] = ()
    claims_index: int = -1
    nonce: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """What came out of it.

    Attributes:
      peers: all workers in rank order, this one included.
      index: this one.
      nonce: this doctor's random name.
      facts: this doctor's.
      workers: this doctor's cluster.
      listen_error: why nothing could listen on this worker's port; empty without one.
      everyone: whether all workers reached all workers.
    """

    peers: tuple[Peer, ...]
    index: int
    nonce: str
    facts: Mapping[str, str]
    workers: tuple[str, ...]
    listen_error: str
    everyone: bool


def run(cluster: Cluster, *, facts: Mapping[str, str], wait_seconds: float) -> Exchange:
    """Listens, asks all workers at once, and comes back when all are done with each other or the time is over."""
    return asyncio.run(_Doctor(cluster, facts, wait_seconds).run())


class _Doctor:
    def __init__(self, cluster: Cluster, facts: Mapping[str, str], wait_seconds: float):
        self._cluster, self._facts, self._wait_seconds = cluster, facts, wait_seconds
        self._nonce = secrets.token_hex(8)
        self._byes: dict[int, bool] = {}
        self._bye_heard = asyncio.Event()

    async def run(self) -> Exchange:
        self._deadline = time.monotonic() + self._wait_seconds
        server, listen_error = await self._listen()
        calls = [_Call(self, index, address) for index, address in enumerate(self._cluster.workers)]
        try:
            peers = await asyncio.gather(*(call.ask() for call in calls))
            reached = not listen_error and all(self._is_in_place(peer) for peer in peers)
            await asyncio.gather(*(call.end(reached) for call in calls))
            everyone = reached and await self._all_say_so()
        finally:
            for call in calls:
                call.close()
            if server is not None:
                server.close()
        return Exchange(
            peers=tuple(peers),
            index=self._cluster.index,
            nonce=self._nonce,
            facts=self._facts,
            workers=self._cluster.workers,
            listen_error=listen_error,
            everyone=everyone,
        )

    async def _listen(self) -> tuple[asyncio.Server | None, str]:
        port = int(self._cluster.workers[self._cluster.index].rpartition(":")[2])
        try:
            return await asyncio.start_server(self._serve, host=None, port=port, limit=_LONGEST_LINE), ""
        except OSError as error:
            return None, f"port {port}: {error.strerror or error}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A connection may break or talk nonsense at any time, which is its caller's business. What is still open when
        # the time is over is cancelled, which asyncio of Python 3.11 would report as an error.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, asyncio.CancelledError):
            while line := await reader.readline():
                received = time.time()
                asked = json.loads(line)
                if asked["ask"] == "bye":
                    self._byes[asked["index"]] = bool(asked["reached_all"])
                    self._bye_heard.set()
                answer = self._hello() if asked["ask"] == "hello" else {"received": received, "sent": time.time()}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()

    def _is_in_place(self, peer: Peer) -> bool:
        return peer.state == ANSWERED and peer.claims_index == peer.index and peer.workers == self._cluster.workers

    def _hello(self) -> dict[str, Any]:
        return {
            "protocol": _PROTOCOL,
            "nonce": self._nonce,
            "index": self._cluster.index,
            "workers": self._cluster.workers,
            "facts": dict(self._facts),
        }

    async def _all_say_so(self) -> bool:
        """Waits until every other worker has said bye; whether all of them reached all."""
        others = set(range(self._cluster.num_workers)) - {self._cluster.index}
        while not others <= self._byes.keys():
            self._bye_heard.clear()
            try:
                # They may have begun later, and wait as long as this one would.
                await asyncio.wait_for(self._bye_heard.wait(), self.left + self._wait_seconds)
            except asyncio.TimeoutError:
                return False
        return all(self._byes[index] for index in others)

    @property
    def left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @property
    def index(self) -> int:
        return self._cluster.index


class _Call:
    """The conversation with one worker."""

    def __init__(self, doctor: _Doctor, index: int, address: str):
        self._doctor, self._index, self._address = doctor, index, address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> Peer:
        """Tries until it answers or the time is over."""
        while True:
            peer = await self._try()
            if peer.state == ANSWERED or self._doctor.left == 0:
                return peer
            self.close()
            await asyncio.sleep(min(_RETRY_SECONDS, self._doctor.left))

    async def _try(self) -> Peer:
        seconds = min(_CONNECT_SECONDS, max(self._doctor.left, _RETRY_SECONDS))
        try:
            self._streams = await self._connect(seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return self._without(TIMED_OUT, f"no answer within {seconds:.1g} s")
        except socket.gaierror as error:
            return self._without(NOT_RESOLVED, error.strerror or str(error))
        except UnicodeError as error:  # what Python says of a name such as a..b
            return self._without(NOT_RESOLVED, str(error))
        except ConnectionRefusedError as error:
            return self._without(REFUSED, error.strerror or str(error))
        except OSError as error:
            return self._without(UNREACHABLE, error.strerror or str(error))
        try:
            hello = await self._request({"ask": "hello"})
            if hello["protocol"] != _PROTOCOL:
                raise ValueError(f"it speaks {hello['protocol']!r}")
            offset, delay = min([await self._sample() for _ in range(_SAMPLES)], key=lambda sample: sample[1])
            return Peer(
                index=self._index,
                address=self._address,
                state=ANSWERED,
                offset_seconds=offset,
                delay_seconds=delay,
                facts=hello["facts"],
                workers=tuple(hello["workers"]),
                claims_index=hello["index"],
                nonce=hello["nonce"],
            )
        except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError) as error:
            return self._without(STRANGER, str(error) or f"no answer within {_ANSWER_SECONDS:g} s")

    async def _connect(self, seconds: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self._address.rpartition(":")
        connection = asyncio.open_connection(host.strip("[]"), int(port), limit=_LONGEST_LINE)
        return await asyncio.wait_for(connection, seconds)

    async def _request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()
        line = await asyncio.wait_for(reader.readline(), _ANSWER_SECONDS)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ValueError("it says something else" if line else "it hangs up")
        return answer

    async def _sample(self) -> tuple[float, float]:
        """Offset and delay in seconds, from the four times of one exchange."""
        before, started = time.time(), time.monotonic()
        answer = await self._request({"ask": "time"})
        after = before + (time.monotonic() - started)
        return offset_and_delay(before, answer["received"], answer["sent"], after)

    def _without(self, state: str, detail: str) -> Peer:
        return Peer(index=self._index, address=self._address, state=state, detail=detail)

    async def end(self, reached_all: bool) -> None:
        """Tells it whether this one reached all."""
        if self._streams is not None and self._index != self._doctor.index:
            with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):
                await self._request({"ask": "bye", "index": self._doctor.index, "reached_all": reached_all})

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def offset_and_delay(sent: float, received: float, answered: float, arrived: float) -> tuple[float, float]:
    """A peer's clock minus ours, and the time on the way, both in seconds (RFC 5905, section 8).

    Args:
      sent, arrived: by our clock.
      received, answered: by the peer's.
    """
    return ((received - sent) + (answered - arrived)) / 2, (arrived - sent) - (answered - received)
