"""The JobSet that --backend=kubernetes writes: valid, understood by the workers in it, and right about exit codes."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import sys
from pathlib import Path

import jsonschema
import pages
import pytest
import yaml
from places import ROOT

from launcher import launch as entry
from launcher.machine import cluster, tpu

RECIPE = ROOT / "scripts" / "kubernetes_jobset.yaml"
FLAGS = ("--image=example.com/launcher:1", "--volume_claim=runs", "--gin_file=resnet_cpu.gin", "--model_dir=/runs/cpu")


def closed(schema):
    """The schema as an API server reads it: fields that it does not name are errors, unless it says otherwise."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema = {"additionalProperties": False, **schema}
    return {
        key: {name: closed(item) for name, item in value.items()} if key == "properties" else closed(value)
        for key, value in schema.items()
    }


def validates(schema):
    checker = jsonschema.validators.validator_for({"$schema": "http://json-schema.org/draft-04/schema#"})
    return checker(closed(schema))


@pytest.fixture(scope="module")
def validator():
    """Validates against the JobSet's own schema, strictly."""
    return validates(json.loads(Path(__file__).with_name("jobset_v1alpha2.schema.json").read_text()))


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """run(*flags): exit code and what was printed; nothing may be written."""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        code = entry.main(["launcher.launch", "--backend=kubernetes", *flags])
        assert os.listdir(tmp_path) == []
        return code, capsys.readouterr()

    return call


@pytest.fixture
def render(run, validator):
    """render(*flags): the manifest that --dry_run prints, which is valid."""

    def call(*flags):
        code, printed = run("--dry_run", *FLAGS, *flags)
        assert code == 0, printed.err
        policy, manifest = yaml.safe_load_all(printed.out)
        assert policy["kind"] == "NetworkPolicy" and policy["metadata"].items() <= manifest["metadata"].items()
        validator.validate(manifest)
        return manifest

    return call


def job_of(manifest):
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]


def pod_of(manifest):
    return job_of(manifest)["template"]["spec"]


def container_of(manifest):
    (container,) = pod_of(manifest)["containers"]
    return container


def environment(manifest, index):
    """What a pod sees: the variables of its template, and those that Kubernetes and JobSet give it."""
    name, job = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]["name"]
    annotations = {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/replicatedjob-name": job,
        "jobset.sigs.k8s.io/replicatedjob-replicas": "1",
        "jobset.sigs.k8s.io/job-index": "0",
    }
    environ = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{name}-{job}-0-{index}"}
    for variable in container_of(manifest)["env"]:
        if "value" in variable:
            environ[variable["name"]] = variable["value"]
        else:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            environ[variable["name"]] = annotations[re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]]
    return environ


