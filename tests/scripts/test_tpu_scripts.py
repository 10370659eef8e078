"""The scripts that create and delete Cloud TPU nodes, by a stand-in for gcloud. What they run is compared with commands
of Google's documentation, word for word."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from places import ROOT
from recorded_gcloud import NODE, NOT_FOUND, QUEUED, documented, says

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="the scripts are bash"), pytest.mark.slow]

JOB = ("--source=https://example.com/launcher.git", "--", "--gin_file=resnet_tpu.gin")


def test_shellcheck_has_nothing_to_say_about_what_they_share():
    checker = Path(sysconfig.get_path("scripts")) / "shellcheck"
    done = subprocess.run(
        [checker, str(ROOT / "scripts" / "tpu_types.bash")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


# --------------------------------------------------------------------------------------------------------------- create


def test_a_node_is_created_as_googles_page_shows(run, gcloud):
    gcloud.answers(
        {
            (*NODE, "describe"): [NOT_FOUND],
            (*NODE, "versions", "list"): [says("tpu-vm-tf-2.20.0-pjrt\ntpu-vm-tf-2.20.0-pod-pjrt")],
            (*NODE, "create"): [(0, "", "")],
        }
    )
    done = run("tpu_vm_create.sh", "--node=demo-tpu", "--zone=europe-west4-a", "--type=v3-8", "--spot")
    assert done.returncode == 0, done.stderr
    # https://cloud.google.com/tpu/docs/preemptible, with the image of another TensorFlow, and today's --spot
    shown = documented(
        """gcloud compute tpus tpu-vm create demo-tpu \\
             --zone=europe-west4-a \\
             --accelerator-type=v3-8 \\
             --version=tpu-vm-tf-2.20.0-pjrt \\
             --spot"""
    )
    assert gcloud.changes() == [shown]


def test_a_queued_resource_is_created_as_googles_page_shows(run, gcloud):
    gcloud.answers(
        {
            (*NODE, "describe"): [NOT_FOUND],
            (*QUEUED, "describe"): [NOT_FOUND, says("WAITING_FOR_RESOURCES"), says("ACTIVE")],
            (*NODE, "versions", "list"): [says("tpu-vm-tf-2.20.0-pjrt\ntpu-vm-tf-2.20.0-pod-pjrt")],
            (*QUEUED, "create"): [(0, "", "")],
        }
    )
    done = run(
        "tpu_vm_create.sh", "--node=my-tpu", "--zone=europe-west4-a", "--project=p", "--type=v3-32", "--spot",
        "--queued", "--valid_until=6h", "--wait=600",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # https://cloud.google.com/tpu/docs/spot and .../queued-resources, the same
    shown = documented(
        """gcloud compute tpus queued-resources create my-tpu \\
             --node-id=my-tpu \\
             --zone=europe-west4-a \\
             --project=p \\
             --accelerator-type=v3-32 \\
             --runtime-version=tpu-vm-tf-2.20.0-pod-pjrt \\
             --spot \\
             --valid-until-duration=6h"""
    )
    assert gcloud.changes() == [shown]


@pytest.mark.parametrize(
    ("type", "image", "replicas"),
    [
        # A replica is a TensorCore of v2 and v3, else a chip; the number counts cores, but chips for v5e and v6e.
        ("v2-8", "tpu-vm-tf-2.20.0-pjrt", 8),
        ("v3-32", "tpu-vm-tf-2.20.0-pod-pjrt", 32),
        ("v4-8", "tpu-vm-tf-2.20.0-pjrt", 4),
        ("v4-128", "tpu-vm-tf-2.20.0-pod-pjrt", 64),
        ("v5litepod-1", "tpu-vm-tf-2.20.0-pjrt", 1),
        ("v5litepod-8", "tpu-vm-tf-2.20.0-pjrt", 8),
        ("v5litepod-16", "tpu-vm-tf-2.20.0-pod-pjrt", 16),
        ("v5p-8", "tpu-vm-tf-2.20.0-pjrt", 4),
        ("v5p-12288", "tpu-vm-tf-2.20.0-pod-pjrt", 6144),
        ("v6e-256", "tpu-vm-tf-2.20.0-pod-pjrt", 256),
    ],
)
def test_the_type_says_which_image_and_how_many_replicas(run, gcloud, type, image, replicas):
    done = run("tpu_vm_create.sh", "--dry_run", "--node=n", f"--type={type}", "--tf_version=2.20.0", *JOB)
    assert done.returncode == 0, done.stderr
    (rule,) = (line for line in done.stdout.splitlines() if line.startswith("# the image: "))
    variant = "v5e-and-v6" if type.startswith(("v5l", "v6")) else "v5p-and-below"
    assert rule == f"# the image: {image}-{variant}, or else {image}"
    create = shlex.split(done.stdout.splitlines()[-1].removeprefix("+ "))
    assert any("|;|launcher-tf-version=2.20.0|;|" in word for word in create)
    assert any(f"launcher-replicas={replicas}|;|" in word for word in create)
    assert all(line.startswith(("+ gcloud ", "# ")) for line in done.stdout.splitlines())
    assert gcloud.calls == []


@pytest.mark.parametrize(
    ("type", "said"),
    [
        ("v5e-16", "--type=v5litepod-16"),
        ("v6-8", "v6e-8"),
        ("v5-8", "v5p-8 or v5litepod-8"),
        ("v5litepod-12", "1, 4, 8, 16"),
        ("v4-100", "multiples of 128"),
        ("v5p-100000", "--type=v5p-100000"),
        ("tpu7x-8", "GKE"),
        ("a100-8", "there is v2, v3, v4, v5litepod"),
        ("v4", "FAMILY-NUMBER"),
        ("v4-08", "FAMILY-NUMBER"),
    ],
)
def test_a_type_that_is_none_is_refused_with_what_there_is(run, gcloud, type, said):
    done = run("tpu_vm_create.sh", "--node=n", f"--type={type}")
    assert done.returncode == 64
    assert done.stderr.startswith(f"error: --type={type}: ") and said in done.stderr and done.stderr.count("\n") == 1
    assert gcloud.calls == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--node is missing"),
        (["--node=My TPU", "--type=v4-8"], "--node=My TPU"),
        (["--node=n"], "--type is missing"),
        (["--node=n", "--type=v4-8", "--zone=a b"], "--zone=a b"),
        (["--node=n", "--type=v4-8", "--tf_version=2.20"], "--tf_version=2.20"),
        (["--node=n", "--type=v4-8", "--tf_version=2.9.1"], "TensorFlow 2.9.1"),
        (["--node=n", "--type=v4-16", "--runtime_version=tpu-vm-tf-2.15.0-pod-pjrt"], "TensorFlow 2.15.0"),
        (["--node=n", "--type=v4-16", "--runtime_version=tpu-vm-tf-2.17.0-pjrt"], "tpu-vm-tf-X.Y.Z-pod-pjrt"),
        (["--node=n", "--type=v4-8", "--wait=5"], "--queued"),
        (["--node=n", "--type=v4-8", "--valid_until=6h"], "--queued"),
        (["--node=n", "--type=v4-8", "--queued", "--valid_until=soon"], "--valid_until=soon"),
        (["--node=n", "--type=v4-8", "--", "--gin_file=x.gin"], "need --source"),
        (["--node=n", "--type=v4-8", "--ref=v1"], "--ref=v1"),
        (["--node=n", "--type=v4-8", "--source=/here", "--", "--gin_file=x"], "cannot see"),
        (["--node=n", "--type=v4-8", "--source=launcher", "--", "--gin_file=x"], "--source=launcher"),
        (["--node=n", "--type=v4-8", "--source=gs://b/f", "--ref=v1", "--", "--gin_file=x"], "no refs"),
        (["--node=n", "--type=v4-8", *JOB[:1]], "without a recipe"),
        (["--node=n", "--type=v4-8", *JOB, "--gin_param=a\nb"], "several lines"),
        (["--node=n", "--type=v4-8", *JOB, "--gin_param=a|;|b"], "'|;|'"),
        (["--node=n", "--type=v4-8", *JOB, "--dry_run"], "--dry_run behind -- would have the node made"),
        (["--node=n", "--type=v4-8", "--spott"], "unknown option --spott"),
    ],
)  # fmt: skip
def test_create_refuses_a_mistake_before_it_asks_anybody(run, gcloud, arguments, said):
    done = run("tpu_vm_create.sh", *arguments)
    assert done.returncode == 64
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") <= 2
    assert gcloud.calls == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gin_file=resnet_tpy.gin"], "gin file 'resnet_tpy.gin' not found"),
        pytest.param(
            [*JOB[2:], "--gin_param=train.stepz = 3"],
            "no parameter 'stepz' to bind; did you mean 'steps'?",
            marks=pytest.mark.nightly,
        ),
        ([*JOB[2:], "--replica=8"], "unknown flag --replica; did you mean 'replicas'?"),
        (["--gin_file=/mnt/disks/mine.gin"], ""),
    ],
)
def test_nothing_is_created_for_a_recipe_or_a_binding_that_is_none(run, gcloud, flags, said):
    gcloud.answers({(*NODE, "describe"): [NOT_FOUND], (*NODE, "create"): [(0, "", "")]})
    image = "--runtime_version=tpu-vm-tf-2.20.0-pjrt"
    done = run("tpu_vm_create.sh", "--node=n", "--type=v4-8", image, *JOB[:2], *flags, PYTHON=sys.executable)
    if said:
        assert (done.returncode, gcloud.changes()) == (64, [])
        assert done.stderr.startswith("error: behind --: ") and said in done.stderr and done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0 and len(gcloud.changes()) == 1
        assert "note: recipe and bindings are not checked" in done.stderr


def test_the_job_travels_in_the_metadata_with_commas_and_spaces(run, gcloud):
    done = run(
        "tpu_vm_create.sh", "--dry_run", "--node=n", "--type=v5litepod-16", "--ref=v1", "--save_to=gs://b/run",
        *JOB, "--gin_param=train.precision = 'float32'", "--gin_param=a.b = (1, 2)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.splitlines()[-1].replace("$'", "'").replace("\\'", ""))
    (metadata,) = [word for word in words if word.startswith("--metadata=")]
    # https://cloud.google.com/sdk/gcloud/reference/topic/escaping
    assert metadata.startswith("--metadata=^|;|^")
    values = dict(item.split("=", 1) for item in metadata.removeprefix("--metadata=^|;|^").split("|;|"))
    assert values["launcher-source"] == JOB[0].split("=", 1)[1]
    assert (values["launcher-node"], values["launcher-ref"], values["launcher-save-to"]) == ("n", "v1", "gs://b/run")
    assert "(1, 2)" in values["launcher-flags"]
    assert f"--metadata-from-file=startup-script={ROOT}/scripts/tpu_vm_startup.sh" in words


def test_a_token_in_the_source_is_not_shown(run, gcloud):
    token = "--source=https://me:s3cret@example.com/launcher.git"
    done = run("tpu_vm_create.sh", "--dry_run", "--node=n", "--type=v5litepod-16", token, "--", "--gin_file=x.gin")
    assert done.returncode == 0 and "https://HIDDEN@example.com/launcher.git" in done.stdout
    mistake = run("tpu_vm_create.sh", "--node=n", "--type=v4-8", token.replace("https", "htps"), "--", "--gin_file=x")
    assert mistake.returncode == 64 and "HIDDEN@" in mistake.stderr
    assert "s3cret" not in done.stdout + done.stderr + mistake.stdout + mistake.stderr


@pytest.mark.parametrize("state", ["READY", "CREATING", "REPAIRING"])
def test_a_node_that_exists_is_left_as_it_is(run, gcloud, state):
    gcloud.answers({(*NODE, "describe"): [says(state)]})
    done = run("tpu_vm_create.sh", "--node=n", "--type=v4-8")
    assert done.returncode == 0
    assert done.stderr == f"n exists already, and is {state}\n"
    assert gcloud.changes() == []


def test_a_request_that_waits_in_the_queue_is_left_as_it_is(run, gcloud):
    gcloud.answers({(*NODE, "describe"): [NOT_FOUND], (*QUEUED, "describe"): [says("WAITING_FOR_RESOURCES")]})
    done = run("tpu_vm_create.sh", "--queued", "--node=n", "--type=v4-8")
    assert done.returncode == 0 and "WAITING_FOR_RESOURCES" in done.stderr
    done = run("tpu_vm_create.sh", "--queued", "--wait=0", "--node=n", "--type=v4-8")
    assert done.returncode == 75 and "stays in the queue" in done.stderr
    assert gcloud.changes() == []


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED", "STOPPED", "DELETING"])
def test_a_node_that_is_lost_is_not_taken_for_one_that_is_there(run, gcloud, state):
    gcloud.answers({(*NODE, "describe"): [says(state)]})
    done = run("tpu_vm_create.sh", "--node=n", "--type=v4-8", "--zone=z")
    assert done.returncode == 75 and state in done.stderr and done.stderr.count("\n") == 1
    assert gcloud.changes() == []


def test_a_preempted_node_is_made_anew_when_asked(run, gcloud):
    gcloud.answers(
        {
            (*NODE, "describe"): [says("PREEMPTED"), says("n-request")],
            (*NODE, "versions", "list"): [says("tpu-vm-tf-2.20.0-pjrt")],
            (*NODE, "delete"): [(0, "", "")],
            (*QUEUED, "describe"): [says("ACTIVE"), says("SUSPENDED")],
            (*QUEUED, "delete"): [(0, "", "")],
            (*QUEUED, "create"): [(0, "", "")],
        }
    )
    done = run("tpu_vm_create.sh", "--node=n", "--type=v4-8", "--zone=z", "--queued", "--spot", "--recreate")
    assert done.returncode == 0, done.stderr
    assert [call[2:5] for call in gcloud.changes()] == [
        ["tpu-vm", "delete", "n"], ["queued-resources", "delete", "n-request"], ["queued-resources", "create", "n"]
    ]  # fmt: skip


def test_nothing_is_created_where_the_remains_cannot_be_deleted(run, gcloud):
    gcloud.answers(
        {
            (*NODE, "describe"): [says("PREEMPTED"), says("")],
            (*QUEUED, "describe"): [NOT_FOUND],
            (*NODE, "delete"): [(1, "", "ERROR: PERMISSION_DENIED\n")],
            (*NODE, "versions", "list"): [says("tpu-vm-tf-2.20.0-pjrt")],
            (*NODE, "create"): [(0, "", "")],
        }
    )
    done = run("tpu_vm_create.sh", "--node=n", "--type=v4-8", "--recreate")
    assert done.returncode != 0
    assert [call[3] for call in gcloud.changes()] == ["delete"]


def chosen(run, gcloud, type, images, *arguments):
    """The image that is chosen of a zone's, the tensorflow-tpu of the program, and what is said."""
    gcloud.answers(
        {
            (*NODE, "describe"): [NOT_FOUND],
            (*NODE, "versions", "list"): [says("\n".join(images))],
            (*NODE, "create"): [(0, "", "")],
        }
    )
    before = len(gcloud.changes())
    done = run("tpu_vm_create.sh", "--node=n", f"--type={type}", *arguments, *JOB)
    if done.returncode:
        assert done.returncode == 64 and len(gcloud.changes()) == before
        return None, None, done.stderr
    create = gcloud.changes()[-1]
    (image,) = (word.partition("=")[2] for word in create if word.startswith("--version="))
    (metadata,) = (word for word in create if word.startswith("--metadata="))
    return image, metadata.partition("|;|launcher-tf-version=")[2].partition("|;|")[0], done.stderr


