"""The folder of --model_dir: whether it can be written, and how much room there is."""

import os
import shutil
import tempfile
from collections.abc import Iterator

from launcher.doctor.check import Context, Finding, Skip, check, fail, ok, warn
from launcher.errors import EXIT_RETRY, UsageError
from launcher.model_dir import check_model_dir, default_model_dir

# A checkpoint of ResNet-50 with momentum is 200 MB.
_LEAST_SPACE = 2**28
_LITTLE_SPACE = 2 * 2**30


@check("whether --model_dir can be written, and its room")
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
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".doctor-"):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        yield fail(f"{name} in {folder}: {error.strerror or error}", "choose another --model_dir")
        return
    seen = f"{name}: {free / 1e9:,.1f} GB free in {folder}"
    if free < _LEAST_SPACE:
        yield fail(seen, "make room there, or choose another --model_dir", exit_code=EXIT_RETRY)
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


def _remote(context: Context, name: str) -> Finding:
    """The finding on a folder that only TensorFlow can reach, such as a bucket."""
    answer = context.says("model_dir")
    if answer.problem:
        return fail(
            f"{name}: {answer.problem}",
            "check the name and the rights of this machine's account; a bucket may be mounted instead, with gcsfuse",
        )
    return ok(f"{name}: can be written")