def test_manifests_of_the_documentation_are_valid(validator):
    """A claim and a pod; the schema of a JobSet holds those of both."""
    (block,) = (block for block in pages.blocks(ROOT / "docs/kubernetes.md") if block.language == "yaml")
    claim, pod = yaml.safe_load_all(block.text)
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    volume = {"name": "made", "ephemeral": {"volumeClaimTemplate": {"spec": claim["spec"]}}}
    spec = {**pod["spec"], "volumes": [*pod["spec"]["volumes"], volume]}
    job = {"template": {"spec": spec}}
    validator.validate(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": "shell"},
            "spec": {"replicatedJobs": [{"name": "shell", "replicas": 1, "template": {"spec": job}}]},
        }
    )
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_every_pod_finds_its_place_and_the_names_under_which_jobset_publishes_the_others(render):
    manifest = render("--workers=3", "--job_name=digits")
    assert manifest["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert (job_of(manifest)["completions"], job_of(manifest)["parallelism"]) == (3, 3)
    for index in range(3):
        found = cluster.resolve(environment(manifest, index))
        assert (found.source, found.index) == ("kubernetes", index)
        assert found.workers == tuple(f"digits-worker-0-{pod}.digits:2222" for pod in range(3))


def selects(selector, labels):
    """As the API reads a label selector; an empty one selects everything."""
    assert set(selector) <= {"matchLabels"}
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def test_only_pods_of_the_same_job_may_connect_to_its_pods(run):
    _, printed = run("--dry_run", *FLAGS, "--job_name=digits", "--workers=2")
    policy = yaml.safe_load(printed.out.split("\n---\n")[0])
    assert policy["apiVersion"] == "networking.k8s.io/v1"
    spec = policy["spec"]
    ours, others = {"jobset.sigs.k8s.io/jobset-name": "digits"}, {"jobset.sigs.k8s.io/jobset-name": "letters"}
    assert selects(spec["podSelector"], ours) and not selects(spec["podSelector"], others)
    assert spec["policyTypes"] == ["Ingress"]  # what they read from outside stays as it is
    (rule,) = spec["ingress"]
    (peer,) = rule["from"]
    assert set(rule) == {"from"} and set(peer) == {"podSelector"}  # pods of this namespace, on any port
    assert selects(peer["podSelector"], ours)
    assert not selects(peer["podSelector"], others) and not selects(peer["podSelector"], {})


def what_follows(manifest, exit_code, conditions=()):
    """As the Job's and the JobSet's controllers decide: the first rule that matches counts."""
    job = job_of(manifest)
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes:
            assert codes["operator"] == "In" and codes["containerName"] == container_of(manifest)["name"]
            matches = exit_code in codes["values"]
        else:
            matches = any(wanted["type"] in conditions for wanted in rule["onPodConditions"])
        if matches and rule["action"] == "Ignore":
            return "pod replaced"
        if matches:
            assert rule["action"] == "FailJob"
            reason = "PodFailurePolicy"
            break
    else:
        assert job["backoffLimit"] == 0
        reason = "BackoffLimitExceeded"
    policy = manifest["spec"]["failurePolicy"]
    for rule in policy["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return {"FailJobSet": "failed"}[rule["action"]]
    return f"restarted, at most {policy['maxRestarts']} times"


@pytest.mark.parametrize(
    ("exit_code", "conditions", "result"),
    [
        (64, (), "failed"),
        (70, (), "failed"),
        (42, (), "pod replaced"),
        (75, (), "restarted, at most 7 times"),
        (1, (), "restarted, at most 7 times"),
        (137, (), "restarted, at most 7 times"),
        (137, ("DisruptionTarget",), "pod replaced"),
    ],
)
def test_exit_codes_decide_between_another_try_and_the_end(render, exit_code, conditions, result):
    assert what_follows(render("--max_restarts=7"), exit_code, conditions) == result


def test_pods_never_restart_in_place_and_have_time_to_save(render):
    pod = pod_of(render("--grace_period=100"))
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > 100
    assert "--grace_period=100" in pod["containers"][0]["command"]


def test_what_a_pod_runs_is_a_member_that_the_launcher_accepts(render, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = container_of(render("--workers=2", "--stall_timeout=90", "--gin_param", "train.steps = 3"))["command"]
    assert command[:3] == ["python", "-m", "launcher.launch"]
    for name, value in {"JOB_COMPLETION_INDEX": "0", "LAUNCHER_NUM_WORKERS": "1", "JOBSET_NAME": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REPLICATED_JOB_NAME", "worker")
    monkeypatch.delenv("HOSTNAME", raising=False)
    assert entry.main(["launcher.launch", "--dry_run", *command[3:]]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    flags = ["--gin_file=resnet_cpu.gin", "--model_dir=/runs/cpu", "--gin_param", "train.steps = 3"]
    assert shlex.split(printed)[-len(flags) :] == flags


def test_a_slice_of_several_hosts_has_a_pod_on_each_by_the_engine_that_needs_no_other_program(render):
    manifest = render("--workers=4", "--resources=google.com/tpu=4", "--engine=pjrt")
    assert (job_of(manifest)["completions"], job_of(manifest)["parallelism"]) == (4, 4)
    assert container_of(manifest)["resources"]["limits"] == {"google.com/tpu": "4"}
    assert "--engine=pjrt" in container_of(manifest)["command"]
    # What GKE then sets in pod 2 goes with what JobSet sets.
    names = (f"resnet-cpu-worker-0-{number}.resnet-cpu" for number in range(4))
    gke = {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": ",".join(names)}
    place = cluster.resolve({**environment(manifest, 2), **gke})
    assert tpu.hosts_of_this_slice(gke) == (place.num_workers, str(place.index))


def test_the_claim_is_mounted_where_model_dir_is(render):
    pod = pod_of(render("--volume_claim=shared-disk"))
    assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "shared-disk"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]
    assert pod_of(render("--model_dir=/runs"))["containers"][0]["volumeMounts"][0]["mountPath"] == "/runs"


def test_resources_are_what_was_asked_for(render):
    manifest = render("--resources=cpu=8,memory=64Gi,nvidia.com/gpu=4", "--namespace=ml")
    assert container_of(manifest)["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
    }
    assert manifest["metadata"] == {"name": "resnet-cpu", "namespace": "ml"}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container_of(manifest)["volumeMounts"]


def test_the_manifest_in_scripts_is_valid_and_what_its_header_says_would_render(run, validator):
    text = RECIPE.read_text()
    command = re.search(r"(?s)python -m launcher\.launch .+?\n#\n", text)[0].replace("#", "").replace("\\\n", " ")
    flags = shlex.split(command)[3:]
    assert "--gin_file=resnet_multiworker.gin" in flags
    flags.remove("--backend=kubernetes")
    code, printed = run(*flags)
    assert code == 0
    assert printed.out == text, "render it again with the command in its header"
    _, manifest = yaml.safe_load_all(text)
    validator.validate(manifest)


@pytest.mark.parametrize("path", ["spec.netwrok", "spec.replicatedJobs.0.template.spec.template.spec.containers.0.cmd"])
def test_the_schema_refuses_a_field_that_nobody_reads(render, validator, path):
    manifest = copy.deepcopy(render())
    *parents, last = path.split(".")
    place = manifest
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[last] = {}
    with pytest.raises(jsonschema.ValidationError, match=last):
        validator.validate(manifest)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--image="], ["--image"]),
        (["--volume_claim="], ["--volume_claim"]),
        (["--on_event=cat"], ["--on_event"]),
        (["--model_dir=runs/x"], ["--model_dir=runs/x"]),
        (["--job_name=My_Job"], ["--job_name=My_Job"]),
        (["--job_name=" + "a" * 50], ["63"]),
        (["--resources=cpu"], ["'cpu'", "cpu=8"]),
        (["--resources=memory=lots"], ["memory=lots"]),
        (["--workers=2", "--resources=google.com/tpu=4"], ["--workers=2", "google.com/tpu"]),
    ],
)
def test_a_mistake_is_one_message(run, flags, said):
    code, printed = run("--dry_run", *FLAGS, *flags)
    assert code == 64 and printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    for part in said:
        assert part in printed.err


OVERLAY = """
metadata: {labels: {kueue.x-k8s.io/queue-name: team}, annotations: {alpha.jobset.sigs.k8s.io/exclusive-topology: rack}}
spec: {ttlSecondsAfterFinished: 3600}
pod:
  metadata: {labels: {team: vision}}
  spec:
    serviceAccountName: trainer
    imagePullSecrets: [{name: registry}]
    priorityClassName: high
    nodeSelector: {pool: gpus}
    tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
    volumes:
    - {name: data, persistentVolumeClaim: {claimName: data}}
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: 16Gi}}
    containers:
    - name: worker
      envFrom: [{secretRef: {name: tokens}}]
      env: [{name: WANDB_MODE, value: offline}]
      volumeMounts: [{name: data, mountPath: /data}]
"""


@pytest.fixture
def overlay(tmp_path):
    path = tmp_path.parent / f"{tmp_path.name}-overlay.yaml"
    path.write_text(OVERLAY)
    return path


def test_an_overlay_adds_to_the_jobset_and_its_pods_and_replaces_what_has_its_name(render, overlay):
    flags = ("--resources=cpu=8,nvidia.com/gpu=8",)
    plain, manifest = render(*flags), render(*flags, f"--overlay={overlay}")
    wanted = yaml.safe_load(OVERLAY)
    assert manifest["metadata"] == {**plain["metadata"], **wanted["metadata"]}
    assert manifest["spec"]["ttlSecondsAfterFinished"] == 3600
    assert job_of(manifest)["template"]["metadata"] == wanted["pod"]["metadata"]
    for name in wanted["pod"]["spec"].keys() - {"volumes", "containers"}:
        assert pod_of(manifest)[name] == wanted["pod"]["spec"][name]
    volumes = {one["name"]: one for one in pod_of(manifest)["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert volumes.keys() == {"runs", "shared-memory", "data"}
    before, after = container_of(plain), container_of(manifest)
    assert after["env"] == [*before["env"], {"name": "WANDB_MODE", "value": "offline"}]
    assert after["volumeMounts"][-1] == {"name": "data", "mountPath": "/data"}
    assert all(after[name] == before[name] for name in before.keys() - {"env", "volumeMounts"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("pods: {}", "pod, spec"),
        ("- a", "expected mappings"),
        ("metadata: {name: x}", "--job_name"),
    ],
)
def test_an_overlay_that_makes_no_sense_is_one_message(run, overlay, content, said):
    overlay.unlink() if content is None else overlay.write_text(content)
    code, printed = run("--dry_run", *FLAGS, f"--overlay={overlay}")
    assert code == 64 and f"--overlay={overlay}: " in printed.err and said in printed.err
    assert printed.err.count("\n") == 1


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A stand-in for the cluster: notes its words, and fails with what the file `says` has, where there is one."""
    folder = tmp_path.parent / f"{tmp_path.name}-kubectl"
    folder.mkdir()
    script = folder / "kubectl"
    script.write_text(f"""#!/bin/sh
echo "$*" >>{folder}/words
cat >>{folder}/input
[ ! -e {folder}/says ] || {{ cat {folder}/says >&2; exit 1; }}
""")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize(("form", "asked_last"), [("jobset", "JobSet"), ("trainjob", "TrainingRuntime")])
def test_without_dry_run_kubectl_creates_what_dry_run_prints_once_the_cluster_would_take_it(
    run, kubectl, form, asked_last
):
    """A TrainJob is refused before its runtime is there, so nobody can ask about it."""
    flags = (*FLAGS, f"--manifest={form}")
    _, printed = run("--dry_run", *flags)
    code, _ = run(*flags)
    assert code == 0
    assert (kubectl / "words").read_text() == "create --dry-run=server --filename=-\ncreate --filename=-\n"
    asked = (kubectl / "input").read_text().removesuffix(printed.out)
    assert list(yaml.safe_load_all(asked))[-1]["kind"] == asked_last


@pytest.mark.parametrize(
    ("form", "says", "code", "told"),
    [
        ("jobset", "error: no matches for kind", 70, ["kubectl create ended with exit code 1"]),
        ("jobset", "Error from server (AlreadyExists): x", 64, ["jobset,networkpolicy resnet-cpu", "--job_name"]),
        ("trainjob", "Error from server (AlreadyExists): x", 64, ["trainjob,trainingruntime,networkpolicy resnet-cpu"]),
    ],
)
def test_what_the_cluster_refuses_is_told_and_nothing_is_created(run, kubectl, form, says, code, told):
    (kubectl / "says").write_text(says + "\n")
    ended, printed = run(*FLAGS, f"--manifest={form}")
    assert ended == code and says in printed.err
    assert all(part in printed.err.splitlines()[-1] for part in told)
    assert (kubectl / "words").read_text() == "create --dry-run=server --filename=-\n"


def test_a_trainjob_is_valid_and_makes_the_jobset_that_would_have_been_there(run, overlay, validator):
    """By the schemas of Kubeflow Trainer and by its webhook, which asks for one replica and a container so named."""
    schemas = json.loads(Path(__file__).with_name("trainer_v1alpha1.schemas.json").read_text())
    flags = (*FLAGS, "--workers=3", "--namespace=ml", "--resources=nvidia.com/gpu=8")
    _, plain = yaml.safe_load_all(run("--dry_run", *flags)[1].out)
    found = list(yaml.safe_load_all(run("--dry_run", *flags, "--manifest=trainjob")[1].out))
    assert [one["kind"] for one in found] == ["NetworkPolicy", "TrainingRuntime", "TrainJob"]
    _, runtime, trainjob = found
    for one in (runtime, trainjob):
        validates(schemas[one["kind"]]).validate(one)
        assert one["metadata"] == {"name": "resnet-cpu", "namespace": "ml"}
    assert trainjob["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": "resnet-cpu"}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3}

    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    (job,) = spec["replicatedJobs"]
    assert job["replicas"] == 1
    assert job["template"].pop("metadata") == {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    same = yaml.safe_load(json.dumps(spec).replace('"node"', '"worker"'))
    assert same == plain["spec"]
    made = {**plain, "spec": spec}
    validator.validate(made)
    assert cluster.resolve(environment(made, 2)).workers == tuple(
        f"resnet-cpu-worker-0-{pod}.resnet-cpu:2222" for pod in range(3)
    )
    assert what_follows(made, 70) == "failed" and what_follows(made, 42) == "pod replaced"

    overlay.write_text(OVERLAY.replace("name: worker", "name: node"))
    with_overlay = run("--dry_run", *flags, "--manifest=trainjob", f"--overlay={overlay}")[1].out
    _, runtime, trainjob = yaml.safe_load_all(with_overlay)
    for one in (runtime, trainjob):
        validates(schemas[one["kind"]]).validate(one)
    assert trainjob["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}  # where Kueue looks
    assert runtime["spec"]["template"]["metadata"] == yaml.safe_load(OVERLAY)["metadata"]  # all that Trainer passes on
    assert runtime["spec"]["template"]["spec"]["ttlSecondsAfterFinished"] == 3600


def test_a_machine_without_kubectl_is_told_what_to_do(run, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    code, printed = run(*FLAGS)
    assert code == 64 and "kubectl" in printed.err and "--dry_run" in printed.err


def test_a_machine_without_pyyaml_is_told_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, printed = run("--dry_run", *FLAGS)
    assert code == 64 and "[kubernetes]" in printed.err
