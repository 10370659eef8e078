from __future__ import annotations

import gzip
import hashlib
import io
import stat
import tarfile
from pathlib import Path

import pytest

from launcher.errors import LauncherError, PeerError
from launcher.gin_configs.data import debian
from launcher.gin_configs.data.debian import Package

TIME = 1_500_000_000


def _gzip(content: bytes, name: str = "", time: int = 0) -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(name, "wb", fileobj=buffer, mtime=time) as file:
        file.write(content)
    return buffer.getvalue()


def test_a_gzip_header_comes_back_as_it_was():
    published = _gzip(b"content", "words.gz", TIME)
    packaged = _gzip(b"content", "", 17)
    assert packaged != published
    assert debian.restore_gzip_header(packaged, name="words.gz", time=TIME) == published


@pytest.mark.parametrize("content", [b"", b"no gzip file at all", _gzip(b"content", "words.gz", TIME)])
def test_what_is_no_bare_gzip_file_is_refused(content):
    with pytest.raises(LauncherError, match=r"words\.gz is not a gzip file"):
        debian.restore_gzip_header(content, name="words.gz", time=TIME)


# ------------------------------------------------------------------------------- a package archive of our own, on PATH

PUBLISHED = {"a.gz": _gzip(b"first", "a.gz", TIME), "b.gz": _gzip(b"second", "b.gz", TIME + 1)}
CHECKSUMS = {name: hashlib.sha256(content).hexdigest() for name, content in PUBLISHED.items()}
PACKAGE = Package(name="dataset-words", folder="usr/share/words", gzip_times={"a.gz": TIME, "b.gz": TIME + 1})


def _script(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\nset -e\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def archive(tmp_path, monkeypatch) -> Path:
    """A folder with the package to be downloaded, as a tar file; `apt-get` and `dpkg` know no other."""
    archive = tmp_path / "archive"
    archive.mkdir()
    with tarfile.open(archive / "dataset-words_1.0_all.deb", "w") as package:
        for name, content in (("a.gz", _gzip(b"first", "", 17)), ("b.gz", _gzip(b"second", "", 17))):
            member = tarfile.TarInfo(f"usr/share/words/{name}")
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))
    tools = tmp_path / "tools"
    tools.mkdir()
    # The last two arguments are "download" and the package; lists of the user's own are given as options before.
    _script(
        tools / "apt-get",
        f'echo "$@" >> {tmp_path}/calls\n'
        f'case "$*" in\n'
        f"  *update) exit 0 ;;\n"
        f'  *Dir::State::Lists*|*) [ ! -e {archive}/no-lists ] || case "$*" in *Dir::State::Lists*) ;; *)\n'
        f"    echo 'E: Unable to locate package' >&2; exit 100 ;; esac\n"
        f"    [ -e {archive}/dataset-words_1.0_all.deb ] || {{ echo 'E: Failed to fetch' >&2; exit 100; }}\n"
        f"    cp {archive}/dataset-words_1.0_all.deb . ;;\n"
        f"esac\n",
    )
    _script(tools / "dpkg", 'mkdir "$3"\nexec tar -xf "$2" -C "$3"\n')
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return archive


def _fetch(folder: Path, checksums: dict[str, str] = CHECKSUMS) -> list[str]:
    said: list[str] = []
    debian.fetch(PACKAGE, folder, checksums=checksums, say=said.append)
    return said


def test_a_package_becomes_the_published_files(archive, tmp_path):
    folder = tmp_path / "downloads" / "words"
    _fetch(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == PUBLISHED
    assert [path.name for path in folder.parent.iterdir()] == ["words"]


def test_what_is_there_is_not_downloaded_again(archive, tmp_path):
    _fetch(tmp_path / "words")
    calls = (tmp_path / "calls").read_text()
    assert "there already" in _fetch(tmp_path / "words")[-1]
    assert (tmp_path / "calls").read_text() == calls


def test_old_lists_of_packages_are_renewed_without_root(archive, tmp_path):
    (archive / "no-lists").touch()
    _fetch(tmp_path / "words")
    first, update, second = (tmp_path / "calls").read_text().splitlines()
    assert first.endswith("download dataset-words") and update.endswith("update")
    own = f"Dir::State::Lists={tmp_path}/words.partial/lists"
    assert own not in first and own in update and own in second
    assert (tmp_path / "words" / "a.gz").exists()


def test_a_network_failure_can_be_tried_again(archive, tmp_path):
    package = archive / "dataset-words_1.0_all.deb"
    content = package.read_bytes()
    package.unlink()
    with pytest.raises(PeerError, match=r"apt-get cannot download dataset-words.*Failed to fetch"):
        _fetch(tmp_path / "words")
    assert not (tmp_path / "words").exists()
    package.write_bytes(content)
    _fetch(tmp_path / "words")
    assert (tmp_path / "words" / "b.gz").exists()


def test_a_damaged_package_is_thrown_away(archive, tmp_path):
    (archive / "dataset-words_1.0_all.deb").write_bytes(b"no package")
    with pytest.raises(PeerError, match="run again"):
        _fetch(tmp_path / "words")
    assert not list((tmp_path / "words.partial").glob("*.deb"))


def test_a_package_with_other_files_is_refused(archive, tmp_path):
    with pytest.raises(LauncherError, match=r"b\.gz in dataset-words_1\.0_all\.deb is not the published file"):
        _fetch(tmp_path / "words", {**CHECKSUMS, "b.gz": "0" * 64})
    assert not (tmp_path / "words").exists()


def test_systems_without_debians_tools_are_recognised(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not debian.available()
