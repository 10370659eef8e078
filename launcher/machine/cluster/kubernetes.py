"""The pods of a JobSet or of an Indexed Job: one worker a pod.

All that Kubernetes sets by itself is JOB_COMPLETION_INDEX (and HOSTNAME); the pod template adds the rest:

    LAUNCHER_NUM_WORKERS      number of pods that train together
    of a JobSet, from the annotation of that name by the downward API,
    JOBSET_NAME               metadata.annotations['jobset.sigs.k8s.io/jobset-name']
    REPLICATED_JOB_NAME       metadata.annotations['jobset.sigs.k8s.io/replicatedjob-name']
    and where the replicated job has more than one replica,
    JOB_INDEX                 metadata.annotations['jobset.sigs.k8s.io/job-index']
    REPLICATED_JOB_REPLICAS   metadata.annotations['jobset.sigs.k8s.io/replicatedjob-replicas']
    of a plain Indexed Job,
    LAUNCHER_SERVICE          the pods' `subdomain`: a headless Service that publishes addresses that are not ready
    JOB_NAME                  metadata.labels['batch.kubernetes.io/job-name']; only where HOSTNAME is not the pod's own

A JobSet's service has the JobSet's name; LAUNCHER_SERVICE says so when it is another. Workers listen on the port
LAUNCHER_PORT_BASE (2222 when unset).
"""

import dataclasses
import re
from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.machine.cluster.claim import HOST, LAST_PORT, Claim, text, whole_number

SOURCE = "kubernetes"
TO_TRAIN_ALONE = "unset JOB_COMPLETION_INDEX in the pod's command, or make it one pod with LAUNCHER_NUM_WORKERS=1"

DEFAULT_PORT = 2222
_INDEX = "JOB_COMPLETION_INDEX"
_NUM_WORKERS = "LAUNCHER_NUM_WORKERS"
_LABEL_LENGTH = 63
_INDICES = re.compile(r"(-[0-9]+)+$")
_ALONE = f"to train alone in every pod, unset {_INDEX} in its command"
_INDEXED = "Kubernetes sets it for pods of a Job with completionMode: Indexed, as a JobSet's are"
_ANNOTATION = "set it in the pod template with fieldRef.fieldPath: metadata.annotations['jobset.sigs.k8s.io/{}']"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pods:
    """The pods that train together: `num_jobs` Jobs of `pods_per_job` pods each, ranked Job by Job."""

    jobset: str | None
    num_jobs: int
    pods_per_job: int
    job: int
    pod: int

    @property
    def rank(self) -> int:
        return self.job * self.pods_per_job + self.pod


def claim(environ: Mapping[str, str]) -> Claim | None:
    """What the pod's variables say; None outside of an indexed pod, and UsageError where they contradict each other."""
    if not environ.get(_INDEX, "").strip():
        if environ.get(_NUM_WORKERS, "").strip():
            raise UsageError(f"{_NUM_WORKERS}={environ[_NUM_WORKERS]!r}, but {_INDEX} is missing or empty: {_INDEXED}")
        return None
    num_workers = whole_number(
        environ,
        _NUM_WORKERS,
        least=1,
        advice=f"{_INDEX} is set, so this pod has peers; set it in the pod template to the number of pods that train "
        f"together. Or {_ALONE}",
    )
    pods = _pods(environ, num_workers)
    return Claim(
        source=SOURCE,
        num_workers=num_workers,
        index=pods.rank,
        evidence=f"{_INDEX}={pods.pod}, {_NUM_WORKERS}={num_workers}",
        marker=_INDEX,
        addresses=lambda: _addresses(environ, pods),
    )


