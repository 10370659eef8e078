"""A job as a JobSet of Kubernetes: one pod a worker, each with a supervisor of its own, restarted by the cluster.

Kubeflow Trainer makes the JobSet where it is asked for as a TrainJob. There is no head: in every pod runs
`python -m launcher.launch --backend=member`, which finds its peers by what `launcher.machine.cluster.kubernetes` reads
and jobset.yaml, which is filled in here, says. What becomes of the job is for the JobSet to decide, by the exit codes
of its pods:

    64, 70       the JobSet fails at once: a retry will not help
    42           saved and preempted: the pod is replaced, which no count limits. So ends also what failed with a new
                 checkpoint since the pod began: JobSet has one count for its life and cannot tell progress
    any other    (75, a lost node, out of memory) the JobSet restarts all pods, at most `max_restarts` times
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from absl import flags

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, LauncherError, UsageError
from launcher.jobs.job import Job
from launcher.machine import installation
from launcher.machine.cluster.kubernetes import DEFAULT_PORT
from launcher.machine.runtime_kinds import PJRT
from launcher.modes import flag


@dataclasses.dataclass
class PodFlags:
    """The flags that only this backend reads."""

    image: str | None = flag("Container image with Launcher in it, for kubernetes.")
    manifest: str = flag(
        "A JobSet, or a TrainJob of Kubeflow Trainer with the TrainingRuntime that makes this JobSet of it.",
        "jobset",
        flags.DEFINE_enum,
        enum_values=["jobset", "trainjob"],
    )
    job_name: str | None = flag("Name of the JobSet or TrainJob. Default: the recipe's.")
    namespace: str | None = flag("Its namespace. Default: the one kubectl is set to.")
    volume_claim: str | None = flag("PersistentVolumeClaim that all pods mount at the parent folder of --model_dir.")
    resources: tuple[str, ...] = flag(
        "What each worker asks for, such as cpu=8,memory=64Gi,nvidia.com/gpu=8.", (), flags.DEFINE_list
    )
    overlay: str | None = flag(
        "YAML file that is laid over the job (metadata), its JobSet (spec) and its pods (pod: metadata, spec): labels, "
        "selectors of nodes, tolerations, secrets, further volumes."
    )


_REPLICATED_JOB = "worker"
# What Kubeflow Trainer knows its own job and container by.
_TRAINER_LABELS = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_TRAINER_CONTAINER = "node"
_TRAINER_KINDS = ("TrainingRuntime", "TrainJob")
# The supervisor kills what is left of a worker at the end of its grace period, and writes its report.
_GRACE_MARGIN_SECONDS = 30
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_LENGTH = 63
_RANDOM_SUFFIX_LENGTH = len("-abcde")  # which Kubernetes adds to a pod's name
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_KEY = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?")
_DRY_RUN = "--dry_run"
_FIRST_POD = "batch.kubernetes.io/job-completion-index=0"
# What people call it, what makes pods of it, and what is to be deleted.
_FORMS = {
    "jobset": ("JobSet", "the JobSet controller", "jobset,networkpolicy"),
    "trainjob": ("TrainJob", "Kubeflow Trainer", "trainjob,trainingruntime,networkpolicy"),
}
_TPU = "google.com/tpu"
_TEMPLATE = Path(__file__).with_name("jobset.yaml")


def _values(options: flags.FlagValues, job: Job) -> dict[str, Any]:
    """Values for the names in jobset.yaml, by the flags, which are checked."""
    if not options.image:
        raise UsageError("--image is missing: name a container image that has Launcher and your recipe in it")
    if job.on_event:
        raise UsageError("--on_event: no one supervisor sees a job of pods, each has its own; leave it out")
    if not options.volume_claim:
        raise UsageError("--volume_claim is missing: name a ReadWriteMany claim, for the parent folder of --model_dir")
    folder = PurePosixPath(job.model_dir)
    if not folder.is_absolute():
        raise UsageError(f"--model_dir={job.model_dir}: give a path in the pods; of /runs/resnet, /runs is mounted")
    recipe = os.path.splitext(os.path.basename(job.request.gin_file[-1]))[0]
    name = options.job_name or re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")
    for option, value in (("job_name", name), ("volume_claim", options.volume_claim), ("namespace", options.namespace)):
        if value is not None and not (_LABEL.fullmatch(value) and len(value) <= _LABEL_LENGTH):
            raise UsageError(f"--{option}={value}: use small letters, digits and dashes, beginning with a letter")
    longest = len(f"{name}-{_REPLICATED_JOB}-0-{job.workers - 1}") + _RANDOM_SUFFIX_LENGTH
    if longest > _LABEL_LENGTH:
        raise UsageError(f"--job_name={name}: pod names of {longest} characters, more than {_LABEL_LENGTH}; shorten it")
    resources = _quantities(options.resources)
    if _TPU in resources and job.workers > 1 and not job.request.runtime.has_devices:
        raise UsageError(
            f"--workers={job.workers} with {_TPU}: TensorFlow drives a slice of several hosts from one program and TPU "
            f"workers that GKE does not start. Add {PJRT.flag}, or use --workers=1 and a slice of one host"
        )
    volumes: list[dict[str, Any]] = [{"name": "runs", "persistentVolumeClaim": {"claimName": options.volume_claim}}]
    mounts = [{"name": "runs", "mountPath": str(folder if folder.parent == PurePosixPath("/") else folder.parent)}]
    if "nvidia.com/gpu" in resources:
        # NCCL needs more shared memory than the 64 MB that a container has.
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    member = ["--backend=member", f"--grace_period={job.grace_period_seconds:g}"]
    member.append(f"--start_timeout={job.start_timeout_seconds:g}")
    if job.stall_timeout_seconds is not None:
        member.append(f"--stall_timeout={job.stall_timeout_seconds:g}")
    is_trainjob = options.manifest == "trainjob"
    return {
        "name": name,
        "namespace": options.namespace,
        "max_restarts": job.max_restarts,
        "workers": job.workers,
        "workers_as_text": str(job.workers),
        "hopeless": [EXIT_USAGE, EXIT_FAILED],
        "preempted": [EXIT_PREEMPTED],
        "grace_seconds": int(job.grace_period_seconds) + _GRACE_MARGIN_SECONDS,
        "job_labels": _TRAINER_LABELS if is_trainjob else None,
        "container": _TRAINER_CONTAINER if is_trainjob else _REPLICATED_JOB,
        "image": options.image,
        "command": ["python", "-m", "launcher.launch", *member, *job.arguments],
        "port": DEFAULT_PORT,
        "mounts": mounts,
        "requests": resources,
        # A limit on processor time would only slow down; the others cannot be shared.
        "limits": {name: quantity for name, quantity in resources.items() if name != "cpu"},
        "volumes": volumes,
    }


def _read_overlay(path: str) -> Mapping[str, Any]:
    yaml: Any = installation.required("yaml", by="--overlay", extra="kubernetes", package="PyYAML")
    try:
        overlay = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--overlay={path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    known = {"metadata", "spec", "pod"}
    is_known = isinstance(overlay, dict) and overlay.keys() <= known
    if not is_known or not all(isinstance(part, dict) for part in overlay.values()):
        raise UsageError(
            f"--overlay={path}: expected mappings under {', '.join(sorted(known))}, which are laid over ours"
        )
    if clash := {"name", "namespace"} & overlay.get("metadata", {}).keys():
        raise UsageError(f"--overlay={path}: metadata.{min(clash)} is for --job_name and --namespace to say")
    return overlay


def _laid_over(ours: Any, theirs: Any) -> Any:
    """A part of a manifest with another over it: mappings by key, lists of named items by name, the rest replaced."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {**ours, **{key: _laid_over(ours.get(key), value) for key, value in theirs.items()}}
    lists = isinstance(ours, list) and isinstance(theirs, list)
    if lists and all(isinstance(item, dict) and "name" in item for item in [*ours, *theirs]):
        by_name = {item["name"]: item for item in theirs}
        kept = [_laid_over(item, by_name.pop(item["name"], {})) for item in ours]
        return [*kept, *by_name.values()]
    return theirs


