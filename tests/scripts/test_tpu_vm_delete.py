"""tpu_vm_delete.sh by a stand-in for gcloud. What it runs is compared with commands of Google's documentation."""

from __future__ import annotations

import os

import pytest
from recorded_gcloud import NODE, NOT_FOUND, QUEUED, documented, says

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="the scripts are bash"), pytest.mark.slow]

DELETE = ("tpu_vm_delete.sh", "--node=n", "--zone=z")
QUEUED_NODE = {
    (*NODE, "describe"): [says("request")],
    (*QUEUED, "describe"): [says("ACTIVE"), says("SUSPENDING"), says("SUSPENDED")],
    (*NODE, "delete"): [(0, "", "")],
    (*QUEUED, "delete"): [(0, "", "")],
}


def test_the_node_goes_first_and_the_queued_resource_when_it_is_suspended(run, gcloud):
    gcloud.answers(QUEUED_NODE)
    done = run(*DELETE, "--yes", "--wait=600")
    assert done.returncode == 0, done.stderr
    # https://cloud.google.com/tpu/docs/queued-resources, "Delete a queued resource"
    assert gcloud.changes() == [
        documented("gcloud compute tpus tpu-vm delete n --zone=z --quiet"),
        documented("gcloud compute tpus queued-resources delete request --zone=z --quiet"),
    ]
    order = [(call[2], call[3]) for call in gcloud.calls]
    assert order[order.index(("tpu-vm", "delete")) :] == [
        ("tpu-vm", "delete"), ("queued-resources", "describe"), ("queued-resources", "describe"),
        ("queued-resources", "delete"),
    ]  # fmt: skip


def test_force_leaves_the_order_to_the_service(run, gcloud):
    gcloud.answers(QUEUED_NODE)
    assert run(*DELETE, "--yes", "--force").returncode == 0
    assert gcloud.changes() == [
        documented("gcloud compute tpus queued-resources delete request --zone=z --force --quiet")
    ]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_node_that_was_not_queued_is_just_deleted(run, gcloud, force):
    gcloud.answers({**QUEUED_NODE, (*NODE, "describe"): [says("")], (*QUEUED, "describe"): [NOT_FOUND]})
    assert run(*DELETE, "--yes", *force).returncode == 0
    assert [call[2:5] for call in gcloud.changes()] == [["tpu-vm", "delete", "n"]]


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED", "WAITING_FOR_RESOURCES", "ACCEPTED"])
def test_a_queued_resource_without_its_node_is_deleted(run, gcloud, state):
    gcloud.answers({**QUEUED_NODE, (*NODE, "describe"): [NOT_FOUND], (*QUEUED, "describe"): [says(state)]})
    assert run(*DELETE, "--yes").returncode == 0
    assert [call[2:5] for call in gcloud.changes()] == [["queued-resources", "delete", "n"]]


def test_one_that_is_not_suspended_in_time_is_for_the_next_try(run, gcloud):
    gcloud.answers({**QUEUED_NODE, (*QUEUED, "describe"): [says("SUSPENDING")]})
    done = run(*DELETE, "--yes", "--wait=0")
    assert done.returncode == 75 and "--force" in done.stderr
    assert [call[2:4] for call in gcloud.changes()] == [["tpu-vm", "delete"]]


def test_what_is_gone_already_is_no_error(run, gcloud):
    gcloud.answers({(*NODE, "describe"): [NOT_FOUND], (*QUEUED, "describe"): [NOT_FOUND]})
    done = run(*DELETE)
    assert done.returncode == 0 and "nothing to delete" in done.stderr
    assert gcloud.changes() == []


@pytest.mark.parametrize(
    ("answer", "code", "deleted"), [("y\n", 0, 2), ("yes\n", 0, 2), ("n\n", 1, 0), ("\n", 1, 0), ("", 64, 0)]
)
def test_nothing_is_deleted_without_a_yes(run, gcloud, answer, code, deleted):
    gcloud.answers(QUEUED_NODE | {(*QUEUED, "describe"): [says("SUSPENDED")]})
    done = run(*DELETE, stdin=answer)
    assert done.returncode == code, done.stderr
    assert "the node n with its disks and the queued resource request" in done.stderr
    assert len(gcloud.changes()) == deleted


def test_a_dry_run_shows_the_order_and_asks_nobody(run, gcloud):
    done = run(*DELETE, "--dry_run")
    assert done.returncode == 0
    told = [
        " ".join(line.split()[4:6]) for line in done.stdout.splitlines() if line.startswith("+ gcloud compute tpus")
    ]
    assert told == ["tpu-vm describe", "tpu-vm delete", "queued-resources describe", "queued-resources delete"]
    assert gcloud.calls == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--node is missing"),
        (["--node=n", "-y"], "unknown option -y"),
        (["--node=n", "--wait=long"], "--wait=long"),
    ],
)
def test_delete_refuses_a_mistake_before_it_asks_anybody(run, gcloud, arguments, said):
    done = run("tpu_vm_delete.sh", *arguments)
    assert done.returncode == 64 and said in done.stderr
    assert gcloud.calls == []