# As zones list them: tensorflow/tensorflow issues 82208 and 93618, and Google's page of TPU software versions.
ZONE = [
    "tpu-ubuntu2204-base", "v2-alpha-tpuv5-lite", "tpu-vm-tf-2.9.1", "tpu-vm-tf-2.15.0-pod-pjrt",
    "tpu-vm-tf-2.16.1-pjrt", "tpu-vm-tf-2.16.1-pod-pjrt", "tpu-vm-tf-2.16.1-pod-se", "tpu-vm-tf-2.17.0-pjrt",
    "tpu-vm-tf-2.17.0-pod-pjrt", "tpu-vm-tf-2.18.0-pjrt", "tpu-vm-tf-2.18.0-pod-pjrt",
    "tpu-vm-tf-2.18.0-pod-pjrt-v5e-and-v6", "tpu-vm-tf-2.18.0-pod-pjrt-v5p-and-below",
    "tpu-vm-tf-2.18.0-pjrt-v5e-and-v6", "tpu-vm-tf-2.18.0-pjrt-v5p-and-below", "tpu-vm-tf-2.19.0-pod-pjrt",
]  # fmt: skip


@pytest.mark.parametrize(
    ("type", "more", "arguments", "image", "program"),
    [
        # A pod: the newest that nothing is known against, and the program is of its version.
        ("v5litepod-16", [], [], "tpu-vm-tf-2.17.0-pod-pjrt", "2.17.0"),
        ("v4-32", ["tpu-vm-tf-2.17.1-pod-pjrt"], [], "tpu-vm-tf-2.17.1-pod-pjrt", "2.17.1"),
        ("v4-32", ["tpu-vm-tf-2.20.0-pod-pjrt"], [], "tpu-vm-tf-2.20.0-pod-pjrt", "2.20.0"),
        ("v4-32", ["tpu-vm-tf-2.20.0-pod-pjrt-v5e-and-v6"], [], "tpu-vm-tf-2.17.0-pod-pjrt", "2.17.0"),
        ("v4-32", ["tpu-vm-tf-2.99.0-pod-pjrt"], [], "tpu-vm-tf-2.17.0-pod-pjrt", "2.17.0"),
        # The family's own variant first.
        ("v6e-16", [], ["--tf_version=2.18.0"], "tpu-vm-tf-2.18.0-pod-pjrt-v5e-and-v6", "2.18.0"),
        ("v5p-16", [], ["--tf_version=2.18.0"], "tpu-vm-tf-2.18.0-pod-pjrt-v5p-and-below", "2.18.0"),
        # PyPI has no tensorflow-tpu 2.19.0.
        ("v4-32", [], ["--tf_version=2.19.0"], "tpu-vm-tf-2.19.0-pod-pjrt", "2.19.1"),
        # One host: the newest image, and the program brings its own TensorFlow unless a version is asked for.
        ("v5litepod-8", [], [], "tpu-vm-tf-2.18.0-pjrt-v5e-and-v6", "2.20.0"),
        ("v3-8", [], [], "tpu-vm-tf-2.18.0-pjrt-v5p-and-below", "2.20.0"),
        ("v3-8", [], ["--tf_version=2.16.1"], "tpu-vm-tf-2.16.1-pjrt", "2.16.1"),
    ],
)  # fmt: skip
def test_the_newest_image_is_chosen_that_is_known_to_work(run, gcloud, type, more, arguments, image, program):
    found, installed, said = chosen(run, gcloud, type, [*more, *ZONE], *arguments)
    assert (found, installed) == (image, program), said
    assert f"image: {image}\n" in said


