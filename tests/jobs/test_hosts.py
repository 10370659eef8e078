"""Which hosts a job has and how many workers each: what the flags say, and what --dry_run prints of it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from launcher import launch as entry
from launcher.errors import UsageError
from launcher.jobs.transports import by_command, parse_hosts


def divided(hosts):
    return [(host.name, host.address, host.slots) for host in hosts]


def test_workers_are_divided_evenly_among_hosts():
    assert divided(parse_hosts("a,me@b.example", None, None)) == [("a", "a", 1), ("me@b.example", "b.example", 1)]
    assert divided(parse_hosts("a, 10.0.0.2", None, 6)) == [("a", "a", 3), ("10.0.0.2", "10.0.0.2", 3)]


def test_a_hostfile_has_a_host_a_line_with_its_slots(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\n\na slots=2   # the big one\nme@b\n")
    assert divided(parse_hosts(None, str(path), None)) == [("a", "a", 2), ("me@b", "b", 1)]
    assert divided(parse_hosts(None, str(path), 3)) == [("a", "a", 2), ("me@b", "b", 1)]
    path.write_text("a\nb\n")
    assert divided(parse_hosts(None, str(path), 4)) == [("a", "a", 2), ("b", "b", 2)]


@pytest.mark.parametrize(
    ("hosts", "workers", "said"),
    [
        ("a,-oProxyCommand=x", None, r"'-oProxyCommand=x' is not a host"),
        ("a,,b", None, r"'' is not a host"),
        ("a:2", None, r"'a:2' is not a host; write NAME or USER@NAME"),
        ("a,me@a", None, r"'a' is named twice"),
        ("a,b", 3, r"--workers=3: .* a multiple of the 2 hosts"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(hosts, workers, said):
    with pytest.raises(UsageError, match=said):
        parse_hosts(hosts, None, workers)


@pytest.mark.parametrize(
    ("text", "workers", "said"),
    [
        ("# nobody\n", None, r"names no host"),
        ("a\nb slots=none\n", None, r"line 2: 'slots=none' behind b: only slots=K"),
        ("a\nb c\n", None, r"line 2: 'c' behind b"),
        ("a slots=2\nb\n", 4, r"--workers=4: .* has slots for 3"),
        ("a\nb\na slots=2\n", None, r"'a' is named twice"),
    ],
)
def test_a_hostfile_that_makes_no_sense_is_refused(tmp_path, text, workers, said):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=said):
        parse_hosts(None, str(tmp_path / "hosts"), workers)


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """run(*flags): exit code and what was printed; nothing may be written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ssh").write_text("#!/bin/sh\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)

    def call(*flags):
        code = entry.main(["launcher.launch", "--gin_file=x.gin", *flags])
        assert os.listdir(tmp_path) == ["ssh"]
        return code, capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--backend=ssh"], ["--hosts", "--hostfile"]),
        (["--backend=ssh", "--hosts=a", "--hostfile=f"], ["--hosts=a", "--hostfile=f", "one of them"]),
        (["--backend=ssh", "--hostfile=/no/file"], ["--hostfile=/no/file", "No such file"]),
        (["--backend=ssh", "--hosts=a,b", "--workers=3"], ["--workers=3", "multiple of the 2"]),
        (["--backend=ssh", "--hosts=a", "--ssh_command=/no/ssh"], ["/no/ssh", "--ssh_command"]),
        (["--backend=ssh", "--hosts=a", "--ssh_command=ssh 'x"], ["--ssh_command=ssh 'x", "quot"]),
        (["--backend=ssh", "--hosts=a", "--connect_timeout=0"], ["--connect_timeout=0"]),
        (["--backend=ssh", "--hosts=a", "--env=1=2"], ["--env=1=HIDDEN", "'1'"]),
        (["--backend=ssh", "--hosts=a", "--env=NO_SUCH_NAME"], ["NO_SUCH_NAME", "not set"]),
        (["--backend=ssh", "--hosts=a,b,c,d", "--min_workers=5"], ["--min_workers=5", "from 1 to --workers=4"]),
        (["--backend=ssh", "--hosts=a,b", "--min_workers=0"], ["--min_workers=0"]),
        (["--backend=ssh", "--hosts=a", "--remote_dir=/there"], ["--remote_dir=/there", "--model_dir=runs/x"]),
        (["--backend=exec", "--command=sh {command}"], ["--hosts", "--hostfile"]),
        (["--backend=exec", "--hosts=a,b"], ["--command is empty", "'kubectl exec -i {host} -- {command}'"]),
        (["--backend=exec", "--hosts=a", "--command=kubectl exec"], ["--command=kubectl exec: has no {command}"]),
        (["--backend=exec", "--hosts=a,b", "--command=ssh a {command}"], ["ssh a {command}", "{host}", "2 hosts"]),
        (["--backend=exec", "--hosts=a", "--command=sh '{command}"], ["--command=sh '{command}: No closing quot"]),
        (["--backend=exec", "--hosts=a", "--command=/no/way {command}"], ["/no/way", "--command"]),
        (["--backend=ray", "--hosts=a"], ["--hosts=a", "--backend=ray"]),
        (["--ray_resources=GPU=8"], ["--ray_resources=GPU=8 needs --backend=ray"]),
        (["--hosts=a"], ["--hosts=a", "--backend=ssh or --backend=exec"]),
        (["--min_workers=1"], ["--min_workers=1", "--backend=local"]),
        (["--remote_dir=/x"], ["--remote_dir=/x", "--backend=local"]),
    ],
)
def test_a_mistake_is_one_message_with_exit_code_64(run, flags, said):
    code, printed = run(*flags)
    assert code == 64
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and printed.out == ""
    for part in said:
        assert part in printed.err