def _manifests(kind: str, values: Mapping[str, Any], overlay: Mapping[str, Any], yaml: Any) -> list[dict[str, Any]]:
    """The network policy and the JobSet, of jobset.yaml; or with this JobSet a TrainingRuntime, and its TrainJob."""
    policy, jobset = (_filled_in(document, values) for document in yaml.safe_load_all(_TEMPLATE.read_text("utf-8")))
    of_pods = {"template": {"spec": {"template": overlay.get("pod", {})}}}
    of_jobset = {key: value for key, value in overlay.items() if key != "pod"}
    jobset = _laid_over(jobset, {"spec": {"replicatedJobs": [{"name": _REPLICATED_JOB, **of_pods}]}})
    jobset = _laid_over(jobset, of_jobset)
    if kind == "jobset":
        return [policy, jobset]
    runtime, trainjob = ({"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": kind} for kind in _TRAINER_KINDS)
    # Of this template a JobSet has its labels and annotations, not of the TrainJob.
    template = {"metadata": copy.deepcopy(overlay.get("metadata", {})), "spec": jobset["spec"]}
    spec = {"mlPolicy": {"numNodes": values["workers"]}, "template": template}
    of = {"runtimeRef": {"kind": runtime["kind"], "name": values["name"]}}
    return [
        policy,
        {**runtime, "metadata": dict(policy["metadata"]), "spec": spec},
        {**trainjob, "metadata": jobset["metadata"], "spec": of},
    ]


