"""One writer a folder: whoever writes to a model_dir holds its lease, MODEL_DIR/lease.json; a second run is refused.

The file says who holds it and since when, and its time of modification is the holder's heartbeat. Besides, the holder
keeps a kernel lock on it (flock), where the file system has locks. A holder is known to be gone

  - at once, when the lock is free on the mount on which it was taken, or its process is gone from this host;
  - otherwise, as on a mounted bucket or from another host, when no heartbeat has come for 60 seconds. Clocks of two
    hosts are not compared: whoever wants the lease watches the file for two heartbeats at least.

Where there are no locks, of two runs that start at the same instant the one that writes last is the holder: both look
again a moment later. A holder that was suspended, and whose lease was taken over meanwhile, notices at its next
heartbeat, and before it commits a checkpoint, and stops. A file that somebody has removed or damaged is written again
by its holder, as long as no other run can have taken it over.

A supervisor holds the lease for all attempts of its job and names the job to its workers; the chief joins it, or holds
the lease itself where its folder is another one than the supervisor's. Workers that are not the chief write nothing.

Imports no TensorFlow: the supervisor holds leases, too.
"""

import contextlib
import dataclasses
import errno
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_RETRY, LauncherError, PeerError, UsageError, failures
from launcher.model_dir import lease_file
from launcher.model_dir.lease_file import Holder

JOB = "LAUNCHER_LEASE"

_BEAT_SECONDS = 5.0
_LIMIT_SECONDS = 60.0
_SETTLE_SECONDS = 2.0
# How long another process may hold the lock before it has said who it is.
_CONTENTION_SECONDS = 10.0
# A file system that hangs keeps neither a training nor its end.
_PATIENCE_SECONDS = 2.0
_TURN_SECONDS = 0.1


class LeaseLostError(LauncherError):
    """Another run has taken the folder over: exit 70, for this one must not write to it again."""


class LeaseGoneError(LeaseLostError):
    """Nobody can tell whose the folder is: exit 75, for the same command finds out."""

    exit_code = EXIT_RETRY


Isolate = Callable[[Callable[[], Any]], Any]


def _here(work: Callable[[], Any]) -> Any:
    return work()


@dataclasses.dataclass
class Lease:
    """A lease that is held, or shared with the supervisor that holds it; see `held`.

    Attributes:
      path: of its file; None where there is nothing to hold.
      holder, descriptor: who holds it, and its open file where this process does.
      made: folders that were made for it.
      isolate: see `held`.
    """

    path: Path | None = None
    holder: Holder | None = None
    descriptor: int | None = None
    made: tuple[Path, ...] = ()
    isolate: Isolate = _here

    def __post_init__(self) -> None:
        self._lost: LeaseLostError | None = None
        self._seen = lease_file.clock()
        self._is_looking = False
        self._asked, self._answered, self._over = threading.Event(), threading.Event(), threading.Event()
        # A daemon, and with `verify` all that touches the file: a file system that hangs, hangs nothing else.
        self._beats = threading.Thread(target=self._beat, name="lease", daemon=True)
        if self.path is not None:
            self._beats.start()

    @property
    def is_lost(self) -> bool:
        """Whether another run was seen to have taken the lease over, or may have."""
        return self._lost is not None

    def check(self) -> None:
        """Raises LeaseLostError where another run has taken the lease over.

        Returns at once, or within two seconds when this process was suspended, also when the file system hangs.
        """
        if lease_file.clock() - self._seen > _LIMIT_SECONDS / 2 and not self._is_looking:
            self.ask()
        if self._lost:
            raise self._lost

    def verify(self) -> None:
        """Reads the lease now, and raises as `check`: for who is about to write to the same file system anyway."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self._look(self.path)
        if self._lost:
            raise self._lost

    def ask(self) -> bool:
        """Has the lease's own thread read it, waits for that for two seconds, and returns whether it was lost."""
        if self.path is not None:
            self._answered.clear()
            self._asked.set()
            self._answered.wait(_PATIENCE_SECONDS)
        return self.is_lost

    def release(self) -> None:
        """Lets go of the lease, and of folders that were made for it and are empty; waits two seconds at most."""
        self._over.set()
        self._asked.set()
        if self.path is not None:
            self._beats.join(_PATIENCE_SECONDS)

    def _beat(self) -> None:
        path = self.path
        assert path is not None
        while not self._over.is_set():
            self._asked.wait(_BEAT_SECONDS)
            self._asked.clear()
            self._is_looking = True
            with contextlib.suppress(OSError):
                self._look(path, beats=self.descriptor is not None)
            self._is_looking = False
            self._answered.set()
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                self._look(path)
                if not self._lost:
                    self.isolate(lambda: lease_file.remove(path, self.made))
            lease_file.close(self.descriptor)

    def _look(self, path: Path, *, beats: bool = False) -> None:
        """Sees who holds the lease, and gives a heartbeat if that is this run; OSError where nothing can be known."""
        mine = self.holder
        assert mine is not None
        answer = self.isolate(lambda: lease_file.seen_at(path, mine if beats else None))
        if isinstance(answer, dict):
            holder = Holder(**answer)
            if holder == mine or (self.descriptor is None and holder.job == mine.job):
                self._seen = lease_file.clock()
                return
            self._lost = LeaseLostError(
                f"{path} was taken over by {holder}: this run was suspended, its file system did not answer, or the "
                "file was removed. This run writes nothing more to the folder. Go on with the other run, or choose "
                "another --model_dir"
            )
            return
        # Nobody may take over what had a heartbeat just now. Whoever shares the lease leaves the rest to the holder.
        is_recent = lease_file.clock() - self._seen <= _LIMIT_SECONDS
        try:
            if beats and is_recent and self._mend(path, mine):
                self._seen = lease_file.clock()
        except OSError:
            is_recent = answer is None  # without its folder there is nothing to write to
        if not is_recent:
            self._lost = LeaseGoneError(
                f"{path} is {answer or 'damaged'} and cannot be written again, or another run may have held it "
                "meanwhile. This run writes nothing more to the folder. Run the same command again"
            )

    def _mend(self, path: Path, mine: Holder) -> bool:
        """Writes the file again that somebody has removed or damaged; whether no other run was faster."""
        held = self.descriptor
        assert held is not None
        if lease_file.is_at(held, path):
            lease_file.put(held, mine)
            return True
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if lease_file.lock(descriptor) is False or lease_file.read(descriptor) not in (None, mine):
                return False
            lease_file.put(descriptor, mine)
            self.descriptor, descriptor = descriptor, held
            return True
        finally:
            lease_file.close(descriptor)


