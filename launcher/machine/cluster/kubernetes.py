"""The pods of a JobSet or of an Indexed Job: one worker a pod.

All that Kubernetes sets by itself is JOB_COMPLETION_INDEX (and HOSTNAME); the pod template adds the rest:

    LAUNCHER_NUM_WORKERS      number of pods that train together
    of a JobSet, from the annotation of that name by the downward API,
    JOBSET_NAME               metadata.annotations['jobset.sigs.k8s.io/jobset-name']
    REPLICATED_JOB_NAME       metadata.annotations['jobset.sigs.k8s.io/replicatedjob-name']
    of a plain Indexed Job,
    LAUNCHER_SERVICE          the pods' `subdomain`: a headless Service that publishes addresses that are not ready
    JOB_NAME                  metadata.labels['batch.kubernetes.io/job-name']; only where HOSTNAME is not the pod's own

The replicated job is of one Job (replicas: 1) with a completion for each worker. A JobSet's service has the JobSet's
name; LAUNCHER_SERVICE says so when it is another. Workers listen on the port LAUNCHER_PORT_BASE (2222 when unset).
"""

import re
from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.machine.cluster.claim import HOST, LAST_PORT, Claim, text, whole_number

SOURCE = "kubernetes"
DEFAULT_PORT = 2222
_INDEX = "JOB_COMPLETION_INDEX"
_NUM_WORKERS = "LAUNCHER_NUM_WORKERS"
_LABEL_LENGTH = 63
_INDICES = re.compile(r"(-[0-9]+)+$")
_ALONE = f"to train alone in every pod, unset {_INDEX} in its command"
_INDEXED = "Kubernetes sets it for pods of a Job with completionMode: Indexed, as a JobSet's are"
_IN_TEMPLATE = "set it in the pod template with fieldRef.fieldPath: metadata."
_JOB_NAME = f"{_IN_TEMPLATE}labels['batch.kubernetes.io/job-name']"
_REPLICATED_JOB_NAME = f"{_IN_TEMPLATE}annotations['jobset.sigs.k8s.io/replicatedjob-name']"


def claim(environ: Mapping[str, str]) -> Claim | None:
    """The claim of the pod's variables; None outside of an indexed pod, UsageError where they contradict each other."""
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
    index = whole_number(
        environ,
        _INDEX,
        most=num_workers - 1,
        advice=f"{_NUM_WORKERS}={num_workers}; let it be the completions of the manifest. Or {_ALONE}",
    )
    return Claim(
        source=SOURCE,
        to_train_alone=f"unset {_INDEX} in the pod's command, or make it one pod with {_NUM_WORKERS}=1",
        num_workers=num_workers,
        index=index,
        evidence=f"{_INDEX}={index}, {_NUM_WORKERS}={num_workers}",
        marker=_INDEX,
        addresses=lambda: _addresses(environ, num_workers, index),
    )


def _addresses(environ: Mapping[str, str], num_workers: int, index: int) -> tuple[str, ...]:
    host = environ.get("HOSTNAME", "").strip()
    if jobset := environ.get("JOBSET_NAME", "").strip():
        job_name = f"{jobset}-{text(environ, 'REPLICATED_JOB_NAME', advice=_REPLICATED_JOB_NAME)}-0"
        service = environ.get("LAUNCHER_SERVICE", "").strip() or jobset
    else:
        job_name = environ.get("JOB_NAME", "").strip() or host.removesuffix(f"-{index}")
        if job_name in ("", host):
            raise UsageError(
                f"JOB_NAME is missing or empty, and HOSTNAME={host!r} is not the name of a Job and -{index} ({_INDEX}):"
                f" {_JOB_NAME}"
            )
        service = text(
            environ,
            "LAUNCHER_SERVICE",
            advice="set it in the pod template to the pods' subdomain, the name of a headless Service "
            f"(clusterIP: None) that selects them. In a JobSet, set JOBSET_NAME instead. Or {_ALONE}",
        )
    names = [f"{job_name}-{pod}" for pod in range(num_workers)]
    for name in (names[0], service):
        if not HOST.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name in DNS: check JOBSET_NAME, REPLICATED_JOB_NAME, JOB_NAME, LAUNCHER_SERVICE"
            )
    if len(names[-1]) > _LABEL_LENGTH:
        raise UsageError(f"{names[-1]!r} is longer than {_LABEL_LENGTH} characters: shorten the JobSet's or Job's name")
    # On the host's network HOSTNAME is the node's; where it is a pod's of this Job, it must be this one's.
    if host != names[index] and _INDICES.sub("", host) == _INDICES.sub("", names[index]):
        raise UsageError(
            f"HOSTNAME={host!r}, but {_INDEX} and the names in the pod template make this pod {names[index]!r}: take "
            "all of them from the pod's own annotations, and give the replicated job of a JobSet one replica"
        )
    advice = "all workers listen on it; give all pods the same one, or unset it"
    default = str(DEFAULT_PORT)
    port = whole_number(environ, "LAUNCHER_PORT_BASE", least=1, most=LAST_PORT, default=default, advice=advice)
    return tuple(f"{name}.{service}:{port}" for name in names)