def test_what_is_known_against_a_version_that_was_asked_for_is_said(run, gcloud):
    assert "note: pods of TensorFlow 2.18.0 hang" in chosen(run, gcloud, "v4-32", ZONE, "--tf_version=2.18.0")[2]
    image = "--runtime_version=tpu-vm-tf-2.19.0-pod-pjrt"
    assert "note: pods of TensorFlow 2.19.0 hang" in chosen(run, gcloud, "v4-32", ZONE, image)[2]
    later = chosen(run, gcloud, "v4-32", ["tpu-vm-tf-2.99.0-pod-pjrt"], "--tf_version=2.99.0")
    assert later[:2] == ("tpu-vm-tf-2.99.0-pod-pjrt", "2.99.0") and "was not on PyPI" in later[2]
    assert "note:" not in chosen(run, gcloud, "v4-8", ZONE, "--tf_version=2.18.0")[2]  # no pod


@pytest.mark.parametrize(
    ("type", "images", "arguments", "parts"),
    [
        ("v4-16", ["tpu-vm-tf-2.15.0-pod-pjrt"], [], ("from 2.16.0 on", "2.15.0", "another zone")),
        ("v4-16", ["tpu-vm-tf-2.20.0-pjrt"], [], ("there is: none", "another zone")),
        ("v4-16", ["tpu-vm-tf-2.18.0-pod-pjrt"], [], ("2.18.0 hang", "--tf_version=2.18.0", "one host")),
        ("v4-8", ["tpu-vm-tf-2.15.0-pjrt"], [], ("2.15.0", "--runtime_version")),
        ("v4-8", ZONE, ["--tf_version=2.20.0"], ("tpu-vm-tf-2.20.0-pjrt", "2.18.0 2.17.0", "leave --tf_version out")),
    ],
)
def test_a_zone_without_an_image_is_told_what_it_has_and_what_to_do(run, gcloud, type, images, arguments, parts):
    image, _, said = chosen(run, gcloud, type, images, *arguments)
    assert image is None and said.count("\n") == 1
    for part in (*parts, "this zone has no image"):
        assert part in said, said