@contextlib.contextmanager
def held(
    model_dir: str | None,
    *,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    supervised_job: str | None = None,
    isolate: Isolate = _here,
) -> Iterator[Lease]:
    """Holds the lease of a folder inside the block, and makes the folder if need be.

    Args:
      model_dir: the folder; None, or the URL of a bucket, to which no run writes: there is nothing to hold.
      environ: names the job of a supervised worker.
      say: takes a line for people: what is waited for, what was taken over.
      supervised_job: for a supervisor, the job whose workers share the lease.
      isolate: calls a function that reads or writes the file while the lease is held, and returns what it returns,
        which JSON can hold; for whoever must be able to end while the file system hangs, in another process.

    Raises:
      UsageError: another run writes to the folder, or nobody can.
      PeerError: the lease cannot be written for now.
    """
    if model_dir is None or "://" in model_dir:
        yield Lease()
        return
    lease = _acquire(Path(model_dir), environ.get(JOB), supervised_job, say, isolate)
    try:
        yield lease
    finally:
        lease.release()


def _acquire(
    folder: Path, joins: str | None, supervises: str | None, say: Callable[[str], None], isolate: Isolate
) -> Lease:
    path = folder / lease_file.FILE_NAME
    deadline = time.monotonic() + _CONTENTION_SECONDS
    made: tuple[Path, ...] = ()
    try:
        made = tuple(place for place in (folder, *folder.parents) if not place.exists())  # innermost first
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            _check_able(folder)
            with contextlib.suppress(FileNotFoundError):  # the folder was removed again by whoever had made it
                descriptor, lease = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), None
                try:
                    lease = _take(descriptor, path, joins, supervises, made, say, isolate)
                finally:
                    if lease is None or lease.descriptor != descriptor:
                        lease_file.close(descriptor)
                if lease is not None:
                    return lease
            if time.monotonic() > deadline:
                raise UsageError(f"--model_dir={folder}: another run is just starting there ({path} is locked)")
            time.sleep(_TURN_SECONDS)
    except UsageError:
        lease_file.remove_empty(made)
        raise
    except OSError as error:
        lease_file.remove_empty(made)
        raise _write_error(folder, error) from error