def _filled_in(part: Any, values: Mapping[str, Any]) -> Any:
    """Part of a manifest with values in the place of their names, and without what has no value."""
    if isinstance(part, list):
        return [_filled_in(value, values) for value in part]
    if isinstance(part, dict):
        filled = {name: _filled_in(value, values) for name, value in part.items()}
        return {name: value for name, value in filled.items() if value not in (None, {})}
    return values[part[1:]] if isinstance(part, str) and part.startswith("$") else part


def run(options: flags.FlagValues, job: Job, arguments: Sequence[str]) -> int:
    """Hands the job to the cluster that kubectl is set to, where that takes all of it; it is supervised there.

    With --dry_run prints the manifests as a file that a person can read and keep; `arguments` are the command line that
    asked for it.

    Raises:
      UsageError: one of this name is there.
      LauncherError: the cluster refuses.
    """
    values = _values(options, job)
    overlay = _read_overlay(options.overlay) if options.overlay else {}
    yaml: Any = installation.required("yaml", by="--backend=kubernetes", extra="kubernetes", package="PyYAML")
    manifests = _manifests(options.manifest, values, overlay, yaml)
    name, (what, controller, kinds) = values["name"], _FORMS[options.manifest]
    quoted = [shlex.quote(word) for word in arguments if word != _DRY_RUN]
    typed = " \\\n    ".join([f"python -m launcher.launch {_DRY_RUN}", *quoted])
    namespace = f" --namespace={options.namespace}" if options.namespace else ""
    header = f"""\
A {what}: {job.workers} pod(s) that train one model together. Rendered by

{textwrap.indent(typed, "    ")}

To start, watch and end it, where this file is FILE:

    kubectl{namespace} apply -f FILE
    kubectl{namespace} logs --follow --selector=jobset.sigs.k8s.io/jobset-name={name},{_FIRST_POD}
    kubectl{namespace} delete {kinds} {name}

The cluster needs {controller}, and the claim {options.volume_claim} a volume that all pods can write to. Only
pods of this job may connect to its pods: TensorFlow's server asks nobody who they are. That needs a network plugin
that enforces a NetworkPolicy; on others, let only people you trust into the cluster.
"""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    content = comment + yaml.safe_dump_all(manifests, sort_keys=False, width=120)
    if options.dry_run:
        sys.stdout.write(content)
        return EXIT_DONE
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UsageError("--backend=kubernetes: there is no kubectl on PATH; install it, or apply --dry_run's output")
    # Trainer takes no TrainJob before its TrainingRuntime is there, which has the same name.
    asked = content if options.manifest == "jobset" else content.rpartition("\n---\n")[0]
    for words, given in ((["create", "--dry-run=server"], asked), (["create"], content)):
        command = [kubectl, *words, "--filename=-"]
        done = subprocess.run(command, input=given, text=True, check=False, capture_output=True)
        sys.stderr.write(done.stderr)
        if "AlreadyExists" in done.stderr:
            advice = f"choose another --job_name, or delete it first: kubectl delete {kinds} {name}"
            raise UsageError(f"--job_name={name}: one of this name is there; {advice}")
        if done.returncode:
            raise LauncherError(f"kubectl create ended with exit code {done.returncode}; what it said stands above")
    sys.stdout.write(done.stdout)
    return EXIT_DONE


def _quantities(items: Sequence[str]) -> dict[str, str]:
    quantities = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not (separator and _KEY.fullmatch(name) and _QUANTITY.fullmatch(value)):
            raise UsageError(f"--resources: {item!r} is not NAME=VALUE as in cpu=8,memory=64Gi,nvidia.com/gpu=8")
        quantities[name] = value
    return quantities