@pytest.mark.parametrize(
    ("type", "image", "replicas"),
    [
        ("v3-8", "tpu-ubuntu2204-base", 8),
        ("v4-32", "tpu-ubuntu2204-base", 4),
        ("v5litepod-8", "v2-alpha-tpuv5-lite", 8),
        ("v5litepod-16", "v2-alpha-tpuv5-lite", 4),
        ("v5p-16", "v2-alpha-tpuv5", 4),
        ("v6e-64", "v2-alpha-tpuv6e", 4),
    ],
)
def test_with_jax_any_slice_has_an_image_and_a_host_its_own_replicas(run, gcloud, type, image, replicas):
    gcloud.answers({(*NODE, "describe"): [NOT_FOUND], (*NODE, "create"): [(0, "", "")]})
    done = run("tpu_vm_create.sh", "--node=n", f"--type={type}", "--engine=pjrt", *JOB)
    assert done.returncode == 0, done.stderr
    (create,) = gcloud.changes()  # the zone is not asked for TensorFlow's images
    assert f"--version={image}" in create and f"image: {image}\n" in done.stderr
    (metadata,) = (word for word in create if word.startswith("--metadata="))
    assert f"|;|launcher-tf-version=|;|launcher-replicas={replicas}|;|" in metadata
    assert metadata.endswith("--engine=pjrt")


