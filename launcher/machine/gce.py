"""Google Compute Engine says beforehand when it takes a machine away, through the machine's metadata server.

The same server knows other things about the machine, see `ask`.

https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_an_instance_was_preempted
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

METADATA_HOST = "GCE_METADATA_HOST"
PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")

_DEFAULT_HOST = "metadata.google.internal"
_PRODUCT = "Google Compute Engine"
# What the server says of a name when the machine goes, and what that means.
_NOTICES = {
    "preempted": ("TRUE", "GCE is taking this machine away"),
    "maintenance-event": (
        "TERMINATE_ON_HOST_MAINTENANCE", "GCE is about to end this machine for host maintenance"
    ),
}  # fmt: skip
_PATIENCE_SECONDS = 15


def on_gce(environ: Mapping[str, str], product_name: Path = PRODUCT_NAME) -> bool:
    """Whether there is a metadata server to ask: by its variable, or by what the firmware calls this machine."""
    if environ.get(METADATA_HOST):
        return True
    with contextlib.suppress(OSError):
        return product_name.read_text().strip() == _PRODUCT
    return False


def ask(environ: Mapping[str, str], name: str) -> str | None:
    """A value that the metadata server has for this machine; None elsewhere than on GCE, or if it does not know.

    A name is a path below "instance/", such as "attributes/accelerator-type".
    """
    if not on_gce(environ):
        return None
    # Not urllib, which would ask a proxy: this server answers for this machine alone.
    host = environ.get(METADATA_HOST) or _DEFAULT_HOST
    connection = http.client.HTTPConnection(host, timeout=_PATIENCE_SECONDS)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", f"/computeMetadata/v1/instance/{name}", headers={"Metadata-Flavor": "Google"})
        response = connection.getresponse()
        if response.status == http.client.OK:
            return response.read().decode(errors="replace").strip()
    return None


def watch(environ: Mapping[str, str], notify: Callable[[str], None], *, seconds: float = 1.0) -> None:
    """Returns at once; later calls `notify` with the reason, from another thread, when this machine is taken away.

    Elsewhere than on GCE nothing happens. The server is asked every so many `seconds`, whether it answers or not, for
    as long as the process lives: it gives half a minute's notice. GCE_METADATA_HOST names another one, "host" or
    "host:port".
    """
    if on_gce(environ):
        threading.Thread(target=_watch, args=(environ, notify, seconds), name="watch GCE", daemon=True).start()


def _watch(environ: Mapping[str, str], notify: Callable[[str], None], seconds: float) -> None:
    while True:
        for name, (notice, words) in _NOTICES.items():
            if ask(environ, name) == notice:
                notify(words)
                return
        time.sleep(seconds)
