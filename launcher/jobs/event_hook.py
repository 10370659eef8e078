"""--on_event: a command that is told of a job's restarts and of its end, each time in JSON on its standard input."""

import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

from launcher.jobs.transports import last_words

_LONGEST_SECONDS = 30.0


class EventHook:
    """Runs a command for each event, beside the job, which neither waits for it nor ends by it.

    Args:
      command: its words; () for none.
      note: is told where it fails.
    """

    def __init__(self, command: Sequence[str], note: Callable[[str], None]):
        self._command, self._note = command, note
        self._running: list[threading.Thread] = []

    def tell(self, **event: Any) -> None:
        if self._command:
            self._running.append(threading.Thread(target=self._run, args=(json.dumps(event) + "\n",), daemon=True))
            self._running[-1].start()

    def close(self) -> None:
        """Lets the commands end that still run; each has half a minute."""
        for thread in self._running:
            thread.join()

    def _run(self, text: str) -> None:
        # A session of its own: what interrupts the job is not to interrupt the news of it.
        options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "start_new_session": True}
        try:
            done = subprocess.run(self._command, input=text, timeout=_LONGEST_SECONDS, check=False, **options)
        except (OSError, subprocess.TimeoutExpired) as error:
            self._note(f"--on_event: {getattr(error, 'strerror', None) or error}")
            return
        if done.returncode:
            said = last_words((done.stderr or done.stdout).splitlines())
            self._note(f"--on_event ended with exit code {done.returncode} ({said})")
