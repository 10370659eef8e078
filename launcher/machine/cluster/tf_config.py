"""The cluster in TensorFlow's own variable, TF_CONFIG."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import UsageError
from launcher.machine.cluster.claim import Claim

SOURCE = "TF_CONFIG"
TO_TRAIN_ALONE = "unset TF_CONFIG"

EXAMPLE = 'TF_CONFIG=\'{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}\''
# Rank order: the chief, where there is one, is rank 0.
_JOBS = ("chief", "worker")
# A name, an IPv4 address or a bracketed IPv6 address, and a port.
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def claim(environ: Mapping[str, str]) -> Claim | None:
    """What TF_CONFIG says; None where it is not set, UsageError where it is nothing of the kind or not coherent."""
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
        source=SOURCE,
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
    cluster = config.get("cluster")
    if not cluster:
        raise _wrong(f'no "cluster" in {_shortened(json.dumps(config))}')
    if not isinstance(cluster, dict):
        raise _wrong(f'"cluster" must map job names to lists of addresses, got {json.dumps(cluster)}')
    unsupported = sorted(set(cluster) - set(_JOBS))
    if unsupported:
        raise _wrong(f'job {unsupported[0]!r} in "cluster" is not supported: name workers, or one chief and workers')
    workers: list[str] = []
    for job in _JOBS:
        addresses = cluster.get(job, [])
        if not isinstance(addresses, list):
            raise _wrong(f'"{job}" in "cluster" must be a list of "host:port", got {json.dumps(addresses)}')
        for address in addresses:
            match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
            if match is None or not 0 < int(match["port"]) < 65536:
                raise _wrong(f'{job} address {json.dumps(address)} is not "host:port" with a port from 1 to 65535')
            workers.append(address)
    if len(cluster.get("chief", [])) > 1:
        raise _wrong(f'"cluster" has {len(cluster["chief"])} chiefs, there can be one: {json.dumps(cluster["chief"])}')
    if not workers:
        raise _wrong(f'"cluster" has no workers: {json.dumps(cluster)}')
    repeated = sorted({address for address in workers if workers.count(address) > 1})
    if repeated:
        raise _wrong(f"address {repeated[0]!r} is given {workers.count(repeated[0])} times; each worker needs its own")
    return tuple(workers)


def _rank(config: Mapping[str, Any]) -> int:
    """This process's place in the list that `_workers` returns."""
    cluster, task = config["cluster"], config.get("task")
    if not task:
        raise _wrong('no "task": it says which of the workers this process is')
    if not isinstance(task, dict):
        raise _wrong(f'"task" must be an object with "type" and "index", got {json.dumps(task)}')
    kind = task.get("type")
    if kind not in _JOBS:
        raise _wrong(f'task type {json.dumps(kind)} is not supported, use "worker" or "chief"')
    addresses = cluster.get(kind, [])
    if not addresses:
        raise _wrong(f'this task is a {kind}, but "cluster" has no {kind}: {json.dumps(cluster)}')
    index = task.get("index")
    if not isinstance(index, int) or isinstance(index, bool):
        raise _wrong(f"task index must be a whole number, got {json.dumps(index)}")
    if not 0 <= index < len(addresses):
        valid = "0" if len(addresses) == 1 else f"0 to {len(addresses) - 1}"
        raise _wrong(f'task index {index} is out of range: "cluster" has {len(addresses)} {kind}(s), index {valid}')
    return index + (len(cluster.get("chief", [])) if kind == "worker" else 0)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
