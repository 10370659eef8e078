"""Prepares a data set for training: downloads it, checks it, converts it. Once; training itself never downloads.

    python -m launcher.data.prepare fashion_mnist
    python -m launcher.data.prepare cifar10 --data_dir=/data/tfds
    python -m launcher.data.prepare imagenet2012 --archives=/data/imagenet

NAME is fashion_mnist, cifar10, cifar100, mnist, imagenet2012 or the name of any other TFDS data set. What is prepared
already is left alone; what was interrupted goes on when the same command is run again. Downloaded files are checked
against the checksums that TFDS holds.

What recipes are shown with has a program of its own: python -m launcher.gin_configs.data --help
"""

import argparse
import contextlib
import errno
import os
import shutil
import sys
import time
import traceback
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NoReturn

from launcher.data import catalog, tfds
from launcher.errors import EXIT_DONE, EXIT_FAILED, LauncherError, PeerError, UsageError, nearest
from launcher.machine import installation, ports

_PROBE_SECONDS = 8.0

_FULL = (errno.EDQUOT, errno.ENOSPC)
_NOT_WRITABLE = (errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS)

# Prepared, or fetched where its server cannot be reached, by a program above this one.
_SHOWN = ("fashion_mnist", "help_en_de", "help_en_es", "help_en_fr")
_BY_PACKAGE = f"{installation.python()} -m launcher.gin_configs.data"

# Need no preparation, so a user may well ask for it.
_ALWAYS_THERE = {
    "digits": f"it comes with scikit-learn ({installation.command('demo')})",
    "python_docs": "it comes with Python",
    "spoken_numbers": f"its phrases are made up by packages ({installation.command('text')})",
    "synthetic": "its images are made up while training",
}

_EXIT_CODES = "Exit codes: 0 done; 64 bad name, flag or files; 70 failed; 75 no network, try again."


class _Parser(argparse.ArgumentParser):
    """A parser whose users' mistakes end as all others do."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. --help shows every flag")


def main(argv: Sequence[str] | None = None, make: Callable[..., None] | None = None, about: str = __doc__ or "") -> int:
    """Parses the command line, prepares one data set by `make`, or `prepare`, and returns the exit code."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    parser = _Parser(
        prog="python -m launcher.data.prepare" if make is None else "python -m launcher.gin_configs.data",
        description=about,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="see above")
    parser.add_argument(
        "--data_dir", metavar="DIR", help="prepared data sets (default: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"
    )
    parser.add_argument(
        "--archives",
        metavar="DIR",
        help="folder with the original files, where you have them: nothing is downloaded then",
    )
    try:
        given = parser.parse_args(argv and argv[1:])
        if given.data_dir is not None:
            os.environ["TFDS_DATA_DIR"] = os.path.expanduser(given.data_dir)
        archives = given.archives and Path(given.archives).expanduser()
        (make or prepare)(given.name, archives=archives, say=print)
        return EXIT_DONE
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except Exception:  # ours: the whole traceback
        traceback.print_exc()
        return EXIT_FAILED


def prepare(name: str, *, archives: Path | None = None, say: Callable[[str], None] = print) -> None:
    """Prepares a data set in `launcher.data.tfds.data_dir()`.

    Args:
      name: as TFDS writes it; a leading "tfds:" is ignored.
      archives: folder with the files that TFDS would download, under their original names.
      say: takes a line at each stage.

    Raises:
      UsageError: an unknown name, or something only the user can provide is missing.
      PeerError: the network failed.
      LauncherError: downloaded files are not what they should be.
    """
    name = name.removeprefix("tfds:")
    if name in _ALWAYS_THERE:
        say(f"{name}: nothing to prepare, {_ALWAYS_THERE[name]}")
        return
    try:
        builder = tfds.open_builder(name)
    except UsageError as error:
        if name in _SHOWN:
            raise UsageError(f"{name} is prepared by {_BY_PACKAGE} {name}") from None
        known = [*_ALWAYS_THERE, *catalog.TFDS, *_SHOWN]
        close = f"; did you mean {found!r}?" if (found := nearest(name, known)) else ""
        raise UsageError(f"{error}\nKnown here: {', '.join(sorted({*known}))}{close}") from None
    if tfds.is_prepared(builder):
        say(f"{name} is prepared already: {_summary(builder)}")
        return
    started = time.monotonic()
    root, work = Path(tfds.data_dir()), work_folder(name)
    with readable_errors(name, builder):
        folder = _find_archives(name, builder, archives, work, say)
        say(f"building {name} in {root}" + (f" from {folder}" if folder else ""))
        module = tfds.module()
        if not sys.stderr.isatty():
            module.disable_progress_bar()
        # TFDS takes files from manual_dir whose names it has registered, and checks their checksums.
        extract_dir = work / "extracted" if folder == work else None
        options = {"manual_dir": folder, "extract_dir": extract_dir, "try_download_gcs": False}
        builder.download_and_prepare(download_config=module.download.DownloadConfig(**options))
        if folder == work:
            shutil.rmtree(work)
    say(f"done in {time.monotonic() - started:.0f} s: {_summary(builder)}")


