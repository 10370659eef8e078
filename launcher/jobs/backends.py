"""The values of --backend: what each of them means, which flags it reads, and how workers run on other hosts."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from launcher import modes
from launcher.config import plugins
from launcher.errors import UsageError
from launcher.jobs import kubernetes, ray_nodes, slurm, tpu_vm, transports
from launcher.jobs.job import Backend, Job
from launcher.jobs.local import LocalBackend
from launcher.jobs.output import JobConsole
from launcher.jobs.remote import RemoteBackend
from launcher.jobs.remote_hosts import RemoteHosts
from launcher.jobs.transports import AgentCommand, Host, Transport, parse_hosts
from launcher.machine.runtime_kinds import PJRT
from launcher.modes import flag

_DEFAULT_RESTARTS = 3

# What a person sets for a job rather than for a host, and names that begin like this.
_PASSED_ON = ("TF_CPP_MIN_LOG_LEVEL", "TF_XLA_FLAGS", "XLA_FLAGS", "TFDS_DATA_DIR", "PYTHONPATH")
_PASSED_ON_PREFIXES = ("NCCL_",)
# Stands for the value of a variable that --env names: passwords and tokens are passed on by it.
_HIDDEN = "HIDDEN"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass
class BackendFlags:
    """The flags that some backends read; `Kind.flags` names those of one."""

    private_network: str = flag(
        "Whether the workers of this host get a network of their own, which reaches nothing outside, as TensorFlow's "
        "servers obey everybody who reaches them. auto: where the kernel allows it and nothing is known to need more: "
        "several workers on CPUs, a recipe that imports no module of yours, no URL, no TPU, no --metrics_port, no "
        "--on_event, not on Google's machines.",
        "auto",
        flags.DEFINE_enum,
        enum_values=["auto", "on", "off"],
    )
    standby: bool = flag(
        "Keep a spare process for each worker, from the first steps on, which has imported TensorFlow and becomes the "
        "worker at a restart. Each takes about 250 MB of memory, and two processor seconds when it is made.",
        False,
    )
    sweep: str | None = flag(
        "Trials, such as 'cosine.peak = 0.1, 0.05; seed = 0, 1': a job for each combination in a folder in "
        "--model_dir; compare.html there has the best first. Again, it goes on with what is not done."
    )
    at_once: int = flag("Trials of --sweep side by side, which divide processors and GPUs.", 1, lower_bound=1)
    hosts: str | None = flag(
        "With --backend=ssh and exec: hosts of the job, such as a,b or me@a,me@b. With tpu_vm and "
        f"{PJRT.flag}: the "
        "addresses of all hosts of the node, in gcloud's order."
    )
    hostfile: str | None = flag(
        "With --backend=ssh and exec: a file of one host a line, with slots=K behind one that runs K workers; # is a "
        "comment."
    )
    ssh_command: str = flag("The client, with options of your own, such as 'ssh -p 2222 -i key'.", "ssh")
    command: str | None = flag(
        "With --backend=exec: what runs a program on a host with its input and output passed on, such as 'kubectl "
        "exec -i {host} -- {command}'. {host} is one of --hosts, {index} its number from 0."
    )
    srun_options: str | None = flag(
        "More options of srun for the agents, such as '--container-image=x.sqsh --container-mounts=/shared:/shared'."
    )
    ray_resources: str = flag("What Ray keeps for a worker, such as CPU=8,GPU=4.", "CPU=1")
    remote_python: str | None = flag(
        "Interpreter on the hosts. Default: the path of the one here; with --backend=tpu_vm, the one that "
        "scripts/tpu_vm_startup.sh installs."
    )
    remote_dir: str | None = flag(
        "Working directory on the hosts. Default: the path of the one here; with --backend=tpu_vm, the checkout that "
        "scripts/tpu_vm_startup.sh makes."
    )
    env: tuple[str, ...] = flag(
        f"NAME of a variable here, or NAME=VALUE, that workers on the hosts get; may repeat. Always passed on when set "
        f"here: {', '.join(_PASSED_ON)} and {_PASSED_ON_PREFIXES[0]}*.",
        (),
    )
    min_workers: int | None = flag(
        "Go on with so many workers or more when hosts are not there, which share the same global batch, until they "
        "are. Default: --workers."
    )
    check_hosts: bool = flag(
        "Before each attempt, run the doctor where its workers will run: GPUs, their memory errors and number, a "
        "product on each, an all-reduce. A host that fails is named, and left out where others can take its place.",
        False,
    )
    leave_out_stragglers: bool = flag(
        "Save and go on without the host of a worker that is a quarter slower than the others in 18 of 20 log events, "
        "where others can take its place or --min_workers allows it.",
        False,
    )
    connect_timeout: float = flag("Seconds to go on trying to reach a host before an attempt.", 60.0)


# In the order of --help.
FLAGS = modes.fields_of(BackendFlags, kubernetes.PodFlags, tpu_vm.NodeFlags)
_OF_REMOTE = (
    "sweep", "remote_python", "remote_dir", "env", "min_workers", "check_hosts", "leave_out_stragglers",
    "connect_timeout",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One value of --backend.

    Attributes:
      says: what it means, for --help.
      is_supervised: whether the job is supervised from here.
      transport: to the hosts that its workers run on, by the flags; raises UsageError. None where it needs none.
      variables: what workers there need beside what a person passes on; raises UsageError.
      python, folder: where the launcher is there; None for the places of the one here.
      why_one: why --workers cannot be given; else empty.
      max_restarts: where --max_restarts is not given.
      flags: the names of those it reads that not every backend does.
    """

    says: str
    is_supervised: bool = True
    transport: Callable[[flags.FlagValues], Transport] | None = None
    variables: Callable[[flags.FlagValues, Job], Mapping[str, str]] = lambda options, job: {}
    python: str = sys.executable
    folder: str | None = None
    why_one: str = ""
    max_restarts: int = _DEFAULT_RESTARTS
    flags: tuple[str, ...] = ()

    def num_workers(self, options: Any) -> int:
        """The number of workers that the flags ask for: on hosts, as many as these have slots."""
        if self.why_one and options.workers not in (None, 1):
            raise UsageError(f"--workers={options.workers}: leave it out; {self.why_one}")
        if self.transport is None:
            return options.workers or 1
        slots = sum(host.slots for host in self.transport(options).hosts)
        return slots if self.why_one else options.workers or slots

    def backend(self, options: Any, job: Job, console: JobConsole) -> Backend:
        """The backend of a job; raises UsageError."""
        if self.transport is None:
            return LocalBackend(job, console, os.environ, standby=options.standby)
        least = job.workers if options.min_workers is None else options.min_workers
        if not 1 <= least <= job.workers:
            raise UsageError(f"--min_workers={least}: must be from 1 to --workers={job.workers}")
        folder = options.remote_dir or self.folder or os.getcwd()
        if folder != os.getcwd() and not os.path.isabs(job.model_dir):
            raise UsageError(
                f"--remote_dir={folder}: --model_dir={job.model_dir} would be another folder there; give its whole path"
            )
        variables = self.variables(options, job)
        passed_on = _passed_on(options.env, os.environ)
        needed = {name: value for name, value in passed_on.items() if name == "PYTHONPATH"}
        agent = AgentCommand(python=options.remote_python or self.python, folder=folder, environ=needed)
        return RemoteBackend(
            job=job,
            console=console,
            remotes=RemoteHosts(job.identity, console, self.transport(options), agent, {**passed_on, **variables}),
            hidden={item.partition("=")[0]: _HIDDEN for item in options.env},
            min_workers=least,
            connect_timeout_seconds=options.connect_timeout,
        )


