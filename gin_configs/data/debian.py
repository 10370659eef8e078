"""Data sets that Debian and its descendants carry as packages: fetched with apt-get, unpacked with dpkg, without root.

Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.data import prepare as program
from launcher.data import tfds
from launcher.errors import LauncherError, PeerError, UsageError

_TIMEOUT_SECONDS = 600
_GZIP_HEADER = struct.Struct("<3sBIBB")  # magic and method, flags, time of modification, extra flags, system
_GZIP_MAGIC = b"\x1f\x8b\x08"
_GZIP_HAS_NAME = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A Debian package that holds the files a TFDS builder downloads.

    Args:
      name: of the package.
      folder: where its files are, relative to the root.
      gzip_times: file name to the time of modification in its gzip header, seconds since 1970. Debian's packages are
        reproducible: the build takes name and time out of gzip headers. Put back, the files are, byte for byte, the
        ones that were published.
    """

    name: str
    folder: str
    gzip_times: Mapping[str, int]


# Found by trying times until the checksum was the published one; TFDS checks it again.
PACKAGES = {
    "fashion_mnist": Package(
        name="dataset-fashion-mnist",
        folder="usr/share/datasets/fashion-mnist",
        gzip_times={
            "train-images-idx3-ubyte.gz": 1504176606,
            "train-labels-idx1-ubyte.gz": 1504176606,
            "t10k-images-idx3-ubyte.gz": 1504176627,
            "t10k-labels-idx1-ubyte.gz": 1504176627,
        },
    ),
}


def available() -> bool:
    """Whether this system has Debian's package tools."""
    return shutil.which("apt-get") is not None and shutil.which("dpkg") is not None


def prepare(name: str, *, say: Callable[[str], None]) -> None:
    """Prepares a TFDS data set from the files of its package.

    Raises:
      PeerError: the package cannot be had; trying again later may help.
      LauncherError: the package does not hold the published files.
    """
    builder = tfds.open_builder(name)
    if not tfds.is_prepared(builder):
        if not available():
            raise UsageError(f"{name}: apt-get and dpkg are needed, and are not here")
        with program.readable_errors(name, builder):
            fetch(PACKAGES[name], program.work_folder(name), checksums=program.checksums(builder), say=say)
    program.prepare(name, say=say)


def fetch(package: Package, destination: Path, *, checksums: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Puts the files of a package into `destination`, as they were published.

    Works in a folder beside it, `destination`.partial, which a later call takes up again, and moves it into place when
    all files have the right checksum. Does nothing if `destination` is there.

    Args:
      package: what to fetch.
      destination: folder to make.
      checksums: file name to SHA-256, hexadecimal.
      say: called with a line for people at each stage.

    Raises:
      PeerError: the package could not be downloaded; trying again later may help.
      LauncherError: the package does not hold the published files.
    """
    if destination.exists():
        say(f"{destination} is there already")
        return
    partial = destination.with_name(destination.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    archive, root = unpack(package.name, partial, say=say)
    files = partial / "files"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    for name, time in package.gzip_times.items():
        content = restore_gzip_header((root / package.folder / name).read_bytes(), name=name, time=time)
        if hashlib.sha256(content).hexdigest() != checksums[name]:
            raise LauncherError(
                f"{name} in {archive.name} is not the published file: its SHA-256 is not {checksums[name]}. Get the "
                "data set's files from its authors and give their folder as --archives"
            )
        (files / name).write_bytes(content)
    os.replace(files, destination)
    shutil.rmtree(partial)


def unpack(name: str, folder: Path, *, say: Callable[[str], None]) -> tuple[Path, Path]:
    """Downloads a package and unpacks it into the folder "root" in `folder`, anew; apt checks what it downloads.

    Args:
      name: of the package.
      folder: an existing one. A download that an earlier call left there is checked and taken up again.
      say: called with a line for people at each stage.

    Returns:
      The package's file and the folder "root".

    Raises:
      PeerError: the package could not be downloaded or unpacked; trying again later may help.
    """
    archive, root = _download(name, folder, say), folder / "root"
    say(f"unpacking {archive.name}")
    shutil.rmtree(root, ignore_errors=True)
    unpacked = _run(["dpkg", "-x", archive.name, root.name], folder)
    if unpacked.returncode:
        archive.unlink()
        raise PeerError(f"{archive.name} cannot be unpacked; it was deleted, run again. dpkg says: {_tail(unpacked)}")
    return archive, root


def restore_gzip_header(content: bytes, *, name: str, time: int) -> bytes:
    """Puts the original file name and time of modification into the header of a gzip file (RFC 1952, section 2.3).

    Args:
      content: a gzip file with no optional field in its header.
      name: the gzip file's name; that of the original is the same without ".gz".
      time: seconds since 1970.

    Raises:
      LauncherError: not such a file.
    """
    if len(content) < _GZIP_HEADER.size:
        raise LauncherError(f"{name} is not a gzip file: {len(content)} bytes")
    magic, flags, _, extra_flags, system = _GZIP_HEADER.unpack_from(content)
    if magic != _GZIP_MAGIC or flags:
        raise LauncherError(f"{name} is not a gzip file without a name: its header is {content[:10].hex(' ')}")
    header = _GZIP_HEADER.pack(magic, _GZIP_HAS_NAME, time, extra_flags, system)
    return header + name.removesuffix(".gz").encode("latin-1") + b"\0" + content[_GZIP_HEADER.size :]


def _download(name: str, folder: Path, say: Callable[[str], None]) -> Path:
    """Downloads a package into `folder`; what is there already is checked and completed."""
    say(f"apt-get download {name}")
    first = _apt(["download", name], folder)
    if first.returncode:
        # The lists of packages may be missing or old, and only root may renew those of the system.
        say("apt-get does not find it: getting lists of packages of our own")
        (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (folder / "cache").mkdir(exist_ok=True)
        own = ["-o", f"Dir::State::Lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}"]
        updated = _apt([*own, "update"], folder)
        second = _apt([*own, "download", name], folder)
        if second.returncode:
            raise PeerError(
                f"apt-get cannot download {name}; check the network and the package sources, then run again. "
                f"apt-get says: {_tail(first)} {_tail(updated) if updated.returncode else ''} {_tail(second)}"
            )
    found = sorted(folder.glob(f"{name}_*.deb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise PeerError(f"apt-get download {name} left no package in {folder}; run again")
    return found[-1]


def _apt(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20", "-o", "Acquire::Retries=1"]
    if os.geteuid() == 0:
        # Else apt warns that its own user cannot write here.
        options += ["-o", "APT::Sandbox::User=root"]
    return _run(["apt-get", *options, *arguments], folder)


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"{' '.join(command)} took longer than {_TIMEOUT_SECONDS} s; run again") from None


def _tail(finished: subprocess.CompletedProcess[str]) -> str:
    return " / ".join(finished.stderr.strip().splitlines()[-3:])
