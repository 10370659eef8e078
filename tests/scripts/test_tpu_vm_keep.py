"""scripts/tpu_vm_keep.sh: a node that is lost is made anew, here or in another zone, until its run has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from places import ROOT
from recorded_gcloud import NODE, NOT_FOUND, QUEUED, says

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="the scripts are bash"), pytest.mark.slow]

WHERE = ("--node=n", "--type=v4-8", "--save_to=gs://b/run", "--every=0")
JOB = ("--source=https://example.com/launcher.git", "--", "--gin_file=resnet_tpu.gin")
SUMMARY = ("storage", "cat", "gs://b/run/summary.json")
NOTHING = (1, "", "ERROR: (gcloud.storage.cat) The following URLs matched no objects or files:\n")
FULL = (1, "", "ERROR: (gcloud.compute.tpus.tpu-vm.create) There is no more capacity in the zone\n")
DONE = (0, "", "")


def ended(status, code):
    return 0, json.dumps({"schema_version": 1, "status": status, "exit_code": code}, indent=2), ""


def start(gcloud, *arguments):
    return subprocess.Popen(
        [str(ROOT / "scripts" / "tpu_vm_keep.sh"), *arguments],
        env={**os.environ, "PYTHON": "true", "PATH": f"{gcloud.folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def keep(gcloud):
    """keep(*arguments, summaries, answers): runs it to its end; also what was changed, and in which zone."""

    def call(*arguments, summaries=(), answers=None):
        table = {
            SUMMARY: list(summaries),
            (*NODE, "versions", "list"): [says("tpu-vm-tf-2.20.0-pjrt")],
            (*NODE, "delete"): [DONE],
            (*NODE, "create"): [DONE],
            **(answers or {}),
        }
        gcloud.answers({words: given for words, given in table.items() if given})
        process = start(gcloud, *WHERE, *arguments)
        out, err = process.communicate(timeout=120)
        zones = [
            next(word.partition("=")[2] for word in call if word.startswith("--zone=")) for call in gcloud.changes()
        ]
        return (
            process.returncode,
            out,
            err,
            [(call[3], zone) for call, zone in zip(gcloud.changes(), zones, strict=True)],
        )

    return call


def test_a_node_that_is_taken_away_is_made_anew_and_deleted_when_the_run_is_done(keep):
    code, _, err, changes = keep(
        "--zones=a", "--spot", *JOB,
        summaries=[NOTHING, NOTHING, ended("preempted", 42), ended("preempted", 42), ended("completed", 0)],
        answers={(*NODE, "describe"): [NOT_FOUND, NOT_FOUND, says("READY"), says("PREEMPTED"), says(""), says("READY")],
                 (*QUEUED, "describe"): [NOT_FOUND]},
    )  # fmt: skip
    assert code == 0, err
    assert changes == [("create", "a"), ("delete", "a"), ("create", "a"), ("delete", "a")]
    assert "n is PREEMPTED: deleting what is left of it" in err
    assert "the run has ended with 0: deleting n" in err


def test_a_zone_without_room_is_passed_over(keep):
    code, _, err, changes = keep(
        "--zones=a,b", *JOB,
        summaries=[NOTHING, NOTHING, ended("completed", 0)],
        answers={(*NODE, "describe"): [NOT_FOUND], (*QUEUED, "describe"): [NOT_FOUND], (*NODE, "create"): [FULL, DONE]},
    )  # fmt: skip
    assert code == 0, err
    assert changes == [("create", "a"), ("create", "b")]
    assert "no more capacity" in err and "a does not give n now" in err


def test_a_request_that_is_not_granted_in_time_does_not_stay_in_the_queue_of_its_zone(keep):
    code, _, err, changes = keep(
        "--zones=a,b", "--queued", "--wait=0", *JOB,
        summaries=[NOTHING, NOTHING, ended("completed", 0)],
        answers={(*NODE, "describe"): [NOT_FOUND], (*QUEUED, "create"): [DONE], (*QUEUED, "delete"): [DONE],
                 (*QUEUED, "describe"): [*[NOT_FOUND] * 3, *[says("WAITING_FOR_RESOURCES")] * 3, NOT_FOUND,
                                         says("ACTIVE"), NOT_FOUND]},
    )  # fmt: skip
    assert code == 0, err
    assert changes[:3] == [("create", "a"), ("delete", "a"), ("create", "b")], err


def test_a_failure_that_a_restart_would_not_mend_ends_it_unless_it_is_an_old_one(keep):
    old, new = ended("failed", 64), ended("failed", 70)
    code, _, err, changes = keep(
        "--zones=a", *JOB, summaries=[old, old, old, new],
        answers={(*NODE, "describe"): [NOT_FOUND, NOT_FOUND, says("READY")], (*QUEUED, "describe"): [NOT_FOUND]},
    )  # fmt: skip
    assert code == 70, err
    assert changes == [("create", "a"), ("delete", "a")]


def test_a_node_that_an_earlier_call_has_made_is_found_in_its_zone(keep):
    code, _, err, changes = keep(
        "--zones=a,b", *JOB, summaries=[NOTHING, NOTHING, ended("completed", 0)],
        answers={(*NODE, "describe"): [NOT_FOUND, says("READY")], (*QUEUED, "describe"): [NOT_FOUND]},
    )  # fmt: skip
    assert code == 0, err
    assert changes == [("delete", "b")]


def test_a_run_that_is_done_gets_no_node(keep):
    code, _, err, changes = keep("--zones=a", *JOB, summaries=[ended("completed", 0)])
    assert (code, changes) == (0, []), err


def test_a_bucket_that_does_not_answer_ends_nothing_and_begins_nothing(keep):
    silent, old = (1, "", "ERROR: (gcloud.storage.cat) HTTPError 503\n"), ended("failed", 64)
    code, _, err, changes = keep("--zones=a", *JOB, summaries=[silent])
    assert (code, changes) == (64, []) and "503" in err and "cannot read gs://b/run" in err
    code, _, err, changes = keep(
        "--zones=a", *JOB, summaries=[old, old, silent, old, ended("completed", 0)],
        answers={(*NODE, "describe"): [says("READY")], (*QUEUED, "describe"): [NOT_FOUND]},
    )  # fmt: skip
    assert code == 0, err


def test_a_signal_leaves_the_node_and_says_so(gcloud):
    gcloud.answers({SUMMARY: [NOTHING], (*NODE, "describe"): [says("READY")]})
    process = start(gcloud, *WHERE, "--zones=a", "--every=600", *JOB)
    deadline = time.monotonic() + 60
    while sum(call[:4] == [*NODE, "describe"] for call in gcloud.calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "n stays as it is" in err
    assert gcloud.changes() == []


def test_a_dry_run_shows_what_would_be_run_and_asks_nobody(keep, gcloud):
    code, out, err, changes = keep("--dry_run", "--zones=a,b", *JOB)
    assert (code, changes, gcloud.calls) == (0, [], []), err
    assert out.count("tpu-vm create n") == 2 and "--zone=b" in out and "storage cat gs://b/run/summary.json" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--node=n", "--save_to=gs://b/run"), "--zones is missing"),
        (("--node=n", "--zones=a"), "--save_to is missing"),
        (("--zones=a", "--save_to=gs://b/run"), "--node is missing"),
        (("--node=n", "--zones=a", "--save_to=gs://b/run", "--zone=b"), "--zone=b: leave it out"),
        (("--node=n", "--zones=a,B!", "--save_to=gs://b/run"), "--zones=B!"),
        (("--node=n", "--zones=a", "--save_to=gs://b/run", "--every=soon"), "--every=soon"),
        (("--node=n", "--zones=a", "--save_to=gs://b/run", "resnet"), "unknown option resnet"),
    ],
)
def test_a_mistake_is_one_message_before_anything_is_asked(gcloud, arguments, said):
    process = start(gcloud, *arguments)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 64 and said in err and err.count("\n") == 1
    assert gcloud.calls == []
