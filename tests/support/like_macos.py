"""Makes this process look like one on macOS, as far as Linux can: for `sitecustomize`, so that children do, too.

Functions that Python has on Linux alone are gone, as are /proc, /sys and /dev/shm, and the C library knows no Linux
calls. What modules look up while they are imported is imported before.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing.util  # noqa: F401
import os
import platform
import subprocess  # noqa: F401
import sys
import sysconfig
import time
import urllib.request  # noqa: F401
import uuid  # noqa: F401

_NOT_ON_MACOS = (
    *("sched_getaffinity", "sched_setaffinity", "waitid", "waitid_result", "pidfd_open", "memfd_create", "eventfd"),
    *("posix_fadvise", "posix_fallocate", "pipe2", "copy_file_range", "splice", "unshare", "setns", "getrandom"),
    *("fdatasync", "getresuid", "setresuid", "O_DIRECT", "O_PATH", "O_NOATIME", "getxattr", "listxattr"),
)
_LINUX_CALLS = ("prctl", "unshare", "setns")
_NOT_THERE = ("/proc", "/sys", "/dev/shm")


class _Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in _LINUX_CALLS:
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


def _refuse(path: object) -> None:
    if isinstance(path, str | bytes | os.PathLike):
        text = os.fsdecode(path)
        if text.startswith(_NOT_THERE) and not text.startswith("/proc/self/fd"):  # of subprocess's own
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)


def _audit(event: str, arguments: tuple) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        _refuse(arguments[0])


def _without_linux_paths(function):
    def call(path, *rest, **named):
        _refuse(path)
        return function(path, *rest, **named)

    return call


sysconfig.get_config_vars()
for _name in _NOT_ON_MACOS:
    if hasattr(os, _name):
        delattr(os, _name)
if hasattr(time, "CLOCK_BOOTTIME"):
    del time.CLOCK_BOOTTIME
for _name in ("stat", "lstat", "readlink", "statvfs", "access"):
    setattr(os, _name, _without_linux_paths(getattr(os, _name)))
ctypes.CDLL = _Library  # type: ignore[misc]
sys.addaudithook(_audit)
sys.platform = "darwin"
platform.system = lambda: "Darwin"
platform.machine = lambda: "arm64"
