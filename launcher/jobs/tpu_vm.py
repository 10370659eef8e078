"""The hosts of a Cloud TPU, reached by gcloud: host 0 alone, or where JAX runs the steps every host of the slice.

With TensorFlow one program drives the slice. On a pod the other hosts run TensorFlow's TPU worker, which their
image starts, so nothing is to be started on them. Our program finds the slice by TPU_NAME, and must leave the chips of
its own host to that worker: TPU_LOAD_LIBRARY=0.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence

from launcher.errors import UsageError
from launcher.jobs.transports import Host, Refusal, has_any, last_words, missing
from launcher.modes import flag

# Where scripts/tpu_vm_startup.sh installs, on every host.
PYTHON = "/opt/launcher/python"
CHECKOUT = "/opt/launcher/src"

_NODE = re.compile(r"(?:[a-z_][a-z0-9_.-]*@)?[a-z]([-a-z0-9]*[a-z0-9])?")
_PLACE = re.compile(r"[a-z0-9]([-a-z0-9:.]*[a-z0-9])?")
# A connection that breaks without a word is noticed after about six seconds.
_SSH_FLAGS = ("--ssh-flag=-oServerAliveInterval=2", "--ssh-flag=-oServerAliveCountMax=3")
# What a person has to mend, as gcloud and ssh put it.
_MISTAKES = (
    "NOT_FOUND", "was not found", "PERMISSION_DENIED", "does not have permission", "gcloud auth login",
    "gcloud config set", "required property", "unrecognized arguments", "Invalid value", "Permission denied",
    "is not in state READY", "currently in state",
)  # fmt: skip


@dataclasses.dataclass
class NodeFlags:
    """The flags that only this backend reads."""

    tpu_node: str | None = flag("Cloud TPU node, for tpu_vm.")
    zone: str | None = flag("Its zone. Default: the one gcloud is set to.")
    project: str | None = flag("Its project. Default: the one gcloud is set to.")


class TpuVm:
    """Runs a command by `gcloud compute tpus tpu-vm ssh`, on hosts of one node: "name" or "user@name".

    Without addresses of the node's hosts, in gcloud's order, on host 0 alone.
    """

    def __init__(self, node: str | None, zone: str | None, project: str | None, addresses: Sequence[str] = ()):
        if not node:
            raise UsageError("--tpu_node is missing: name the node, as `gcloud compute tpus tpu-vm list` shows it")
        for option, value, pattern in (("tpu_node", node, _NODE), ("zone", zone, _PLACE), ("project", project, _PLACE)):
            if value and not pattern.fullmatch(value):
                raise UsageError(f"--{option}={value}: is no such name; use small letters, digits and dashes")
        self.missing = missing("gcloud", "install Google Cloud's command line")
        place = [f"--{name}={value}" for name, value in (("zone", zone), ("project", project)) if value]
        self.node = node.rpartition("@")[2]
        self.hosts: tuple[Host, ...] = tuple(
            Host(name=f"{node} host {number}", address=address) for number, address in enumerate(addresses)
        ) or (Host(name=node, address=self.node),)
        self._command = ("gcloud", "compute", "tpus", "tpu-vm", "ssh", node, *place)

    def _ssh(self, host: Host) -> tuple[str, ...]:
        return (*self._command, f"--worker={self.hosts.index(host)}", "--quiet")

    def argv(self, host: Host, command: Sequence[str]) -> tuple[str, ...]:
        """gcloud's command line; the login shell of the host takes the command apart again."""
        return (*self._ssh(host), *_SSH_FLAGS, f"--command=exec {shlex.join(command)}")

    def explain(self, host: Host, exit_code: int, lines: Sequence[str]) -> Refusal | None:
        """gcloud's own errors, and 255 for those of the connection; other exit codes are the command's."""
        said = [line for line in lines if line.startswith("ERROR:")]
        if exit_code != 255 and not said:
            return None
        what = said[-1].removeprefix("ERROR:").strip() if said else last_words(lines)
        is_mistake = has_any(_MISTAKES, lines)
        if "NOT_FOUND" in what or "was not found" in what:
            create = f"scripts/tpu_vm_create.sh --node={self.node} --type=TYPE"
            return Refusal(message=f"gcloud finds no {host.name} ({what}); create it: {create}", is_mistake=True)
        by_hand = shlex.join([*self._ssh(host), "--command=true"])
        hint = f"; first make this work: {by_hand}" if is_mistake else "; is it up?"
        return Refusal(message=f"gcloud cannot reach {host.name} ({what}){hint}", is_mistake=is_mistake)