def test_dry_run_prints_what_would_run_on_every_host_and_connects_to_none(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "a b")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    flags = ["--backend=ssh", "--hosts=me@a,b", "--workers=4", "--env=MINE", "--env=OTHER=1", "--remote_python=/p y"]
    code, printed = run(*flags, "--ssh_command=ssh -p 2222", "--model_dir=out", "--dry_run")
    assert code == 0 and printed.err == ""
    lines = printed.out.splitlines()
    agents = [shlex.split(line) for line in lines if line.startswith("ssh ")]
    assert [words[-2] for words in agents] == ["me@a", "b"]
    for words in agents:
        assert words[:3] == ["ssh", "-p", "2222"] and "BatchMode=yes" in words
        remote = shlex.split(words[-1])
        assert remote[:4] == ["exec", "env", "-C", str(tmp_path)]
        assert remote[-3:] == ["/p y", "-m", "launcher.jobs.agent"]
    workers = [shlex.split(line) for line in lines if line[:1] not in "#s"]
    assert len(workers) == 4
    addresses = ["a:<free port>", "a:<free port>", "b:<free port>", "b:<free port>"]
    for rank, words in enumerate(workers):
        count = next(index for index, word in enumerate(words) if "=" not in word)
        variables = dict(word.split("=", 1) for word in words[:count])
        assert json.loads(variables["TF_CONFIG"]) == {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": rank},
        }
        # Values of --env may be passwords: they reach the workers, and are not printed.
        assert (variables["MINE"], variables["OTHER"], variables["NCCL_DEBUG"]) == ("HIDDEN", "HIDDEN", "INFO")
        assert words[count:] == ["/p y", "-m", "launcher.main", "--gin_file=x.gin", "--model_dir=out"]
    assert [line.split(",")[0] for line in lines if line.startswith("# worker")] == [
        "# worker 0 on me@a", "# worker 1 on me@a", "# worker 2 on b", "# worker 3 on b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "before", "is_whole"),
    [
        ("kubectl exec -i pod-{index} -- {command}", ["kubectl", "exec", "-i", "pod-1", "--"], True),
        ("mpirun -H {host} {command}", ["mpirun", "-H", "b"], True),
        ("ssh {host} 'exec {command}'", ["ssh", "b", "exec "], False),
        ("su -lc {command} me@{host}", ["su", "-lc", ""], False),
    ],
)
def test_a_command_is_words_where_it_stands_alone_and_else_quoted_for_a_shell(template, before, is_whole):
    words = ["env", "-C", "/my runs", "A={host}"]
    argv = list(by_command(parse_hosts("a,b", None, None), template).argv(parse_hosts("b", None, None)[0], words))
    rest = words if is_whole else [before.pop() + shlex.join(words)]
    assert argv[: len(before) + len(rest)] == before + rest


@pytest.mark.parametrize(
    "flags",
    [
        ["--backend=ssh", "--hosts=a", "--env=TOKEN=s3cret", "--env=T=s3cret", "--dry_run"],
        ["--backend=ssh", "--hosts=a", "--env=not-a-name=s3cret"],
        ["--backend=local", "--env=TOKEN=s3cret"],
    ],
)
def test_values_of_env_are_shown_nowhere(run, flags):
    code, printed = run(*flags)
    assert code == (0 if "--dry_run" in flags else 64)
    assert "s3cret" not in printed.out + printed.err and "HIDDEN" in printed.out + printed.err


def test_the_head_and_its_agents_start_without_tensorflow_and_numpy():
    program = (
        "import sys, launcher.jobs.agent, launcher.launch\n"
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
