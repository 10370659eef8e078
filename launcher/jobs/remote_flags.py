"""The flags of jobs on several hosts, and what they mean together."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from absl import flags

from launcher.errors import UsageError
from launcher.jobs.job import Job
from launcher.jobs.output import JobConsole
from launcher.jobs.remote import RemoteBackend
from launcher.jobs.remote_hosts import RemoteHosts
from launcher.jobs.transports import AgentCommand, Transport
from launcher.machine.cluster import elastic

# In the order of --help.
SSH_FLAGS = ("hosts", "hostfile", "ssh_command")
REMOTE_FLAGS = ("remote_python", "remote_dir", "env", "min_workers", "connect_timeout")

# What a person sets for a job rather than for a host, and names that begin like this.
_PASSED_ON = ("TF_CPP_MIN_LOG_LEVEL", "TF_XLA_FLAGS", "XLA_FLAGS", "TFDS_DATA_DIR", "PYTHONPATH")
_PASSED_ON_PREFIXES = ("NCCL_",)
# Stands for the value of a variable that --env names: passwords and tokens are passed on by it.
HIDDEN = "HIDDEN"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def define(values: flags.FlagValues) -> None:
    """Adds the flags."""
    flags.DEFINE_string(
        "hosts", None, "With --backend=ssh: hosts of the job, such as a,b or me@a,me@b.", flag_values=values
    )
    flags.DEFINE_string(
        "hostfile", None,
        "With --backend=ssh: a file of one host a line, with slots=K behind one that runs K workers; # is a comment.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "ssh_command", "ssh", "The client, with options of your own, such as 'ssh -p 2222 -i key'.", flag_values=values
    )
    flags.DEFINE_string(
        "remote_python", None,
        "Interpreter on the hosts. Default: the path of the one here; with --backend=tpu_vm, the one that "
        "scripts/tpu_vm_startup.sh installs.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "remote_dir", None,
        "Working directory on the hosts. Default: the path of the one here; with --backend=tpu_vm, the checkout that "
        "scripts/tpu_vm_startup.sh makes.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_multi_string(
        "env", [],
        f"NAME of a variable here, or NAME=VALUE, that workers on the hosts get; may repeat. Always passed on when set "
        f"here: {', '.join(_PASSED_ON)} and {_PASSED_ON_PREFIXES[0]}*.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer(
        "min_workers", None,
        "Go on with so many workers when hosts are not there: with the largest divisor of --workers that is there, "
        "the same global batch and as many more microbatches. Default: --workers.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_float(
        "connect_timeout", 60.0, "Seconds to go on trying to reach a host before an attempt.", flag_values=values
    )


def make_backend(
    options: flags.FlagValues,
    job: Job,
    console: JobConsole,
    transport: Transport,
    needed_there: Mapping[str, str] | None = None,
    python_there: str | None = None,
    folder_there: str | None = None,
) -> RemoteBackend:
    """A backend for workers on the hosts of `transport`, which get what a person passes on, and `needed_there`.

    Interpreter and working directory are those that the flags name, else those given, else those here.

    Raises:
      UsageError: a flag has a value that it cannot have.
    """
    least = job.workers if options.min_workers is None else options.min_workers
    elastic.check_least(least, job.workers)
    if not 0 < options.connect_timeout < float("inf"):
        raise UsageError(f"--connect_timeout={options.connect_timeout:g}: must be a number of seconds above 0")
    folder = options.remote_dir or folder_there or os.getcwd()
    if folder != os.getcwd() and not os.path.isabs(job.model_dir):
        raise UsageError(
            f"--remote_dir={folder}: --model_dir={job.model_dir} would be another folder there than here; give the "
            "whole path of one that all hosts share"
        )
    passed_on = _passed_on(options.env, os.environ)
    needed = {name: value for name, value in passed_on.items() if name == "PYTHONPATH"}
    agent = AgentCommand(python=options.remote_python or python_there or sys.executable, folder=folder, environ=needed)
    return RemoteBackend(
        job=job,
        console=console,
        remotes=RemoteHosts(job.identity, console, transport, agent, {**passed_on, **(needed_there or {})}),
        hidden={item.partition("=")[0]: HIDDEN for item in options.env},
        min_workers=least,
        connect_timeout_seconds=options.connect_timeout,
    )


def shown(item: str) -> str:
    """What may be shown of a value of --env."""
    name, is_set, _ = item.partition("=")
    return f"{name}={HIDDEN}" if is_set else name


def _passed_on(wanted: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that go to the hosts."""
    found = {
        name: value for name, value in environ.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
    for item in wanted:
        name, is_set, value = item.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"--env={shown(item)}: {name!r} is not the name of a variable; write NAME or NAME=VALUE")
        if not is_set and name not in environ:
            raise UsageError(f"--env={name}: {name} is not set here; set it, or write --env={name}=VALUE")
        found[name] = value if is_set else environ[name]
    return found