def work_folder(name: str) -> Path:
    """Where the original files of a set are put before it is made from them, by whoever brings them."""
    return Path(tfds.data_dir()) / "downloads" / f"{name.replace('/', '_')}.archives"


def checksums(builder: Any) -> dict[str, str]:
    """The SHA-256 of each of the original files, by name, as far as TFDS knows them."""
    urls = builder.url_infos or {}
    return {info.filename or url.rsplit("/", 1)[-1]: info.checksum for url, info in urls.items()}


def _summary(builder: Any) -> str:
    splits = ", ".join(f"{split.num_examples:,} {name}" for name, split in sorted(builder.info.splits.items()))
    return f"{splits} examples in {builder.data_dir}"


def _find_archives(
    name: str, builder: Any, archives: Path | None, work: Path, say: Callable[[str], None]
) -> Path | None:
    """The folder of the original files; None if TFDS is to download them."""
    expected = checksums(builder)
    by_hand = tfds.by_hand_instructions(builder)
    if archives is not None:
        # One of them is enough to go on: TFDS registers the files of all configurations together. Of files to be
        # downloaded by hand it need not know any.
        known = not expected or by_hand or any((archives / file).is_file() for file in expected)
        if not archives.is_dir() or not known:
            raise UsageError(f"--archives={archives} must be a folder with {', '.join(sorted(expected)) or by_hand}")
        return archives
    if work.exists():  # an earlier call got this far
        return work
    if by_hand:
        raise UsageError(_by_hand_message(name, by_hand))
    url = next(iter(builder.url_infos or ()), None)
    if url is None:
        return None
    host = urllib.parse.urlsplit(url).netloc or url
    say(f"looking for {host}")
    failure = _probe(url)
    if failure is None:
        return None
    package = f", or type {_BY_PACKAGE} {name}, for a Debian package" if name in _SHOWN else ""
    raise PeerError(
        f"{name} cannot be downloaded from {host} ({failure}). Connect this machine to the internet and run "
        f"again, or give --archives=FOLDER with {', '.join(sorted(expected))}{package}"
    )


def _by_hand_message(name: str, words: str) -> str:
    return (
        f"{name} has to be downloaded by hand. {words} Put the files into one folder (manual_dir) and run: "
        f"{installation.python()} -m launcher.data.prepare {name} --archives=FOLDER"
    )


def _probe(url: str) -> str | None:
    """Why `url` cannot be downloaded; None if it can. Quick: TFDS itself would retry for minutes."""
    import requests  # TFDS downloads with it

    try:
        asked = ports.beside(requests.head, url, timeout=_PROBE_SECONDS, allow_redirects=True)
        answer = asked.result(2 * _PROBE_SECONDS)
        # A server that only refuses to be asked this way may still give the file.
        if answer.status_code not in (405, 501):
            answer.raise_for_status()
    except (requests.RequestException, futures.TimeoutError) as error:
        return str(error) or "no name server answers"
    return None


@contextlib.contextmanager
def readable_errors(name: str, builder: Any) -> Iterator[None]:
    """Errors of a preparation in the words of what to do."""
    root = Path(tfds.data_dir())
    try:
        yield
    except LauncherError:
        raise
    except Exception as error:
        kind = type(error).__name__
        if kind == "NonMatchingChecksumError":
            raise LauncherError(f"a file is not the one that TFDS knows: {error}") from None
        import requests  # late: see `_probe`

        if kind == "DownloadError" or isinstance(error, requests.exceptions.RequestException | urllib.error.URLError):
            raise PeerError(f"the download failed, run the same command again to go on: {error}") from None
        if isinstance(error, OSError) and _is_in_the_way(error, root):
            raise UsageError(f"--data_dir={root} cannot be written ({error}); choose another folder") from None
        by_hand = tfds.by_hand_instructions(builder)
        if by_hand and kind in ("AssertionError", "FileNotFoundError", "NotFoundError"):
            raise UsageError(f"{_by_hand_message(name, by_hand)}\n({error})") from None
        raise


def _is_in_the_way(error: OSError, root: Path) -> bool:
    path = Path(error.filename) if isinstance(error.filename, str) else None
    concerned = path is not None and (path.is_relative_to(root) or root.is_relative_to(path))
    return error.errno in _FULL or (concerned and error.errno in _NOT_WRITABLE)


if __name__ == "__main__":
    sys.exit(main())
