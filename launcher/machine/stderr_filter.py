"""A filter of standard error: passes on what is written there, but for lines that a pattern knows.

Imports nothing but the standard library: it is a `child_process.helper`.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from launcher.machine import child_process

_STDERR = 2
_PATIENCE_SECONDS = 5.0
# What absl's C++ logging writes before a program initialises it, whatever TF_CPP_MIN_LOG_LEVEL says. Seen with
# TensorFlow 2.21: the preamble, and "I0000 00:00:1795351047.083791    4814 port.cc:153] oneDNN custom operations …".
# Leans on TensorFlow: the log lines before absl is initialised have this form. Noticed by
# tests/machine/test_tensorflow_import.py. Then: change the pattern; nothing but the console is affected.
_PREAMBLE = r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
_LINE = r"{}\d{{4}} \d\d:\d\d:[\d.]+ +\d+ [\w.]+:\d+\] .*"


@contextlib.contextmanager
def without_early_log() -> Iterator[None]:
    """Holds TensorFlow's early log lines to TF_CPP_MIN_LOG_LEVEL, which C++ code ignores while it is being loaded.

    At 1, lines of level INFO are left out, from 2 on those of level WARNING, too. Errors, fatal ones and whatever is
    not such a line are passed on, also where the process is killed by them: another process does it.
    """
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0")
    levels = {"0": "", "1": "I"}.get(level, "[IW]") if level.isdecimal() else ""
    if not levels:
        yield
        return
    try:
        own = os.dup(_STDERR)
    except OSError:  # it is closed
        yield
        return
    helper = child_process.helper(__name__, f"{_PREAMBLE}|{_LINE.format(levels)}")
    process = child_process.start(helper, stdout=own, stderr=own)
    assert process.stdin is not None
    os.dup2(process.stdin.fileno(), _STDERR)
    process.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(own, _STDERR)
        os.close(own)
        # It ends with its input; only what was started meanwhile, and is still there, could keep that open.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS)


def main(pattern: str) -> None:
    """Copies standard input to standard output, line by line, until it ends."""
    # What is sent to all processes must not take away the last words of the one that this one writes for.
    child_process.ignore_signals()
    known = re.compile(pattern.encode())
    for line in sys.stdin.buffer:
        if not known.fullmatch(line.rstrip(b"\r\n")):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
