"""Finding a TPU and connecting to it.

Everything that can be known without the network is checked first: off the cloud, TensorFlow's own resolver asks a
metadata server that is not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Iterator, Mapping

import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine import installation, ports
from launcher.machine.devices import Devices
from launcher.machine.tpu_runtime import Resolver, check_host, check_version, hosts_of_this_slice, runtime_version

_ANSWER_SECONDS = 10.0


class NoTpuError(UsageError):
    """A TPU is asked for, and this machine neither has nor names one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuPlan:
    """A TPU that is there as far as one can tell without asking it.

    Attributes:
      name: node name or grpc:// address, or "local".
      num_replicas: its cores, as TensorFlow counts them.
      devices: their names, or the TPU's.
      notes: what a person should know.
    """

    name: str
    num_replicas: int
    devices: tuple[str, ...]
    notes: tuple[str, ...] = ()


def named(tpu: str | None, environ: Mapping[str, str]) -> str | None:
    """The TPU that `--tpu`, or else the variable TPU_NAME, names."""
    return tpu or environ.get("TPU_NAME") or None


def plan(*, tpu: str | None, replicas: int | None, devices: Devices, environ: Mapping[str, str]) -> TpuPlan:
    """Checks the request against this machine, at once and without the network.

    Args:
      tpu: node name, grpc:// address or "local"; None for TPU_NAME or else the TPU of this machine.
      replicas: number of TPU cores, which cannot be known before a remote TPU is connected to.
      devices: what this machine has.
      environ: the process's environment variables.

    Raises:
      NoTpuError: there is no TPU here.
      UsageError: it cannot be driven from here, or not with so many cores.
    """
    name = named(tpu, environ)
    if name is None and not devices.tpus and not devices.tpu_chips:
        raise NoTpuError(
            "no TPU found: neither --tpu nor TPU_NAME names one and TensorFlow lists no TPU device. On a TPU VM, "
            f"{installation.command('tpu')}; for a pod, pass --tpu=NODE_NAME; without a TPU, use --strategy=auto"
        )
    name = name or "local"
    if environ.get("TPU_WORKER_HOSTNAMES"):
        check_host(name, hosts_of_this_slice(environ))
    return _plan_local(replicas, devices) if name == "local" else _plan_remote(name, replicas, environ)


def _plan_local(replicas: int | None, devices: Devices) -> TpuPlan:
    if not devices.tpus and not devices.tpu_chips:
        raise NoTpuError(
            "--tpu=local (or TPU_NAME=local): this machine has no TPU. Run on a TPU VM, or use --strategy=auto"
        )
    # A TensorFlow that lists no core may still find them when it connects; somebody has to say how many.
    count = len(devices.tpus) or replicas
    if count is None:
        raise UsageError(
            f"TPU chips are here ({', '.join(devices.tpu_chips)}), but TensorFlow lists no TPU device: "
            f"{installation.command('tpu')} and end other programs that hold them, or say --replicas=N (cores) to try "
            "all the same"
        )
    if replicas not in (None, count):
        raise UsageError(f"--replicas={replicas}, but the TPU of this machine has {count} cores; leave --replicas out")
    return TpuPlan(name="local", num_replicas=count, devices=devices.tpus or devices.tpu_chips)


def _plan_remote(name: str, replicas: int | None, environ: Mapping[str, str]) -> TpuPlan:
    if not re.fullmatch(r"(grpc://)?[^\s/]+", name):
        raise UsageError(f"--tpu={name!r} is neither a node name, a grpc://host:port address nor 'local'")
    if replicas is None:
        raise UsageError(
            f"--tpu={name}: say how many cores this TPU has with --replicas=N (as many as TensorFlow lists on it), so "
            "that the batch can be checked before it is connected to. On a single TPU VM, --tpu=local counts them"
        )
    notes: tuple[str, ...] = ()
    if environ.get("TPU_LOAD_LIBRARY") != "0":
        notes = ("on a pod's own host 0, set TPU_LOAD_LIBRARY=0, or this process takes the chips from the TPU runtime",)
    return TpuPlan(name=name, num_replicas=replicas, devices=(name,), notes=notes)


def connect(name: str, num_replicas: int, environ: Mapping[str, str] = os.environ) -> tf.distribute.Strategy:
    """Connects to a TPU, initialises it, which clears its memory, and makes the strategy.

    Replicas are in the order of hosts and of cores on a host, as each host feeds its own; see `tpu_runtime.describe`.

    Args:
      name: as in `TpuPlan`.
      num_replicas: cores the plan counts on.
      environ: the process's environment variables.

    Raises:
      UsageError: the TPU cannot be found, cannot be driven from here, does not answer, runs another version of
        TensorFlow or has another number of cores.
    """
    check_host(name, hosts_of_this_slice(environ))
    resolver, hosts = _look_up(name)
    if hosts:
        with _network_deadline(_ANSWER_SECONDS):
            check_version(name, runtime_version(resolver))
    for host in hosts:
        _check_answers(name, host)
    try:
        if hosts:
            tf.config.experimental_connect_to_cluster(resolver)
        resolver.topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise UsageError(
            f"TPU {name!r} cannot be initialised ({type(error).__name__}: {cause}). Check that the TPU's TensorFlow is "
            f"{tf.__version__} as here, that {installation.command('tpu')} was run and that no other program holds the "
            "TPU"
        ) from error
    strategy = tf.distribute.TPUStrategy(resolver)
    if strategy.num_replicas_in_sync != num_replicas:
        raise UsageError(
            f"TPU {name!r} has {strategy.num_replicas_in_sync} cores, the plan has {num_replicas}: "
            f"pass --replicas={strategy.num_replicas_in_sync}"
        )
    return strategy


def _look_up(name: str) -> tuple[Resolver, list[str]]:
    """The TPU's resolver and the addresses of its hosts, none for the TPU of this machine."""
    try:
        with _network_deadline(_ANSWER_SECONDS):
            resolver = Resolver(name)
            return resolver, resolver.cluster_spec().as_dict().get("worker", [])
    # The resolver lets through whatever its HTTP client and the cloud's API raise.
    except Exception as error:
        raise UsageError(
            f"--tpu={name}: cannot look up this TPU ({type(error).__name__}: {error}). Check its name and that it is "
            "READY; the lookup needs a Google Cloud VM in the TPU's project and zone, or give grpc://host:port"
        ) from error


def _check_answers(name: str, address: str) -> None:
    """TensorFlow would wait without end for a host that is not there."""
    try:
        ports.call(address, _ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--tpu={name}: {address} does not answer ({error}). Check the address, the firewall, and that the TPU "
            "runtime runs on every host"
        ) from error


@contextlib.contextmanager
def _network_deadline(seconds: float) -> Iterator[None]:
    """Bounds connections made inside, for libraries that offer no timeout of their own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
