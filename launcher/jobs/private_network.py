"""A network namespace that holds one job of this host: TensorFlow's servers in it are out of everybody else's reach.

TensorFlow's gRPC server listens on all interfaces, also for addresses of 127.0.0.1, and does what any client asks. In a
namespace of its own a job has a loopback interface and nothing else. The supervisor enters it, and so does all that it
starts. Linux only: by CAP_SYS_ADMIN, or else by a user namespace in which this user stays the same one.
https://man7.org/linux/man-pages/man7/network_namespaces.7.html
"""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping

from launcher.config import gin_files
from launcher.errors import LauncherError, UsageError
from launcher.jobs.job import Job
from launcher.machine import gce, nvidia
from launcher.machine.child_process import run_forked

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
_TRIAL_SECONDS = 10.0


def enter(wanted: str, job: Job, environ: MutableMapping[str, str]) -> str:
    """Moves this process into a network of its own, if that is wanted; it must not have started a thread or a child.

    NCCL is told in `environ`, which workers inherit, to use the loopback interface, unless told otherwise. Where the
    kernel refuses, "on" raises UsageError, and "auto" does nothing.

    Returns:
      What to say of it; "" where everything is as ever.
    """
    if wanted == "off" or job.workers == 1:
        return ""
    if wanted == "auto" and (job.on_event or nvidia.names(environ) or _needs_network(job, environ)):
        return ""
    if refusal := _refusal():
        if wanted == "auto":
            return ""
        raise UsageError(f"--private_network=on: {refusal}; leave it out, and let a firewall protect the workers")
    _unshare()
    environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return "the workers have a network of their own, without a way out; --private_network=off gives them this host's"


def _needs_network(job: Job, environ: Mapping[str, str]) -> bool:
    """Whether something is known to need more than the loopback interface, or what is needed is not known."""
    request = job.request
    wants_metrics = getattr(request, "metrics_port", None) is not None  # this host's own Prometheus is outside
    if wants_metrics or request.tpu or environ.get("TPU_NAME") or gce.on_gce(environ):
        return True
    if any("://" in text for text in (*job.arguments, environ.get("TFDS_DATA_DIR", ""))):
        return True
    try:
        paths = map(gin_files.find_file, request.gin_file)
        statements = [statement for path in paths for statement in gin_files.read_file(path, opened=[])]
    except LauncherError:
        return True
    for statement in statements:
        # Of a recipe of Launcher's, `folder` is empty: what it imports is Launcher's, too.
        if statement.folder if isinstance(statement, gin_files.Import) else "://" in str(statement.value):
            return True
    return any(text.lstrip().startswith("import ") for text in request.gin_param)


def _refusal() -> str:
    """Why this process cannot have a network of its own; tried in a child, as there is no way back. "" if it can."""
    try:
        run_forked(_unshare, seconds=_TRIAL_SECONDS)
    except RuntimeError:
        return "this kernel, or the container around, allows this user no network namespace"
    except OSError as error:
        return str(error)
    return ""


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NET):
        user, group = os.geteuid(), os.getegid()
        if user == 0:  # in a user namespace root would lose its right to other users' files
            raise OSError(ctypes.get_errno(), "unshare")
        if libc.unshare(_NEW_USER | _NEW_NET):
            raise OSError(ctypes.get_errno(), "unshare")
        for name, content in (
            ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")
        ):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        # struct ifreq: the interface's name and its flags, in a room of 40 bytes
        request = struct.pack("16sh22x", b"lo", 0)
        (up,) = struct.unpack_from("h", fcntl.ioctl(any_socket, _GET_FLAGS, request), 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", up | _UP))
