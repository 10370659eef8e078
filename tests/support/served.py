"""A small run in this process, for tests of what is done with a trained model."""

from __future__ import annotations

import contextlib
import io
import os
import types
from unittest import mock

from places import SMALL_DIGITS

from launcher import main as entry
from launcher.config import gin_bindings

FLAGS = (
    f"--gin_file={SMALL_DIGITS}",
    "--gin_param=train.steps = 30",
    "--gin_param=train.evaluate_every = 10",
    "--gin_param=train.ema_decay = 0.9",
    "--gin_param=train.eval_batch_size = 4",
)


def run_here(*flags):
    """`launcher.main` in this process: exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.dict(os.environ):
        code = entry.main(["launcher", *flags])
    gin_bindings.reset()
    return types.SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