def test_with_jax_an_image_by_name_is_taken_unless_tensorflows_workers_hold_the_chips(run, gcloud):
    words = ("tpu_vm_create.sh", "--dry_run", "--node=n", "--type=v6e-16", *JOB, "--engine=pjrt")
    assert "--version=mine" in run(*words[:4], "--runtime_version=mine", *words[4:]).stdout
    for option, said in (
        ("--runtime_version=tpu-vm-tf-2.17.0-pod-pjrt", "take another, such as v2-alpha-tpuv6e"),
        ("--tf_version=2.17.0", "--tf_version=2.17.0: with --engine=pjrt"),
    ):
        done = run(*words[:4], option, *words[4:])
        assert done.returncode == 64 and said in done.stderr and done.stderr.count("\n") == 1


def test_the_page_says_of_each_version_what_the_script_goes_by():
    text = (ROOT / "scripts/tpu_types.bash").read_text()
    on_pypi, hang = (
        re.search(rf"^{name}=\((.*)\)$", text, re.MULTILINE)[1].split() for name in ("tensorflow_tpu", "pods_hang")
    )
    rows = [
        line.split(" | ") for line in (ROOT / "docs/tpu.md").read_text().splitlines() if re.match(r"\| 2\.\d", line)
    ]
    assert [version for row in rows for version in re.findall(r"2\.\d+\.\d+", row[2].partition(";")[0])] == on_pypi
    assert [row[0].removeprefix("| ") for row in rows if "left out" in row[1]] == hang