def _pods(environ: Mapping[str, str], num_workers: int) -> _Pods:
    jobset = environ.get("JOBSET_NAME", "").strip() or None
    num_jobs, job = _jobs(environ) if jobset else (1, 0)
    if num_workers % num_jobs:
        raise UsageError(f"{_NUM_WORKERS}={num_workers} is no multiple of REPLICATED_JOB_REPLICAS={num_jobs}")
    pods_per_job = num_workers // num_jobs
    pod = whole_number(
        environ,
        _INDEX,
        most=pods_per_job - 1,
        advice=f"{_NUM_WORKERS}={num_workers}"
        + (f" over {num_jobs} Jobs" if num_jobs > 1 else "")
        + f" makes {pods_per_job} pod(s) a Job; let it be replicas x completions of the manifest. Or {_ALONE}",
    )
    return _Pods(jobset=jobset, num_jobs=num_jobs, pods_per_job=pods_per_job, job=job, pod=pod)


def _jobs(environ: Mapping[str, str]) -> tuple[int, int]:
    """Number of Jobs in the replicated job, and this pod's."""
    replicas, index = "REPLICATED_JOB_REPLICAS", "JOB_INDEX"
    given = [name for name in (replicas, index) if environ.get(name, "").strip()]
    if not given or (given == [index] and environ[index].strip() == "0"):
        return 1, 0
    num_jobs = whole_number(environ, replicas, least=1, advice=_ANNOTATION.format("replicatedjob-replicas"))
    advice = f"{replicas}={num_jobs}, and it counts those Jobs from 0; {_ANNOTATION.format('job-index')}"
    job = whole_number(environ, index, most=num_jobs - 1, default="0" if num_jobs == 1 else "", advice=advice)
    return num_jobs, job


def _addresses(environ: Mapping[str, str], pods: _Pods) -> tuple[str, ...]:
    if pods.jobset:
        advice = _ANNOTATION.format("replicatedjob-name")
        job_name = f"{pods.jobset}-{text(environ, 'REPLICATED_JOB_NAME', advice=advice)}"
        job_names = [f"{job_name}-{job}" for job in range(pods.num_jobs)]
        service = environ.get("LAUNCHER_SERVICE", "").strip() or pods.jobset
    else:
        job_names = [_job_name(environ, pods.pod)]
        service = text(
            environ,
            "LAUNCHER_SERVICE",
            advice="set it in the pod template to the pods' subdomain, the name of a headless Service "
            f"(clusterIP: None) that selects them. In a JobSet, set JOBSET_NAME instead. Or {_ALONE}",
        )
    names = [f"{job_name}-{pod}" for job_name in job_names for pod in range(pods.pods_per_job)]
    for name in (*names, service):
        if not HOST.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name in DNS: check JOBSET_NAME, REPLICATED_JOB_NAME, JOB_NAME, LAUNCHER_SERVICE"
            )
    longest = max(names, key=len)
    if len(longest) > _LABEL_LENGTH:
        raise UsageError(f"{longest!r} is longer than {_LABEL_LENGTH} characters: shorten the JobSet's or Job's name")
    own, host = names[pods.rank], environ.get("HOSTNAME", "").strip()
    # On the host's network HOSTNAME is the node's; where it is a pod's of this Job, it must be this one's.
    if host != own and _INDICES.sub("", host) == _INDICES.sub("", own):
        raise UsageError(
            f"HOSTNAME={host!r}, but {_INDEX}, JOB_INDEX and the names in the pod template make this pod {own!r}: take "
            "all of them from the pod's own annotations"
        )
    advice = "all workers listen on it; give all pods the same one, or unset it"
    default = str(DEFAULT_PORT)
    port = whole_number(environ, "LAUNCHER_PORT_BASE", least=1, most=LAST_PORT, default=default, advice=advice)
    return tuple(f"{name}.{service}:{port}" for name in names)


def _job_name(environ: Mapping[str, str], pod: int) -> str:
    """The Job's own name, or what stands before the index in the pod's host name, which Kubernetes makes of it."""
    given = environ.get("JOB_NAME", "").strip()
    if given:
        return given
    host = environ.get("HOSTNAME", "").strip()
    name, _, index = host.rpartition("-")
    if not name or index != str(pod):
        raise UsageError(
            f"JOB_NAME is missing or empty, and HOSTNAME={host!r} is not the name of a Job and -{pod} ({_INDEX}): set "
            "JOB_NAME in the pod template with fieldRef.fieldPath: metadata.labels['batch.kubernetes.io/job-name']"
        )
    return name
