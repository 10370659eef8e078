"""The collective self-test: does an all-reduce over the replicas end, is its sum right, and how fast is it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.doctor import child, peers
from launcher.doctor.collective_child import SIZES
from launcher.doctor.context import Context
from launcher.doctor.finding import Finding, Skip, fail, ok, warn
from launcher.errors import EXIT_RETRY

LIMIT_SECONDS = 120.0

# What gigabit Ethernet carries, and one lane of PCIe 3.0.
_SLOW_NETWORK = 0.118e9
_SLOW_BUS = 0.985e9


def collective(context: Context) -> Iterator[Finding]:
    """All-reduces over the replicas here, and over all workers where all of them run the doctor."""
    workers = context.cluster.num_workers
    if workers > 1 and not context.once(peers.exchanged).everyone:
        raise Skip("not all workers reach each other, and a collective waits for all")
    request = {name: getattr(context, name) for name in ("strategy", "replicas", "tpu")}
    yield collective_finding(
        child.run("collective_child", request, environ=context.environ, timeout_seconds=LIMIT_SECONDS), workers=workers
    )


def collective_finding(outcome: child.Outcome, *, workers: int) -> Finding:
    """Of how the process went."""
    built = outcome.answers.get("build")
    sizes = [outcome.answers[name] for name in SIZES if name in outcome.answers]
    wrong = next((answer for answer in (built, *sizes) if answer and (answer.refused or answer.error)), None)
    if wrong is not None:
        return _broken(wrong, workers)
    if built is None or len(sizes) < len(SIZES):
        reached = f"; {_speeds(sizes, built.values['replicas'])}" if built and sizes else ""
        where = "before the strategy was made" if built is None else f"with {built.values['replicas']} replicas"
        return fail(
            "collective",
            f"{where}, the test {outcome.how}{reached}",
            "between workers: see that TensorFlow's and NCCL's ports are open in both directions, and name the network "
            "interface with NCCL_SOCKET_IFNAME; between GPUs: NCCL_P2P_DISABLE=1 tells whether direct access is broken",
            exit_code=EXIT_RETRY,
        )
    replicas = built.values["replicas"]
    kind = f"{built.values['kind']}, {replicas} replica{'s' if replicas > 1 else ''} on {built.values['accelerator']}"
    if replicas == 1:
        return ok("collective", f"{kind}: nothing to reduce, and it computes rightly")
    nccl = re.search(r"NCCL version (\S+)", outcome.log)
    seen = f"{kind}{f', NCCL {nccl[1]}' if nccl else ''}: sums are right; {_speeds(sizes, replicas)}"
    bandwidth = _bus_bandwidth(sizes[-1], replicas)
    if workers > 1 and bandwidth < _SLOW_NETWORK:
        return warn(
            "collective",
            f"{seen}: less than gigabit Ethernet",
            "name the fast network interface with NCCL_SOCKET_IFNAME, or by its address in the cluster",
        )
    if workers == 1 and built.values["accelerator"] == "gpu" and bandwidth < _SLOW_BUS:
        return warn(
            "collective",
            f"{seen}: less than one lane of PCIe 3.0",
            "nvidia-smi topo -m shows how the GPUs are connected; NCCL_DEBUG=INFO, what NCCL makes of it",
        )
    return ok("collective", seen)


def _broken(answer: child.Answer, workers: int) -> Finding:
    if answer.refused:
        return fail("collective", answer.refused, "change the flag or the variable that the message names")
    fix = "run it again; if it fails again, NCCL_DEBUG=INFO and TF_CPP_MIN_LOG_LEVEL=0 say more"
    return fail("collective", answer.error, fix, exit_code=EXIT_RETRY)


def _speeds(sizes: list[child.Answer], replicas: int) -> str:
    parts = [f"{_size(answer)} in {answer.values['seconds'] * 1e3:.3g} ms" for answer in sizes]
    return f"{', '.join(parts)}: {_bus_bandwidth(sizes[-1], replicas) / 1e9:.3g} GB/s a replica"


def _size(answer: child.Answer) -> str:
    size = answer.values["bytes"]
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def _bus_bandwidth(answer: child.Answer, replicas: int) -> float:
    """Bytes a second that each replica sends in a ring, as nccl-tests counts them (its PERFORMANCE.md)."""
    return float(answer.values["bytes"] / answer.values["seconds"] * 2 * (replicas - 1) / replicas)