def _check_able(folder: Path) -> None:
    """Raises UsageError where the file system lacks what checkpoints and logs need; all else is told when it is met."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        before = Path(place, "before")
        before.mkdir()
        (before / "file").touch()
        try:
            (before / "file").open("ab").close()
            before.rename(Path(place, "after"))
        except OSError as error:
            if not failures.is_machine_failure(error):
                raise UsageError(
                    f"--model_dir={folder}: its file system cannot rename a folder or append to a file "
                    f"({error.strerror}), as a bucket that gcsfuse or Mountpoint has mounted. Give a folder on a disk "
                    "or on NFS, and copy it to the bucket when the run has ended"
                ) from error


def _take(
    descriptor: int,
    path: Path,
    joins: str | None,
    supervises: str | None,
    made: tuple[Path, ...],
    say: Callable[[str], None],
    isolate: Isolate,
) -> Lease | None:
    """Takes or joins the lease; None where another process is just taking or releasing it: to be tried again."""
    job = supervises or joins or uuid.uuid4().hex[:12]
    is_locked = lease_file.lock(descriptor)
    holder = lease_file.read(descriptor)
    lives = holder is not None and _lives(holder, is_locked, os.fstat(descriptor).st_dev)
    if (is_locked is False and lives is False) or not lease_file.is_at(descriptor, path):
        return None
    if holder is not None:
        if holder.job == job and holder.supervises and lives is not False:
            return Lease(path, holder, isolate=isolate)
        is_earlier_attempt = holder.job == joins
        if lives is None and not is_earlier_attempt:
            lives = _beats(path, holder, say)
            if not lease_file.is_at(descriptor, path):
                return None
        if lives and not is_earlier_attempt:
            raise _refusal(holder, path)
    try:
        mine = lease_file.write(descriptor, job, supervises is not None, is_locked is True)
    except OSError:
        if holder is None:
            path.unlink()
        raise
    if is_locked is None:
        time.sleep(_SETTLE_SECONDS)
        now = lease_file.read_path(path)
        if now is not None and now != mine:
            raise _refusal(now, path)
    if holder is not None:
        say(f"took over {path} from {holder}, which is gone")
    return Lease(path, mine, descriptor, made, isolate)


def _beats(path: Path, holder: Holder, say: Callable[[str], None]) -> bool:
    """Waits for a heartbeat of a holder that cannot be seen from here; whether one came."""
    first = path.stat().st_mtime_ns
    age = max(0.0, time.time() - first / 1e9)
    seconds = max(_LIMIT_SECONDS - age, 2 * _BEAT_SECONDS)
    say(f"{path} is held by {holder}, which cannot be seen from here: waiting up to {seconds:.0f} s for a heartbeat")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_TURN_SECONDS * 5)
        try:
            # Opened anew, because only that makes a network file system ask the server.
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_mtime_ns != first or lease_file.read(file.fileno()) not in (holder, None):
                    return True
        except FileNotFoundError:
            return False
    return False


def _lives(holder: Holder, is_locked: bool | None, device: int) -> bool | None:
    """Whether the holder still runs and holds this file; None where that cannot be seen from here.

    Args:
      is_locked: whether this process has the lock now; None where there are none.
      device: the mount of the file, as this process sees it: another mount of the same files may have its own locks.
    """
    same_kernel = holder.boot == lease_file.boot()
    if same_kernel and is_locked and holder.locked and holder.device == device:
        return False
    if same_kernel and holder.processes == lease_file.processes():
        return lease_file.started(holder.process) == holder.started
    return True if is_locked is False else None


def _refusal(holder: Holder, path: Path) -> UsageError:
    beat = ""
    with contextlib.suppress(OSError):
        beat = f", last heartbeat {max(0.0, time.time() - path.stat().st_mtime):.0f} s ago"
    return UsageError(
        f"--model_dir={path.parent}: another run writes to it: {holder}{beat}. Wait, or choose another --model_dir"
    )


def _write_error(folder: Path, error: OSError) -> LauncherError:
    if error.errno == errno.EROFS and folder.is_dir() and any(folder.iterdir()):
        what = f"--model_dir={folder} cannot be written to any more: {error.strerror}"
        return PeerError(f"{what}; make it writable and run the same command again")
    what = f"--model_dir={folder}: {lease_file.FILE_NAME} cannot be written there: {error.strerror or error}"
    if failures.is_machine_failure(error):
        return PeerError(f"{what}. Make room there, or mend the file system, then run the same command again")
    return UsageError(f"{what}; choose another --model_dir")
