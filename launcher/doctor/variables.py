"""Environment variables that change what Keras and TensorFlow do."""

import ipaddress
import json
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.doctor.check import FAIL, Context, Finding, check, fail, ok, warn

# What each variable does where its value is wrong, or not right, as patterns say.
_KNOWN = json.loads(Path(__file__).with_name("variables.json").read_text("utf-8"))
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


@check("environment variables that get in the way")
def variables(context: Context) -> Iterator[Finding]:
    findings = [*_mistakes(context.environ), *_proxies(context)]
    yield from findings or [ok("none that gets in the way")]


def _mistakes(environ: Mapping[str, str]) -> Iterator[Finding]:
    for known in _KNOWN:
        name = known["variable"]
        # Of these, oneDNN is on by default on x86 alone.
        if name == "TF_ENABLE_ONEDNN_OPTS" and platform.machine() not in ("x86_64", "AMD64"):
            continue
        value = environ.get(name, "")
        if value and bool(re.fullmatch(known.get("wrong") or known["right"], value)) == ("wrong" in known):
            yield (fail if known["status"] == FAIL else warn)(f"{name}={value}: {known['effect']}", known["fix"])


def _proxies(context: Context) -> Iterator[Finding]:
    """The finding on a proxy between workers: with TensorFlow 2.21 they were seen to wait for ever."""
    cluster = context.cluster_or_error
    name = next((name for name in _PROXIES if context.environ.get(name)), None)
    if name is None or isinstance(cluster, Exception) or cluster.num_workers == 1:
        return
    exempt = (context.environ.get("no_grpc_proxy") or context.environ.get("no_proxy", "")).split(",")
    exempt = [one.strip() for one in exempt if one.strip()]
    hosts = [address.rpartition(":")[0].strip("[]") for address in cluster.workers]
    outside = [host for host in hosts if not any(_is_exempt(host, one) for one in exempt)]
    if outside:
        yield fail(
            f"{name}={context.environ[name]} and no_proxy does not name {outside[0]}: TensorFlow looks for the other "
            "workers behind that proxy, and waits without end where it does not find them",
            f"export no_proxy={','.join(dict.fromkeys(hosts[:4]))}{',...' if len(hosts) > 4 else ''}",
        )


def _is_exempt(host: str, exempt: str) -> bool:
    """Whether no_proxy exempts a host, as gRPC reads it: by the end of a name, or a network such as 10.0.0.0/8."""
    if "/" not in exempt:
        return host.endswith(exempt)
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(exempt, strict=False)
    except ValueError:
        return False
