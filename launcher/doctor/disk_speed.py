"""Disk speed of --model_dir: whether the folder can be written, and how fast."""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import BinaryIO

from launcher.doctor.check import Context, Finding, Skip, check, fail, ok, warn
from launcher.errors import EXIT_RETRY, EXIT_USAGE, UsageError
from launcher.model_dir import check_model_dir, default_model_dir

_MIB = 2**20
_CHUNK = bytes(4 * _MIB)
_MOST_BYTES = 64 * _MIB
_MOST_SECONDS = 5.0
# A checkpoint of ResNet-50 with momentum is 200 MB: ten seconds of it.
_SLOW_BYTES_PER_SECOND = 20e6
_LITTLE_SPACE = 2 * 2**30
_FULL = (errno.ENOSPC, errno.EDQUOT)


@check("whether --model_dir can be written, and how fast", waits_for="writing 64 MiB, for 5 s at most")
def model_dir(context: Context) -> Iterator[Finding]:
    name = folder_of(context)
    if "://" in name:
        yield _remote(context, name)
        return
    try:
        check_model_dir(name)
    except UsageError as error:
        seen = str(error).partition("; choose")[0]
        yield fail(seen, "choose another --model_dir, or mend the rights of that folder")
        return
    folder = os.path.abspath(name)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    shown = f"{name} in {folder}" if folder != os.path.abspath(name) else name
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".doctor-") as file:
            size, seconds = _write(file)
    except OSError as error:
        full = error.errno in _FULL
        yield fail(
            f"{shown}: {error.strerror or error}",
            "make room there, or choose another --model_dir" if full else "choose another --model_dir",
            exit_code=EXIT_RETRY if full else EXIT_USAGE,
        )
        return
    free = shutil.disk_usage(folder).free
    speed = size / seconds
    seen = f"{shown}: {size / _MIB:.0f} MiB written and synced at {speed / 1e6:,.0f} MB/s, {free / 1e9:,.1f} GB free"
    if speed < _SLOW_BYTES_PER_SECOND:
        yield warn(seen, "a checkpoint would take long: choose a faster disk, or save less often")
    elif free < _LITTLE_SPACE:
        yield warn(seen, "make room, or Checkpoints.keep = 2")
    else:
        yield ok(seen)


def folder_of(context: Context) -> str:
    """The folder that --model_dir names, or its default; Skip where neither it nor a recipe is given."""
    if context.model_dir:
        return context.model_dir
    if context.gin_files:
        return default_model_dir(context.gin_files)
    raise Skip("neither --model_dir nor --gin_file is given")


def _write(file: BinaryIO) -> tuple[int, float]:
    """Writes a test file and returns bytes and seconds; stops early if the disk is slow."""
    size, started = 0, time.monotonic()
    while size < _MOST_BYTES and time.monotonic() - started < _MOST_SECONDS:
        file.write(_CHUNK)
        file.flush()
        os.fsync(file.fileno())
        size += len(_CHUNK)
    return size, max(time.monotonic() - started, 1e-9)


def _remote(context: Context, name: str) -> Finding:
    """The finding on a folder that only TensorFlow can reach, such as a bucket."""
    answer = context.says("model_dir")
    if answer.problem:
        return fail(
            f"{name}: {answer.problem}",
            "check the name and the rights of this machine's account; a bucket may be mounted instead, with gcsfuse",
        )
    speed = answer.values["bytes"] / answer.values["seconds"]
    return ok(f"{name}: {answer.values['bytes'] / _MIB:.0f} MiB written at {speed / 1e6:,.0f} MB/s")
