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
from launcher.jobs.transports import Host, Refusal, Transport, has_any, last_words
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


def gcloud(node: str | None, zone: str | None, project: str | None, addresses: Sequence[str] = ()) -> Transport:
    """The transport by `gcloud compute tpus tpu-vm ssh`, to hosts of one node: "name" or "user@name".

    Without addresses of the node's hosts, in gcloud's order, to host 0 alone.
    """
    if not node:
        raise UsageError("--tpu_node is missing: name the node, as `gcloud compute tpus tpu-vm list` shows it")
    for option, value, pattern in (("tpu_node", node, _NODE), ("zone", zone, _PLACE), ("project", project, _PLACE)):
        if value and not pattern.fullmatch(value):
            raise UsageError(f"--{option}={value}: is no such name; use small letters, digits and dashes")
    place = [f"--{name}={value}" for name, value in (("zone", zone), ("project", project)) if value]
    name = name_of(node)
    hosts = tuple(Host(name=f"{node} host {number}", address=address) for number, address in enumerate(addresses)) or (
        Host(name=node, address=name),
    )
    ssh = ("gcloud", "compute", "tpus", "tpu-vm", "ssh", node, *place, "--worker={index}", "--quiet")

    def explain(host: Host, exit_code: int, lines: Sequence[str]) -> Refusal | None:
        """Errors of gcloud's own, and 255 for those of the connection; other exit codes are the command's."""
        said = [line for line in lines if line.startswith("ERROR:")]
        if exit_code != 255 and not said:
            return None
        what = said[-1].removeprefix("ERROR:").strip() if said else last_words(lines)
        is_mistake = has_any(_MISTAKES, lines)
        if "NOT_FOUND" in what or "was not found" in what:
            create = f"scripts/tpu_vm_create.sh --node={name} --type=TYPE"
            return Refusal(message=f"gcloud finds no {host.name} ({what}); create it: {create}", is_mistake=True)
        by_hand = shlex.join(Transport(hosts, (*ssh, "--command=true"), explain).argv(host, ()))
        hint = f"; first make this work: {by_hand}" if is_mistake else "; is it up?"
        return Refusal(message=f"gcloud cannot reach {host.name} ({what}){hint}", is_mistake=is_mistake)

    # The login shell of the host takes the command apart again.
    template = (*ssh, *_SSH_FLAGS, "--command=exec {command}")
    return Transport(hosts, template, explain, "install Google Cloud's command line")


def name_of(node: str) -> str:
    """The node's name, without a user."""
    return node.rpartition("@")[2]
