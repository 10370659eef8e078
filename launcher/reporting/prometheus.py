"""The newest numbers of a run for Prometheus, as text on a port of the loopback interface.

The format is version 0.0.4 of Prometheus's text exposition. A sidecar or an agent on the same host scrapes it.
"""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Mapping
from typing import Any

from launcher.errors import UsageError
from launcher.reporting import strict_json
from launcher.reporting.sinks import RunStart, Sink

_LOOPBACK = "127.0.0.1"


class Prometheus(Sink):
    """Serves `launcher_train_loss`, `launcher_eval_accuracy` and so on at http://127.0.0.1:PORT/metrics.

    Args:
      port: 1 to 65535, or 0 for any that is free.

    Raises:
      UsageError: the port cannot be had.
    """

    def __init__(self, port: int):
        self._values: dict[str, float] = {}
        self._server = _serve(port, self.text)
        self.port = self._server.server_address[1]

    def started(self, run: RunStart) -> None:
        self._values = {"launcher_step": run.step, "launcher_total_steps": run.total_steps}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def text(self) -> str:
        """All numbers, a gauge each."""
        return "".join(f"# TYPE {name} gauge\n{name} {value!r}\n" for name, value in self._values.items())

    def measured(self, split: str, event: Mapping[str, Any]) -> None:
        values = {**self._values, "launcher_step": float(event["step"])}
        for name, value in event.items():
            values[re.sub(r"\W", "_", f"launcher_{split}_{name}")] = strict_json.number(value)
        self._values = values  # at once: the server's thread reads it


def _serve(port: int, text: Any) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            content = (text() if found else "the numbers are at /metrics\n").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    try:
        server = http.server.ThreadingHTTPServer((_LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "a port is a number from 0 to 65535"
        raise UsageError(f"--metrics_port={port}: {why}; choose another port") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
