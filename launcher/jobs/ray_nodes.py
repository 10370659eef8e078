"""Nodes of a Ray cluster as hosts: Ray chooses one a worker, and another when it is lost.

What runs here for each host, `python -m launcher.jobs.ray_nodes`, is a driver of Ray. An actor of it, on the host's
bundle of the job's placement group, runs the agent, whose streams travel by the actor's methods; actors end with their
driver. The placement group is for all drivers and outlives each: a detached actor has it, until none asks for it.

Its classes run on the nodes, in Ray's interpreter there, which need not have the launcher.
"""

import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from absl import flags

from launcher.errors import EXIT_DONE, EXIT_RETRY, EXIT_USAGE, UsageError
from launcher.jobs.transports import PLACE, Host, Refusal
from launcher.machine import installation

FLAGS = {
    "ray_resources": (flags.DEFINE_string, "CPU=1", "What Ray keeps for each worker on its node, such as CPU=8,GPU=4."),
}  # fmt: skip

_SAYS = "ray: "
_NAMESPACE = "launcher"
_TURN_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
_CHUNK_BYTES = 65536


class Ray:
    """Runs commands on the nodes of the Ray cluster that this host is of, or RAY_ADDRESS names: one worker a node.

    Fewer nodes than `least` that could ever have the resources are a mistake.
    """

    def __init__(self, workers: int, resources: str, least: int | None = None):
        _bundle(resources)
        self.hosts = tuple(Host(name=f"ray node {rank}", address=f"<ray node {rank}>") for rank in range(workers))
        found = importlib.util.find_spec("ray")
        self.missing = "" if found else f"--backend=ray needs ray, which is not installed: {installation.command('ray')}"
        self._words = (f"launcher-{uuid.uuid4().hex[:12]}", str(workers), str(least or workers), resources)

    def argv(self, host: Host, command: Sequence[str]) -> tuple[str, ...]:
        index = str(self.hosts.index(host))
        return (sys.executable, "-m", "launcher.jobs.ray_nodes", *self._words, index, *command)

    def explain(self, host: Host, exit_code: int, lines: Sequence[str]) -> Refusal | None:
        """What the driver says; whatever else there is, is the command's."""
        said = [line.removeprefix(_SAYS) for line in lines if line.startswith(_SAYS)]
        return Refusal(message=said[-1], is_mistake=exit_code == EXIT_USAGE) if said else None


def _bundle(resources: str) -> dict[str, float]:
    try:
        bundle = {name: float(number) for name, number in (word.split("=") for word in resources.split(","))}
    except ValueError:
        bundle = {}
    if not bundle or not all(name and 0 < number < float("inf") for name, number in bundle.items()):
        raise UsageError(f"--ray_resources={resources}: write NAME=NUMBER, as in CPU=8,GPU=4")
    return bundle


class Keeper:
    """Has the placement group of a job, until no driver has asked for it for some time."""

    def __init__(self, bundles: list[dict[str, float]]):
        import ray

        self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        self._asked_at = time.monotonic()
        threading.Thread(target=self._wait, daemon=True).start()

    def group(self) -> Any:
        self._asked_at = time.monotonic()
        return self._group

    def _wait(self) -> None:
        while time.monotonic() - self._asked_at < _PATIENCE_SECONDS:
            time.sleep(_TURN_SECONDS)
        os._exit(EXIT_DONE)  # Ray removes the group


class Program:
    """A program on a node, which is told where that is; its input closes when this actor ends."""

    def __init__(self, command: Sequence[str]):
        import ray

        address = ray.util.get_node_ip_address()
        environ = {**os.environ, PLACE: json.dumps({"name": f"ray node {address}", "address": address})}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process = subprocess.Popen(command, **pipes, bufsize=0, env=environ, start_new_session=True)

    def write(self, content: bytes) -> None:
        self._process.stdin.write(content)

    def read(self, stream: str) -> bytes:
        """What it has printed; nothing at its end."""
        return os.read(getattr(self._process, stream).fileno(), _CHUNK_BYTES)

    def wait(self) -> int:
        return self._process.wait()


def main(name: str, workers: str, least: str, resources: str, index: str, *command: str) -> int:
    """Runs a command on a node with this process's standard streams, and returns its exit code."""
    target = os.dup(1)
    os.dup2(2, 1)  # nothing of Ray's may get into the connection
    threading.excepthook = lambda _: None  # what ends a thread ends the main one, which has words for it
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    def say(exit_code: int, what: str) -> int:
        sys.stderr.write(f"{_SAYS}{' '.join(what.split())}\n")
        return exit_code

    bundle = _bundle(resources)
    try:
        ray.init("auto", namespace=_NAMESPACE, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:  # no cluster, or of another version
        return say(EXIT_USAGE, f"no Ray cluster can be used: {error}. Run this on one of its nodes, by ray job submit")
    try:
        keeper = ray.get_actor(name)
    except ValueError:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fit = sum(all(node.get(key, 0) >= number for key, number in bundle.items()) for node in nodes)
        if fit < int(least):
            shown = "; ".join(", ".join(f"{key}={node[key]:g}" for key in sorted(node) if ":" not in key and "memory" not in key) for node in nodes)
            return say(
                EXIT_USAGE,
                f"--workers={workers} needs {least} nodes with {resources}; of the {len(nodes)} nodes of Ray's cluster {fit} have it "
                f"({shown})",
            )
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": name, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
        keeper = ray.remote(Keeper).options(**options, scheduling_strategy=here).remote([bundle] * int(workers))
    try:
        place = PlacementGroupSchedulingStrategy(ray.get(keeper.group.remote()), int(index))
        share = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}  # Ray names its GPUs to it
        program = ray.remote(Program).options(**share, max_concurrency=8, scheduling_strategy=place).remote(command)

        def hold() -> None:
            gone = select.poll()
            gone.register(0, 0)
            while not gone.poll(_TURN_SECONDS * 1000):
                keeper.group.remote()
            ray.kill(keeper)  # nobody is at the other end
            os._exit(EXIT_RETRY)

        def feed() -> None:
            while content := os.read(0, _CHUNK_BYTES):
                ray.get(program.write.remote(content))

        def carry(stream: str, to: int) -> None:
            while content := ray.get(program.read.remote(stream)):
                os.write(to, content)

        for work, *arguments in ((hold,), (feed,), (carry, "stderr", 2)):
            threading.Thread(target=work, args=arguments, daemon=True).start()
        carry("stdout", target)
        code = ray.get(program.wait.remote())
        if code == EXIT_DONE:
            ray.kill(keeper)
        return code
    except ray.exceptions.RayError as error:
        return say(EXIT_RETRY, f"{error}")


if __name__ == "__main__":
    exit_code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(exit_code)  # Ray's own farewell may wait for what is gone
