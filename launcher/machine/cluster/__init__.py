"""The cluster: this process's rank and its peers, read from the environment that a scheduler or a person prepared.

In order of precedence: TF_CONFIG, a Slurm job step, a Kubernetes JobSet or Indexed Job, the hosts of a Cloud TPU, and
else alone. What each of the first three must say is in the module of its name. Nothing here imports TensorFlow.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from launcher.errors import UsageError
from launcher.machine.cluster import kubernetes, slurm, tf_config
from launcher.machine.cluster.claim import Claim, whole_number

__all__ = ["FULL_WORKERS", "Cluster", "full_workers", "resolve", "without_peers"]

FULL_WORKERS = "LAUNCHER_FULL_WORKERS"

_CLOUD_TPU = "cloud_tpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes that train one model together.

    Attributes:
      source: what said so: "TF_CONFIG", "slurm", "kubernetes" or "cloud_tpu", or "alone" when nothing did.
      workers: "host:port" of every worker in rank order; empty when alone, and on a Cloud TPU, where one program
        drives all hosts.
      index: this process's rank.
      to_train_alone: the way to train without these peers, such as "unset TF_CONFIG"; empty where there are none.
    """

    source: str
    workers: tuple[str, ...]
    index: int
    to_train_alone: str = dataclasses.field(default="", compare=False)

    @property
    def num_workers(self) -> int:
        return max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes checkpoints and reports."""
        return self.index == 0

    @property
    def on_this_host(self) -> int:
        """The number of workers that share this one's host."""
        hosts = [address.rpartition(":")[0] for address in self.workers]
        return hosts.count(hosts[self.index]) if hosts else 1

    @property
    def description(self) -> str:
        if self.source == _CLOUD_TPU:
            return "one process, no peers: the program on a Cloud TPU's host 0 drives all its hosts"
        if not self.workers:
            return "one process, no peers"
        return f"worker {self.index} of {self.num_workers} ({self.workers[self.index]}), from {self.source}"


# Who a process is among others. The rest of what schedulers set (of the job, its nodes, its service) stays true for
# whatever the process starts.
_PLACES = frozenset(
    {
        "TF_CONFIG",
        *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
        *("JOB_COMPLETION_INDEX", "LAUNCHER_NUM_WORKERS"),
    }
)


def _cloud_tpu(environ: Mapping[str, str]) -> Claim | None:
    """One process for all hosts of a Cloud TPU; None where TPU_WORKER_HOSTNAMES names none."""
    hosts = [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host.strip()]
    if not hosts:
        return None
    advice = (
        f"TPU_WORKER_HOSTNAMES names {len(hosts)} host(s), {hosts[0].strip()} first, and TPU_WORKER_ID counts them "
        "from 0. Both are set for a TPU VM or a pod of GKE: leave them as they are, or unset both"
    )
    worker = whole_number(environ, "TPU_WORKER_ID", most=len(hosts) - 1, default="0", advice=advice)
    return Claim(
        source=_CLOUD_TPU,
        num_workers=1,
        index=0,
        evidence=f"TPU_WORKER_ID={worker}, {len(hosts)} in TPU_WORKER_HOSTNAMES",
        marker="TPU_WORKER_HOSTNAMES",
        addresses=tuple,
    )


# What others set for the processes they start (mpirun, mpiexec, MVAPICH, torchrun, flux, jsrun), or of a job's hosts
# (LSF, PBS, SageMaker). Slots of one host are processors as a rule.
_COUNTS = (
    "OMPI_COMM_WORLD_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE WORLD_SIZE FLUX_JOB_SIZE JSM_NAMESPACE_SIZE "
    "LSB_MCPU_HOSTS LSB_HOSTS PBS_NUM_NODES PBS_NODEFILE SM_HOSTS"
)

# In order of precedence. A source returns None when its scheduler is not there, and raises UsageError when it is there
# and contradicts itself.
_SOURCES: tuple[Callable[[Mapping[str, str]], Claim | None], ...] = (
    tf_config.claim,
    slurm.claim,
    kubernetes.claim,
    _cloud_tpu,
)


def resolve(environ: Mapping[str, str]) -> Cluster:
    """Finds this process's place among its peers, as the first source that is present says; else it is alone.

    Raises UsageError where a source does not make sense, or two name several workers and disagree.
    """
    for position, source in enumerate(_SOURCES):
        claim = source(environ)
        if claim is not None:
            _check_agreement(claim, _others(_SOURCES[position + 1 :], environ))
            return Cluster(
                source=claim.source,
                workers=claim.addresses(),
                index=claim.index,
                to_train_alone=claim.to_train_alone,
            )
    for variable in _COUNTS.split():
        _check_alone(variable, environ.get(variable, ""))
    return Cluster(source="alone", workers=(), index=0)


def _check_alone(variable: str, value: str) -> None:
    """Raises UsageError where a variable counts, names or points to a file that names several processes or hosts."""
    with contextlib.suppress(OSError):
        value = Path(value).read_text() if variable == "PBS_NODEFILE" else value
    count = int(value) if value.isdecimal() else len({*re.findall(r"[\w.-]*[A-Za-z][\w.-]*", value)})
    if count > 1:
        raise UsageError(
            f"{variable} says {count} processes or hosts, and nothing says how they are joined: each would train "
            f"alone. Give each {tf_config.EXAMPLE}, or start one launcher.launch with --hosts; to train alone, unset "
            f"{variable}"
        )


def without_peers(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that is to be given peers: `environ` without what a scheduler or a person says of others.

    The process that starts it has its own place there, which its workers do not share.
    """
    return {name: value for name, value in environ.items() if name not in _PLACES}


def _others(sources: Iterable[Callable[[Mapping[str, str]], Claim | None]], environ: Mapping[str, str]) -> list[Claim]:
    """Claims of sources of lower precedence, as far as they make sense: nobody asked them."""
    claims = []
    for source in sources:
        try:
            claims.append(source(environ))
        except UsageError:
            continue
    return [claim for claim in claims if claim is not None]


def _check_agreement(claim: Claim, others: Iterable[Claim]) -> None:
    for other in others:
        # One process under a scheduler says nothing of peers: `srun --pty`, or a step a host, with TF_CONFIG by hand.
        if other.num_workers > 1 and (claim.num_workers, claim.index) != (other.num_workers, other.index):
            raise UsageError(
                f"{claim.source} and {other.source} contradict each other: worker {claim.index} of {claim.num_workers} "
                f"({claim.evidence}), but worker {other.index} of {other.num_workers} ({other.evidence}). Make them "
                f"agree, or unset {claim.marker} to follow {other.source}, or {other.marker} to follow {claim.source}"
            )


def full_workers(environ: Mapping[str, str], num_workers: int) -> int:
    """The workers of the whole job, LAUNCHER_FULL_WORKERS: those there are, or more.

    Those that are there share the global batch of all of them, in pieces that are no larger than before: the same
    weights up to summation order, and the same memory.
    """
    advice = "launcher.launch --min_workers sets it; unset it when you start workers yourself"
    return whole_number(environ, FULL_WORKERS, advice=advice, least=num_workers, default=str(num_workers))
