"""The file of a lease, lease.json: who holds it, how it is read, written and locked, and how its processes are told."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import time
import zlib
from pathlib import Path
from typing import Any

FILE_NAME = "lease.json"
GONE = "gone"

_RECORD_BYTES = 2048
_CHECKSUM = "crc32"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lease.

    Attributes:
      job: the same for a supervisor and all workers of its job, other than that of any other run.
      host, process, started: the process, by its number and when it was started.
      since: Unix seconds.
      supervises: whether it holds the lease for workers that write in its place.
      locked: whether it holds the kernel's lock on the file.
      device: number of the mount on which it does.
      boot, processes: which kernel and which of its process namespaces `process` is to be looked for in.
    """

    job: str
    host: str
    process: int
    started: str
    since: float
    supervises: bool
    locked: bool
    device: int
    boot: str
    processes: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"{'supervisor' if self.supervises else 'process'} {self.process} on {self.host} since {since}"


def write(descriptor: int, job: str, supervises: bool, locked: bool) -> Holder:
    """Makes this process the holder; raises as `put`."""
    holder = Holder(
        job=job,
        host=socket.gethostname(),
        process=os.getpid(),
        started=started(os.getpid()),
        since=time.time(),
        supervises=supervises,
        locked=locked,
        device=os.fstat(descriptor).st_dev,
        boot=boot(),
        processes=processes(),
    )
    put(descriptor, holder)
    return holder


def put(descriptor: int, holder: Holder) -> None:
    """Writes who the holder is; OSError where there is no room."""
    record = dataclasses.asdict(holder)
    content = json.dumps({**record, _CHECKSUM: _checksum(record)}, indent=1).encode()
    # In place: to another reader the file is never away, and the next one needs no room.
    size = max(_RECORD_BYTES, os.fstat(descriptor).st_size)
    content = content.ljust(size - 1) + b"\n"
    if os.pwrite(descriptor, content, 0) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def seen_at(path: Path, beats: Holder | None) -> dict[str, Any] | str | None:
    """Who holds the lease, `GONE` where the file is, or None where none is said; a heartbeat where `beats` does."""
    try:
        holder = read_path(path)
    except FileNotFoundError:
        return GONE
    if holder is not None and holder == beats:
        os.utime(path)
    return None if holder is None else dataclasses.asdict(holder)


def remove(path: Path, made: tuple[Path, ...]) -> None:
    """Removes the file, and of the folders that were made for it those that are empty."""
    path.unlink()
    remove_empty(made)


def read(descriptor: int) -> Holder | None:
    """Who the file says; None where it is empty, half written or damaged."""
    try:
        record = json.loads(os.pread(descriptor, 2 * _RECORD_BYTES, 0))
        is_whole = record.pop(_CHECKSUM, None) in (None, _checksum(record))  # None: of a launcher that wrote none
        return Holder(**record) if is_whole else None
    except (ValueError, TypeError, AttributeError):
        return None


def _checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def read_path(path: Path) -> Holder | None:
    """The same of a file that is opened anew."""
    with open(path, "rb") as file:
        return read(file.fileno())


def lock(descriptor: int) -> bool | None:
    """Whether the lock was free and is now held; None where the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    _locked.add(descriptor)
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def close(descriptor: int) -> None:
    """Closes the file, which lets go of its lock."""
    _locked.discard(descriptor)
    with contextlib.suppress(OSError):
        os.close(descriptor)


# A child that is forked without another program would go on holding the lock when this process is killed.
_locked: set[int] = set()


def _close_all() -> None:
    for descriptor in tuple(_locked):
        close(descriptor)


os.register_at_fork(after_in_child=_close_all)


def remove_empty(folders: tuple[Path, ...]) -> None:
    """Removes those of the folders that are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def clock() -> float:
    """Seconds that go on while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def started(process: int) -> str:
    """When a process was started, in the kernel's words; "" when it has ended."""
    if not os.path.isdir("/proc/self"):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
        return "running"
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def boot() -> str:
    """The kernel that runs this process, since it was booted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def processes() -> str:
    """The namespace in which this process sees others; "" where that cannot be told."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