def chosen(options: flags.FlagValues) -> Kind:
    """The kind of backend that the flags name; refuses others, and flags that it would ignore."""
    kind = KINDS[options.backend]
    for name in FLAGS:
        if options[name].present and name not in kind.flags:
            readers = " or ".join(f"--backend={other}" for other, it in KINDS.items() if name in it.flags)
            given = options[name].value if name != "env" else list(map(_shown, options.env))
            raise UsageError(f"--{name}={given} needs {readers}; this is --backend={options.backend}")
    return kind


def define_flags(values: flags.FlagValues) -> None:
    """Adds --backend, and the flags that not every backend reads."""
    modes.name_in(lambda: KINDS)("backend", default="local", help="Where workers run", flag_values=values)
    modes.define(FLAGS, values)


def _hosts(options: flags.FlagValues) -> tuple[Host, ...]:
    return parse_hosts(options.hosts, options.hostfile, options.workers)


def _tpu_vm(options: flags.FlagValues) -> Transport:
    hosts = () if options.hosts is None else parse_hosts(options.hosts, None, None)
    return tpu_vm.gcloud(options.tpu_node, options.zone, options.project, [host.address for host in hosts])


def _of_tpu(options: flags.FlagValues, job: Job) -> Mapping[str, str]:
    """Variables of a program on a TPU VM, where it is one for the whole slice."""
    request = job.request
    if options.hosts is not None and not request.runtime.has_devices:
        raise UsageError(
            f"--hosts={options.hosts}: TensorFlow drives all hosts of a TPU by one program on host 0; "
            f"leave it out, or add {PJRT.flag}"
        )
    is_whole_slice = not request.runtime.has_devices and request.tpu != "local"  # which is a node of one host
    return {"TPU_NAME": tpu_vm.name_of(options.tpu_node), "TPU_LOAD_LIBRARY": "0"} if is_whole_slice else {}


