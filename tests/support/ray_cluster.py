"""A real Ray on this machine while tests need it: nodes of one CPU on loopback addresses, the first with the head."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

MISSING = "" if importlib.util.find_spec("ray") else "Ray is not installed"
HEAD = "127.0.0.2"
_START = "import sys; from ray.scripts.scripts import main; sys.exit(main())"  # `ray` need not be on PATH
_SECONDS = 90
# A node that is lost is declared dead after two seconds, instead of half a minute.
_HEALTH = {"RAY_health_check_initial_delay_ms": "0", "RAY_health_check_period_ms": "500"}
_HEALTH |= {"RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "4"}


class RayCluster:
    """Nodes by their addresses; their files are in `folder`, whose path must be short."""

    def __init__(self, folder: Path, port: int):
        self.address = f"{HEAD}:{port}"
        self._folder = folder
        self._port = port
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, address: str) -> None:
        """Brings a node up, and waits until it is of the cluster."""
        head = [f"--port={self._port}", f"--temp-dir={self._folder}/ray", "--include-dashboard=false", "--head"]
        given = head if address == HEAD else [f"--address={self.address}"]
        log = self._folder / f"{address}.log"
        with log.open("wb") as output:
            self._nodes[address] = subprocess.Popen(
                [sys.executable, "-c", _START, "start", "--block", f"--node-ip-address={address}", "--num-cpus=1"]
                + ["--object-store-memory=80000000", "--disable-usage-stats", *given],
                env={**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, **_HEALTH},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _SECONDS
        while "Ray runtime started" not in log.read_text():
            assert self._nodes[address].poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def stop(self, address: str) -> None:
        """Takes a node away at once, with all that its Ray started but what has left it."""
        node = self._nodes.pop(address)
        for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()

    def free_cpus(self) -> float:
        """What no placement group and no actor has."""
        program = (
            "import ray; ray.init(logging_level='ERROR', log_to_driver=False); "
            "print('free', ray.available_resources().get('CPU', 0))"
        )
        environ = {**os.environ, "RAY_ADDRESS": self.address}
        done = subprocess.run([sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True)
        return float(re.search(r"^free (.*)$", done.stdout, re.MULTILINE)[1])  # among what Ray says of lost nodes

    def close(self) -> None:
        for address in reversed(list(self._nodes)):
            self.stop(address)
