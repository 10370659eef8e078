"""Standby: spare processes that have imported what a worker imports, and become the workers of the next attempt.

A spare has a worker's environment, but for the variables that change from attempt to attempt, and a session of its own.
It opens no device and no port. It waits for one message on its standard input, which says those variables, and then
runs the worker's program as `python -m` would. Without a message it ends when its standard input does.
"""

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence

from launcher.machine import child_process, exit_barrier
from launcher.reporting.attempts import ATTEMPT
from launcher.worker import drill, progress

_MAIN = "launcher.main"
_LATE = frozenset(
    ("TF_CONFIG", ATTEMPT, progress.PROGRESS_FILE, progress.ERROR_FILE, progress.RESTARTED, drill.VARIABLE)
)
"""Variables of an attempt: nothing reads them while it is imported."""
_DEATH_SECONDS = 30.0


# --------------------------------------------------------------------------------------------------- in the supervisor


class Spare:
    """A process that can become one worker, of its command and all its variables."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]):
        self._argv = tuple(argv)
        self._environ = _early(environ)
        python, dash_m, *program = argv
        self.process = child_process.start(
            [python, dash_m, __name__, *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environ,
            preexec_fn=child_process.die_with_parent(),
        )

    def fits(self, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
        """Whether a new process with this command and these variables would import the same in the same way."""
        return self._argv == tuple(argv) and self._environ == _early(environ)

    def become(self, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Has it run the worker's program, once it has imported all it can, and returns the process, the worker's now.

        Raises OSError where it has ended; nothing of it is left.
        """
        late = {name: value for name, value in environ.items() if name in _LATE}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(late).encode())
            self.process.stdin.close()
        except OSError:
            self.close()
            raise
        return self.process

    def close(self) -> None:
        """Ends it."""
        if self.process.returncode is None:  # else it was reaped, and its number may be another group's
            child_process.kill_group(self.process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_DEATH_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _early(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _LATE}


# -------------------------------------------------------------------------------------------------------- in the spare


def _main(module: str, arguments: Sequence[str]) -> int:
    if module == _MAIN:
        importlib.import_module(_MAIN).prepare([_MAIN, *arguments])
        del sys.modules[_MAIN]  # it is run, not imported
    message = sys.stdin.buffer.read()
    if not message:  # the supervisor is gone, or does not need it
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    os.environ.update(json.loads(message))
    importlib.invalidate_caches()  # modules may have been written meanwhile
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    exit_barrier.register()
    sys.exit(_main(sys.argv[1], sys.argv[2:]))
