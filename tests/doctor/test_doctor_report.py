"""--mode=doctor as its users and their programs meet it: lines, JSON, exit codes, checks that break."""

from __future__ import annotations

import json
import subprocess
import sys

import jsonschema
import pytest
from places import ROOT

from launcher import main as entry
from launcher.doctor import examination
from launcher.doctor.check import Context, Skip, exit_code, fail, ok, warn, worst
from launcher.doctor.examination import CHECKS, Check, examine

QUICK = "python,tensorflow_package,packages,variables,cores,memory,open_files,shared_memory,cluster"

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["schema_version", "status", "exit_code", "findings", "not_checked"],
    "properties": {
        "schema_version": {"const": 1},
        "status": {"enum": ["ok", "warn", "fail"]},
        "exit_code": {"enum": [0, 64, 70, 75]},
        "findings": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["check", "status", "seen", "fix", "exit_code"],
                "properties": {
                    "check": {"enum": [check.name for check in CHECKS]},
                    "status": {"enum": ["ok", "warn", "fail"]},
                    "seen": {"type": "string", "minLength": 1},
                    "fix": {"type": "string"},
                    "exit_code": {"enum": [0, 64, 70, 75]},
                },
            },
        },
        "not_checked": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["check", "why"],
                "properties": {"check": {"type": "string"}, "why": {"type": "string", "minLength": 1}},
            },
        },
    },
}


@pytest.fixture
def doctor(capsys, monkeypatch):
    """doctor(*flags) -> (exit code, report): runs it in this process, in JSON, without a cluster."""
    monkeypatch.delenv("TF_CONFIG", raising=False)

    def run(*flags):
        code = entry.main(["launcher", "--mode=doctor", "--json", *flags])
        report = json.loads(capsys.readouterr().out)
        jsonschema.validate(report, SCHEMA)
        assert report["exit_code"] == code
        assert all(one["fix"] for one in report["findings"] if one["status"] != "ok")
        return code, report

    return run


def of(report, check):
    return [one for one in report["findings"] if one["check"] == check]


def test_quick_checks_find_nothing_broken_here_and_their_report_keeps_its_schema(doctor):
    code, report = doctor(f"--doctor_checks={QUICK}")
    assert {one["check"] for one in report["findings"]} == set(QUICK.split(","))
    assert code != 70, report
    (python,) = of(report, "python")
    assert python["seen"].startswith(sys.version.split()[0])


def test_lines_say_what_json_says(doctor, capsys):
    checks = "--doctor_checks=python,tensorflow_package,cluster,model_dir"
    _, report = doctor(checks)
    entry.main(["launcher", "--mode=doctor", checks])
    text = " ".join(capsys.readouterr().out.split())
    for one in report["findings"]:
        assert f"{one['status']} {one['check']} {' '.join(one['seen'].split())}" in text
    assert "not checked: model_dir (neither --model_dir nor --gin_file is given)" in text
    assert report["not_checked"] == [{"check": "model_dir", "why": "neither --model_dir nor --gin_file is given"}]


def test_dry_run_lists_all_checks_and_makes_none(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examination, "examine", None)
    assert entry.main(["launcher", "--mode=doctor", "--dry_run"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [check.name for check in CHECKS]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mode=doctor", "--doctor_checks=memry"], ["memry", "did you mean 'memory'"]),
        (["--mode=doctor", "--doctor_wait=0"], ["--doctor_wait=0"]),
        (["--json"], ["--json is for --mode=doctor"]),
        (["--doctor_checks=memory"], ["--doctor_checks is for --mode=doctor"]),
    ],
)
def test_wrong_flags_are_one_message(flags, said, capsys):
    assert entry.main(["launcher", *flags]) == 64
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert all(part in message for part in said)


def breaks(context):
    yield ok("so far")
    raise RuntimeError("the check is wrong")


def needs_a_package(context):
    raise ModuleNotFoundError("No module named 'nonesuch'", name="nonesuch")
    yield


def skips(context):
    raise Skip("nothing there")
    yield


def test_a_check_that_breaks_is_a_line_and_the_others_go_on(capsys):
    runs = (breaks, needs_a_package, skips, lambda context: [ok("still here")])
    checks = [Check(name, "", run) for name, run in zip("abcd", runs, strict=True)]
    findings, skipped = examine(checks, Context(environ={}), examination.show)
    assert [one.check for one in findings] == ["a", "a", "b", "d"]
    assert [(one.status, one.exit_code) for one in findings] == [("ok", 0), ("fail", 70), ("fail", 64), ("ok", 0)]
    assert "RuntimeError: the check is wrong" in findings[1].seen
    assert findings[2].fix == "pip install nonesuch"
    examination.show_end(findings, skipped, exit_code(findings))
    printed = capsys.readouterr().out
    assert "not checked: c (nothing there)" in printed
    assert "2 ok, 0 warn, 2 fail; exit code 64" in printed


def test_the_exit_code_is_that_of_the_worst_and_only_passing_failures_ask_for_a_retry():
    mend, ours, passing = fail("", ""), fail("", "", exit_code=70), fail("", "", exit_code=75)
    fine, hint = ok(""), warn("", "")
    assert [exit_code(found) for found in ([], [fine], [fine, hint])] == [0, 0, 0]
    assert exit_code([hint, passing]) == 75
    assert exit_code([passing, ours]) == 70
    assert exit_code([passing, ours, mend, fine]) == 64
    assert [worst(found) for found in ([], [fine, hint], [hint, passing])] == ["ok", "warn", "fail"]


def test_an_empty_environment_is_examined_and_no_process_of_its_own_imports_tensorflow(tmp_path):
    script = (
        "import sys\nfrom launcher import main\n"
        f"code = main.main(['launcher', '--mode=doctor', '--json', '--doctor_checks={QUICK}'])\n"
        "print('imported' if {'tensorflow', 'keras', 'jax'} & set(sys.modules) else 'clean', file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 64), done.stderr
    assert done.stderr.split()[-1] == "clean"  # behind what a check waits for, on a busy machine
    report = json.loads(done.stdout)
    assert [one["seen"] for one in of(report, "cluster")] == ["one process, no peers"]


BROKEN = {
    "no JSON": ('{"cluster": ', "not JSON"),
    "no task": ('{"cluster": {"worker": ["a:1", "b:1"]}}', "task"),
    "index past the end": (
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 3}}',
        "the index counts from 0",
    ),
    "no port": ('{"cluster": {"worker": ["a", "b:1"]}, "task": {"type": "worker", "index": 0}}', "port"),
    "twice": ('{"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}', "2 times"),
}


@pytest.mark.parametrize("variant", BROKEN)
def test_a_broken_tf_config_is_a_line_with_the_way_out(doctor, monkeypatch, variant):
    value, said = BROKEN[variant]
    monkeypatch.setenv("TF_CONFIG", value)
    code, report = doctor("--doctor_checks=variables,cluster,peers,agreement,collective")
    assert code == 64
    (cluster,) = of(report, "cluster")
    assert cluster["status"] == "fail"
    assert "TF_CONFIG" in cluster["seen"]
    assert said in cluster["seen"]
    skipped = {one["check"]: one["why"] for one in report["not_checked"]}
    assert skipped == dict.fromkeys(("peers", "agreement", "collective"), "the cluster is not known")


def test_slurm_and_kubernetes_variables_that_contradict_each_other_fail_too(doctor, monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "4")
    monkeypatch.setenv("LAUNCHER_NUM_WORKERS", "2")
    code, report = doctor("--doctor_checks=cluster")
    assert code == 64
    assert "JOB_COMPLETION_INDEX" in of(report, "cluster")[0]["seen"]
