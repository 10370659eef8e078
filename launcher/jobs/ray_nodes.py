"""Nodes of a Ray cluster as hosts: Ray chooses one for each worker, and another when it is lost.

What runs here for each, `python -m launcher.jobs.ray_nodes`, is a driver of Ray: its actor on the node runs the agent,
and ends with the driver. The placement group outlives each driver: a detached actor has it for as long as one asks.
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from launcher.errors import EXIT_DONE, EXIT_RETRY, EXIT_USAGE, LauncherError, PeerError, UsageError
from launcher.jobs.transports import PLACE, Host, Refusal, Transport
from launcher.machine import installation

_SAYS = "ray: "
_KEPT_SECONDS, _PLACING_SECONDS, _TURN_SECONDS, _CHUNK_BYTES = 10, 5, 0.1, 65536


def transport(workers: int, resources: str) -> Transport:
    """The transport to so many nodes of the Ray cluster that this host is of."""
    if not re.fullmatch(r"([\w./:-]+=[1-9]\d*(,(?!$)|$))+", resources):
        raise UsageError(f"--ray_resources={resources}: write NAME=NUMBER, as in CPU=8,GPU=4")
    hosts = tuple(Host(name=f"ray node {rank}", address=f"<ray node {rank}>") for rank in range(workers))
    words = (f"launcher-{uuid.uuid4().hex[:12]}", str(workers), resources)
    return Transport(hosts, (sys.executable, "-m", "launcher.jobs.ray_nodes", *words, "{index}", "{command}"), _explain)


def _explain(host: Host, exit_code: int, lines: Sequence[str]) -> Refusal | None:
    """The driver's own words; whatever else there is, is the command's."""
    said = [line.removeprefix(_SAYS) for line in lines if line.startswith(_SAYS)]
    return Refusal(message=said[-1], is_mistake=exit_code == EXIT_USAGE) if said else None


class _Keeper:
    def __init__(self, bundles: list[dict[str, float]]):
        import ray

        self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        self.group()

    def group(self) -> Any:
        signal.alarm(_KEPT_SECONDS)  # ends this process, and Ray removes the group
        return self._group


class _Program:
    def __init__(self, command: Sequence[str]):
        import ray

        address = ray.util.get_node_ip_address()
        environ = {**os.environ, PLACE: json.dumps({"name": f"ray node {address}", "address": address})}
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process: Any = subprocess.Popen(command, bufsize=0, env=environ, start_new_session=True, **pipes)

    def talk(self, said: bytes) -> tuple[bytes, bytes, int | None]:
        """Tells it something; what it has printed meanwhile, at the end its exit code."""
        os.write(self._process.stdin.fileno(), said)
        streams = [self._process.stdout, self._process.stderr]
        ready, _, _ = select.select(streams, [], [], _TURN_SECONDS)
        printed, errors = (os.read(stream.fileno(), _CHUNK_BYTES) if stream in ready else b"" for stream in streams)
        return printed, errors, None if printed or streams[0] not in ready else self._process.wait()


def main(name: str, workers: str, resources: str, index: str, *command: str) -> int:
    """Runs a command on a node with the standard streams of this process, and returns its exit code."""
    ray: Any = installation.required("ray", by="--backend=ray", extra="ray")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    target = os.dup(1)
    os.dup2(2, 1)  # nothing of Ray's may get into the connection
    address, is_set, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    try:
        if is_set:  # Ray itself would try for minutes
            socket.create_connection((address, int(port)), _KEPT_SECONDS).close()
        ray.init("auto", namespace="launcher", logging_level="ERROR", log_to_driver=False)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ray job stop sends it to all; the supervisor lets workers save
    except (OSError, RuntimeError, ValueError) as error:
        where = f"RAY_ADDRESS={address}{is_set}{port}: {error}"
        raise UsageError(f"no Ray cluster ({where}); run this on a node of one, as ray job submit does") from None
    bundle = {key: float(number) for key, number in (word.split("=") for word in resources.split(","))}
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": name, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
    keeper = ray.remote(_Keeper).options(**options, scheduling_strategy=here).remote([bundle] * int(workers))

    def hold() -> None:
        gone = select.poll()
        gone.register(0, 0)
        while not gone.poll(1000):
            keeper.group.remote()
        ray.kill(keeper)  # the supervisor has ended
        os._exit(EXIT_RETRY)

    threading.Thread(target=hold, daemon=True).start()
    exit_code = None
    try:
        group = ray.get(keeper.group.remote())
        if not group.wait(_PLACING_SECONDS):
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            fit = sum(all(node.get(key, 0) >= number for key, number in bundle.items()) for node in nodes)
            shown = {key: n for key, n in sorted(ray.cluster_resources().items()) if not re.search(":|memory", key)}
            total = ", ".join(f"{key}={n:g}" for key, n in shown.items())
            there = f"{fit} of its {len(nodes)} nodes have that at all, and all together {total}"
            raise PeerError(f"Ray has no {workers} free nodes with {resources}: {there}")
        place = PlacementGroupSchedulingStrategy(group, int(index))
        share = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}  # whose GPUs it may see
        program = ray.remote(_Program).options(**share, scheduling_strategy=place).remote(command)
        while exit_code is None:
            said = os.read(0, _CHUNK_BYTES) if select.select([0], [], [], 0)[0] else b""
            printed, errors, exit_code = ray.get(program.talk.remote(said))
            os.write(target, printed)
            os.write(2, errors)
        if exit_code == EXIT_DONE:
            ray.kill(keeper)  # the job has ended
        return exit_code
    except ray.exceptions.RayError as error:
        raise PeerError(" ".join(str(error).split())) from None


if __name__ == "__main__":
    try:
        exit_code = main(*sys.argv[1:])
    except LauncherError as error:
        sys.stderr.write(f"{_SAYS}{error}\n")
        exit_code = error.exit_code
    os._exit(exit_code)  # Ray's farewell may wait for what is gone