def test_a_dry_run_shows_the_question_and_the_rule(run, gcloud):
    done = run("tpu_vm_create.sh", "--dry_run", "--node=n", "--type=v6e-16", "--zone=z", *JOB)
    assert done.returncode == 0, done.stderr
    assert "+ gcloud compute tpus tpu-vm versions list --zone=z " in done.stdout
    assert (
        "tpu-vm-tf-X.Y.Z-pod-pjrt-v5e-and-v6, or else tpu-vm-tf-X.Y.Z-pod-pjrt; the newest from 2.16 on" in done.stdout
    )
    assert "launcher-tf-version=<version of the image>" in shlex.split(done.stdout.splitlines()[-1])[-2].replace(
        "\\", ""
    )


def test_one_host_does_with_any_image_as_the_program_brings_tensorflow(run, gcloud):
    gcloud.answers({(*NODE, "describe"): [NOT_FOUND], (*NODE, "create"): [(0, "", "")]})
    image = "--runtime_version=tpu-vm-tf-2.18.0-pjrt-v5e-and-v6"
    done = run("tpu_vm_create.sh", "--node=n", "--type=v5litepod-8", image, *JOB)
    assert done.returncode == 0, done.stderr
    (create,) = gcloud.changes()
    assert "--version=tpu-vm-tf-2.18.0-pjrt-v5e-and-v6" in create
    assert any("|;|launcher-tf-version=2.20.0|;|" in word for word in create)


def test_what_gcloud_says_of_other_errors_is_shown_and_nothing_done(run, gcloud):
    gcloud.answers({(*NODE, "describe"): [(1, "", "ERROR: PERMISSION_DENIED: who are you\n")]})
    for script, arguments in (("tpu_vm_create.sh", ["--type=v4-8"]), ("tpu_vm_delete.sh", ["--yes"])):
        done = run(script, "--node=n", *arguments)
        assert done.returncode == 64 and "who are you" in done.stderr
    assert gcloud.changes() == []


def test_a_machine_without_gcloud_is_told_what_to_install(run, tmp_path):
    for tool in ("bash", "dirname", "env", "sort", "head", "sed"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}" if os.path.exists(f"/bin/{tool}") else f"/usr/bin/{tool}")
    done = run("tpu_vm_create.sh", "--node=n", "--type=v4-8", path=str(tmp_path))
    assert done.returncode == 64 and "there is no gcloud on PATH" in done.stderr
