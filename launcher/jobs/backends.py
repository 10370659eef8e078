"""The values of --backend: what each of them means, and which flags it reads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping

from absl import flags

from launcher import modes
from launcher.errors import UsageError
from launcher.jobs import kubernetes, private_network, remote_flags, tpu_vm
from launcher.jobs.hosts import parse_hosts
from launcher.jobs.job import Backend, Job
from launcher.jobs.local import LocalBackend
from launcher.jobs.output import JobConsole
from launcher.jobs.slurm import Srun
from launcher.jobs.transports import Ssh, Transport

_DEFAULT_RESTARTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One value of --backend.

    Attributes:
      says: what it means, for --help.
      flags: those it reads that not every backend does.
      num_workers: how many workers the flags ask for; raises UsageError.
      make: makes the backend of a job; raises UsageError. None where there is nothing to supervise from here.
      max_restarts: where --max_restarts is not given.
    """

    says: str
    num_workers: Callable[[flags.FlagValues], int]
    make: Callable[[flags.FlagValues, Job, JobConsole], Backend] | None
    flags: tuple[str, ...] = ()
    max_restarts: int = _DEFAULT_RESTARTS


def chosen(options: flags.FlagValues) -> Kind:
    """The kind of backend that the flags name.

    Raises:
      UsageError: there is no such backend, or flags are given that it would ignore.
    """
    kind = KINDS.get(options.backend)
    if kind is None:
        raise UsageError(f"--backend={options.backend}: there is {', '.join(KINDS)}")
    for name in FLAGS:
        if options[name].present and name not in kind.flags:
            readers = " or ".join(f"--backend={other}" for other, it in KINDS.items() if name in it.flags)
            given = options[name].value if name != "env" else list(map(remote_flags.shown, options.env))
            raise UsageError(f"--{name}={given} goes with {readers}, this is --backend={options.backend}")
    return kind


def _one_or_given(options: flags.FlagValues) -> int:
    return int(options.workers or 1)


def _one(options: flags.FlagValues) -> int:
    if options.workers not in (None, 1):
        why = {
            "member": "a member is one worker, and finds the others in its environment",
            "tpu_vm": "one program drives all hosts of a TPU",
        }
        raise UsageError(f"--workers={options.workers}: leave it out; {why[options.backend]}")
    return 1


def _make_local(options: flags.FlagValues, job: Job, console: JobConsole) -> Backend:
    return LocalBackend(job, console, os.environ, standby=options.standby)


def _ssh(options: flags.FlagValues) -> Transport:
    return Ssh(parse_hosts(options.hosts, options.hostfile, options.workers), options.ssh_command)


def _srun(options: flags.FlagValues) -> Transport:
    return Srun(os.environ, options.workers)


def _slots_of(transport: Callable[[flags.FlagValues], Transport]) -> Callable[[flags.FlagValues], int]:
    return lambda options: sum(host.slots for host in transport(options).hosts)


def _hosts_of(transport: Callable[[flags.FlagValues], Transport]) -> Callable[..., Backend]:
    return lambda options, job, console: remote_flags.make_backend(options, job, console, transport(options))


def _make_tpu_vm(options: flags.FlagValues, job: Job, console: JobConsole) -> Backend:
    transport = tpu_vm.TpuVm(options.tpu_node, options.zone, options.project)
    recipe = modes.define_flags()
    recipe(["launcher.main", *job.arguments])
    needed = tpu_vm.environment(options.tpu_node, recipe.tpu)
    return remote_flags.make_backend(options, job, console, transport, needed, tpu_vm.PYTHON, tpu_vm.CHECKOUT)


KINDS: Mapping[str, Kind] = {
    "local": Kind(
        says="all on this host",
        num_workers=_one_or_given,
        make=_make_local,
        flags=(*private_network.FLAGS, "standby"),
    ),
    "member": Kind(
        says="one on this host, which finds its peers in the environment (TF_CONFIG, a Slurm task, a pod), each with a "
        "supervisor of its own",
        num_workers=_one,
        make=_make_local,
        max_restarts=0,  # its scheduler restarts all of them
    ),
    "ssh": Kind(
        says="on --hosts",
        num_workers=_slots_of(_ssh),
        make=_hosts_of(_ssh),
        flags=(*remote_flags.SSH_FLAGS, *remote_flags.REMOTE_FLAGS),
    ),
    "slurm": Kind(
        says="on the nodes of the Slurm job that this runs in",
        num_workers=_slots_of(_srun),
        make=_hosts_of(_srun),
        flags=remote_flags.REMOTE_FLAGS,
    ),
    "kubernetes": Kind(says="in pods", num_workers=_one_or_given, make=None, flags=kubernetes.FLAGS),
    "tpu_vm": Kind(
        says="on host 0 of --tpu_node",
        num_workers=_one,
        make=_make_tpu_vm,
        flags=(*tpu_vm.FLAGS, *remote_flags.REMOTE_FLAGS),
    ),
}
# In the order of --help.
FLAGS = tuple(dict.fromkeys(name for kind in KINDS.values() for name in kind.flags))


def define_flags(values: flags.FlagValues) -> None:
    """Adds --backend, and the flags that not every backend reads."""
    says = "; ".join(f"{name}, {kind.says}" for name, kind in KINDS.items())
    flags.DEFINE_string("backend", "local", f"Where workers run: {says}.", flag_values=values)
    private_network.define_flags(values)
    flags.DEFINE_bool(
        "standby", False,
        "Keep a spare process for each worker, from the first steps on, which has imported TensorFlow and becomes the "
        "worker at a restart. Each takes about 250 MB of memory, and two processor seconds when it is made.",
        flag_values=values,
    )  # fmt: skip
    remote_flags.define(values)
    kubernetes.define_flags(values)
    tpu_vm.define_flags(values)