def on_hosts(says: str, transport: Callable[[flags.FlagValues], Transport], *named: str) -> Kind:
    """A backend whose workers run on the hosts of a transport, which may read flags that are `named`."""
    return Kind(says=says, transport=transport, flags=(*named, *_OF_REMOTE))


def _shown(item: str) -> str:
    """The part of a value of --env that may be shown."""
    name, is_set, _ = item.partition("=")
    return f"{name}={_HIDDEN}" if is_set else name


def _passed_on(wanted: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    variables = {
        name: value for name, value in environ.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
    for item in wanted:
        name, is_set, value = item.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"--env={_shown(item)}: {name!r} is not the name of a variable; write NAME or NAME=VALUE")
        if not is_set and name not in environ:
            raise UsageError(f"--env={name}: {name} is not set here; set it, or write --env={name}=VALUE")
        variables[name] = value if is_set else environ[name]
    return variables


_KINDS = {
    "local": Kind(says="all on this host", flags=("private_network", "standby", "sweep", "at_once")),
    "member": Kind(
        says="one on this host, which finds its peers in the environment (TF_CONFIG, a Slurm task, a pod), each with a "
        "supervisor of its own",
        why_one="a member is one worker, and finds the others in its environment",
        max_restarts=0,  # its scheduler restarts all of them
    ),
    "ssh": on_hosts(
        "on --hosts",
        lambda options: transports.ssh(_hosts(options), options.ssh_command),
        *("hosts", "hostfile", "ssh_command"),
    ),
    "exec": on_hosts(
        "on --hosts, by --command",
        lambda options: transports.by_command(_hosts(options), options.command or ""),
        *("hosts", "hostfile", "command"),
    ),
    "slurm": on_hosts(
        "on the nodes of the Slurm job that this runs in",
        lambda options: slurm.srun(os.environ, options.workers, options.srun_options or ""),
        "srun_options",
    ),
    "ray": on_hosts(
        "on nodes of a Ray cluster, one each",
        lambda options: ray_nodes.transport(options.workers or 1, options.ray_resources),
        "ray_resources",
    ),
    "kubernetes": Kind(says="in pods", is_supervised=False, flags=tuple(modes.fields_of(kubernetes.PodFlags))),
    "tpu_vm": Kind(
        says=f"on host 0 of --tpu_node, or with {PJRT.flag} on its --hosts",
        transport=_tpu_vm,
        variables=_of_tpu,
        python=tpu_vm.PYTHON,
        folder=tpu_vm.CHECKOUT,
        why_one="a host of a TPU has one, and which hosts is for --hosts to say",
        flags=(*modes.fields_of(tpu_vm.NodeFlags), "hosts", *_OF_REMOTE),
    ),
}
KINDS = plugins.Table("backend", Kind, _KINDS)
