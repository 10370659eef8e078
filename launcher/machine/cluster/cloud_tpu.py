"""The hosts of a Cloud TPU: several machines, and still one program.

TensorFlow trains on a pod from the program on host 0, which drives the TPU workers of all hosts. So the hosts in
TPU_WORKER_HOSTNAMES are no peers in the sense of a cluster, on any of them. `launcher.machine.tpu` refuses to train
where it cannot be done: on another host than 0, or with `--tpu=local` on a pod.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.machine.cluster.claim import Claim, whole_number

SOURCE = "cloud_tpu"


def claim(environ: Mapping[str, str]) -> Claim | None:
    """One process for all hosts; None where TPU_WORKER_HOSTNAMES names none.

    Raises:
      UsageError: TPU_WORKER_ID is none of the hosts.
    """
    hosts = [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host.strip()]
    if not hosts:
        return None
    advice = (
        f"TPU_WORKER_HOSTNAMES names {len(hosts)} host(s), {hosts[0].strip()} first, and TPU_WORKER_ID counts them "
        "from 0. Both are set for a TPU VM or a pod of GKE: leave them as they are, or unset both"
    )
    worker = whole_number(environ, "TPU_WORKER_ID", most=len(hosts) - 1, default="0", advice=advice)
    return Claim(
        source=SOURCE,
        num_workers=1,
        index=0,
        evidence=f"TPU_WORKER_ID={worker}, {len(hosts)} in TPU_WORKER_HOSTNAMES",
        marker="TPU_WORKER_HOSTNAMES",
        addresses=tuple,
    )
