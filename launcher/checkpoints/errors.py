"""Errors of checkpoints, in words that a user can act on."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import EXIT_RETRY, LauncherError

_NAMES_SHOWN = 5


class CheckpointWriteError(LauncherError):
    """A checkpoint could not be written; the older ones are untouched. Exit 75: make room, run the same command.

    The facts are what could not be written and why, in whole sentences; the advice is for a run that this ends.
    """

    exit_code = EXIT_RETRY

    def __init__(self, facts: str, advice: str = ""):
        super().__init__(f"{facts} {advice}".strip())
        self.facts = facts


class CheckpointReadError(LauncherError):
    """A checkpoint is missing, damaged or cannot be read. Exit 75: the same command takes the newest whole one."""

    exit_code = EXIT_RETRY


class NoWholeCheckpointError(LauncherError):
    """There are checkpoints, and every one is damaged. Exit 70: nobody but a person may decide to begin anew."""


def read_error(path: Path, error: OSError) -> CheckpointReadError:
    """Words an error of the system: what cannot be read may be whole, and nothing older takes its place."""
    return CheckpointReadError(
        f"{error.filename or path} cannot be read: {error.strerror or error}. It may be whole, so no older checkpoint "
        "is taken in its place. Mend the file system or the rights, then run the same command again."
    )


def write_error(what: str, path: Path, needed_bytes: int, error: OSError) -> CheckpointWriteError:
    """Words an error of the system: what could not be written, how many bytes it needs and how many are free."""
    place = next(parent for parent in path.absolute().parents if parent.is_dir())
    free_bytes, files = shutil.disk_usage(place).free, os.statvfs(place)
    inodes = "" if files.f_favail or not files.f_files else ", but no inode, so no file can be made"
    return CheckpointWriteError(
        f"Could not write {what} in {path.parent}: {error.strerror or error}. "
        f"It needs {needed_bytes / 2**20:.2f} MiB; {free_bytes / 2**20:.2f} MiB are free{inodes}. "
        "Older checkpoints are kept.",
        "Make room or allow writing there, then run the same command again.",
    )


def shorten(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    hidden = len(names) - _NAMES_SHOWN
    return "; ".join(names[:_NAMES_SHOWN]) + (f"; and {hidden} more" if hidden > 0 else "")
