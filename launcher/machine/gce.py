"""Google Compute Engine says beforehand when it takes a machine away, through the machine's metadata server.

The same server knows other things about the machine, see `ask`.

https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_an_instance_was_preempted
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

import contextlib
import http.client
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlencode

METADATA_HOST = "GCE_METADATA_HOST"
PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")

_DEFAULT_HOST = "metadata.google.internal"
_PRODUCT = "Google Compute Engine"
_NOTICES = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
_WORDS = {
    "preempted": "GCE is taking this machine away",
    "maintenance-event": "GCE is about to end this machine for host maintenance",
}
_POLL_SECONDS = 60
_PATIENCE_SECONDS = 15  # for an answer, past the time that the server was asked to wait
_MOST_RETRY_SECONDS = 60.0


def on_gce(environ: Mapping[str, str], product_name: Path = PRODUCT_NAME) -> bool:
    """Whether there is a metadata server to ask: by its variable, or by what the firmware calls this machine."""
    if environ.get(METADATA_HOST):
        return True
    with contextlib.suppress(OSError):
        return product_name.read_text().strip() == _PRODUCT
    return False


def ask(environ: Mapping[str, str], name: str) -> str | None:
    """What the metadata server knows of this machine by `name`; None elsewhere than on GCE, or if it does not know.

    A name is a path below "instance/", such as "attributes/accelerator-type".
    """
    with contextlib.suppress(OSError, http.client.HTTPException):
        if on_gce(environ):
            return _ask(environ.get(METADATA_HOST) or _DEFAULT_HOST, name, None, timeout=_PATIENCE_SECONDS)[0]
    return None


def watch(environ: Mapping[str, str], notify: Callable[[str], None], *, retry_seconds: float = 1.0) -> None:
    """Returns at once; later calls `notify` with the reason, from another thread, when this machine is taken away.

    Elsewhere than on GCE nothing happens. A metadata server that does not answer is asked again for as long as the
    process lives, less and less often: after `retry_seconds`, doubled up to a minute. GCE_METADATA_HOST names another
    one, "host" or "host:port".
    """
    if not on_gce(environ):
        return
    host = environ.get(METADATA_HOST) or _DEFAULT_HOST
    for name in _NOTICES:
        arguments = (host, name, notify, retry_seconds)
        threading.Thread(target=_watch_one, args=arguments, name=f"watch {name}", daemon=True).start()


def _watch_one(host: str, name: str, notify: Callable[[str], None], retry_seconds: float) -> None:
    etag: str | None = None
    pause = retry_seconds
    sleep = threading.Event().wait
    while True:
        try:
            value, etag = _ask(host, name, etag)
        except (OSError, http.client.HTTPException):
            sleep(pause)
            pause = min(2 * pause, _MOST_RETRY_SECONDS)
            continue
        if value == _NOTICES[name]:
            notify(_WORDS[name])
            return
        pause = retry_seconds
        if etag is None:
            sleep(_POLL_SECONDS)  # A server that cannot wait for us: we wait for it.


def _ask(
    host: str, name: str, etag: str | None, timeout: float = _POLL_SECONDS + _PATIENCE_SECONDS
) -> tuple[str, str | None]:
    """The value and its tag: at once the first time, then when it has changed or a minute is over."""
    query = {"wait_for_change": "true", "timeout_sec": _POLL_SECONDS, "last_etag": etag} if etag else {}
    # Not urllib, which would ask a proxy: this server answers for this machine alone.
    connection = http.client.HTTPConnection(host, timeout=timeout)
    with contextlib.closing(connection):
        path = f"/computeMetadata/v1/instance/{name}"
        where = f"{path}?{urlencode(query)}" if query else path
        connection.request("GET", where, headers={"Metadata-Flavor": "Google"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace").strip()
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"{path}: {response.status}")
        return text, response.getheader("ETag")
