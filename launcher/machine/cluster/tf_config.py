"""The cluster in TensorFlow's own variable, TF_CONFIG."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import UsageError
from launcher.machine.cluster.claim import Claim

EXAMPLE = 'TF_CONFIG=\'{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}\''
# Rank order: the chief, where there is one, is rank 0.
_JOBS = ("chief", "worker")
# A name, an IPv4 address or a bracketed IPv6 address, and a port.
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def claim(environ: Mapping[str, str]) -> Claim | None:
    """The claim of TF_CONFIG; None where it is not set, UsageError where it is nothing of the kind or not coherent."""
    given = environ.get("TF_CONFIG", "")
    if not given.strip():
        return None
    try:
        config = json.loads(given)
    except json.JSONDecodeError as error:
        raise _wrong(f"not JSON ({error}): {_shortened(given)}") from None
    if not isinstance(config, dict):
        raise _wrong(f"expected a JSON object, got {_shortened(given)}")
    workers = _workers(config)
    return Claim(
        source="TF_CONFIG",
        to_train_alone="unset TF_CONFIG",
        num_workers=len(workers),
        index=_rank(config),
        evidence=f"TF_CONFIG={_shortened(given)}",
        marker="TF_CONFIG",
        addresses=lambda: workers,
    )


def of_worker(addresses: Sequence[str], rank: int) -> dict[str, str]:
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}
    return {"TF_CONFIG": json.dumps(config)}


def _wrong(problem: str) -> UsageError:
    return UsageError(f"TF_CONFIG: {problem}. A correct one: {EXAMPLE}; unset TF_CONFIG to train alone")


def _workers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Addresses in rank order, checked."""
    cluster: Any = config.get("cluster")
    is_known = isinstance(cluster, dict) and cluster.keys() <= {*_JOBS}
    if not is_known or not all(isinstance(addresses, list) for addresses in cluster.values()):
        raise _wrong(f'"cluster" must map "worker", or "chief" and "worker", to lists, got {json.dumps(cluster)}')
    workers = [address for job in _JOBS for address in cluster.get(job, [])]
    for address in workers:
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 0 < int(match["port"]) < 65536:
            raise _wrong(f'address {json.dumps(address)} is not "host:port" with a port from 1 to 65535')
        if workers.count(address) > 1:
            raise _wrong(f"address {address!r} is given {workers.count(address)} times; each worker needs its own")
    if not workers or len(cluster.get("chief", [])) > 1:
        raise _wrong(f'"cluster" must have one chief at most, and a worker at least, got {json.dumps(cluster)}')
    return tuple(workers)


def _rank(config: Mapping[str, Any]) -> int:
    """This process's place in the list that `_workers` returns."""
    cluster, task = config["cluster"], config.get("task")
    if not isinstance(task, dict) or task.get("type") not in _JOBS:
        raise _wrong(f'"task" must have a "type", "worker" or "chief", and an "index", got {json.dumps(task)}')
    kind, index = task["type"], task.get("index")
    count = len(cluster.get(kind, []))
    if type(index) is not int or not 0 <= index < count:
        raise _wrong(f'task index {json.dumps(index)}: "cluster" has {count} {kind}(s), and the index counts from 0')
    return index + (len(cluster.get("chief", [])) if kind == "worker" else 0)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
