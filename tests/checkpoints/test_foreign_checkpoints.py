"""Checkpoints that somebody else wrote, with another version or with intent: damaged or newer, never a bare error."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import assert_same_bits, state_of

from launcher.checkpoints import CheckpointReadError, CheckpointStore, find_damage, manifest
from launcher.errors import UsageError

pytestmark = pytest.mark.slow

DATA = "state.data-00000-of-00001"
DEEP = "[" * 100_000 + "]" * 100_000

Manifest = dict[str, Any]


def sealed(folder: Path, changed: Any) -> None:
    """Writes a manifest as if it had been written so: its own checksum is right."""
    if isinstance(changed, dict):
        changed = {name: value for name, value in changed.items() if name != "sha256"}
        changed["sha256"] = manifest.checksum(changed)
    (folder / "manifest.json").write_text(json.dumps(changed))


def entry(name: str, value: Any) -> Callable[[Manifest], Manifest]:
    return lambda whole: {**whole, name: value}


def without(name: str) -> Callable[[Manifest], Manifest]:
    return lambda whole: {key: value for key, value in whole.items() if key != name}


def file(name: str, about: Any = None) -> Callable[[Manifest], Manifest]:
    return lambda whole: {**whole, "files": {**whole["files"], name: about or whole["files"][DATA]}}


def tensor(about: Any) -> Callable[[Manifest], Manifest]:
    return lambda whole: {**whole, "tensors": {**whole["tensors"], "step": about}}


MANIFESTS: list[tuple[Callable[[Manifest], Any], str]] = [
    (lambda whole: [whole], "does not match its own checksum"),
    (lambda whole: None, "does not match its own checksum"),
    (lambda whole: "text", "does not match its own checksum"),
    (entry("format", 2), "has format 2: a newer version of Launcher wrote it, this one reads 1"),
    (entry("format", 0), "no format"),
    (entry("format", True), "no format"),
    (entry("format", "1"), "no format"),
    (without("format"), "no format"),
    (entry("step", "2"), "no step"),
    (entry("step", -2), "no step"),
    (entry("step", 2.5), "no step"),
    (entry("step", None), "no step"),
    (entry("step", 10**4000), "is of step 1000"),
    (without("step"), "no step"),
    (entry("time", "now"), "no time"),
    (entry("time", float("nan")), "no time"),
    (without("time"), "no time"),
    (entry("run", [1]), "no run"),
    (entry("scaling", "none"), "no scaling"),
    (entry("metrics", 3), "no metrics"),
    (entry("files", None), "no files"),
    (entry("files", ["state.index"]), "no files"),
    (entry("files", {}), "no files"),
    (without("files"), "no files"),
    (file("state.index", 7), "no files"),
    (file("state.index", {"size": 3}), "no files"),
    (file("state.index", {"size": "3", "sha256": "0"}), "no files"),
    (file("../../outside"), "no files"),
    (file("state.x/../../../outside"), "no files"),
    (file("/etc/passwd"), "no files"),
    (file("state.more"), "state.more is missing"),
    (entry("tensors", None), "no tensors"),
    (entry("tensors", ["step"]), "no tensors"),
    (without("tensors"), "no tensors"),
    (tensor("int64[]"), "no tensors"),
    (tensor({"shape": []}), "no tensors"),
    (tensor({"shape": 3, "dtype": "int64"}), "no tensors"),
    (tensor({"shape": [-1], "dtype": "int64"}), "no tensors"),
    (tensor({"shape": ["x"], "dtype": "int64"}), "no tensors"),
]


@pytest.fixture
def two(directory: Path) -> tuple[CheckpointStore, Path]:
    """A store with two checkpoints, and the folder of the newer one, whose manifest is going to be another's."""
    store = CheckpointStore(str(directory))
    store.save(1, state_of(1, 2))
    return store, Path(store.save(2, state_of(2, 2)))


def assert_skipped(store: CheckpointStore, folder: Path, named: str, caplog: pytest.LogCaptureFixture) -> None:
    assert store.latest() == 1
    assert len(caplog.messages) == 1
    assert f"Skipping the damaged checkpoint {folder}: " in caplog.messages[0] and named in caplog.messages[0]


@pytest.mark.parametrize(("change", "named"), MANIFESTS)
def test_a_manifest_of_another_kind_is_damaged_or_newer(
    two: tuple[CheckpointStore, Path],
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Manifest], Any],
    named: str,
) -> None:
    store, folder = two
    (folder.parent.parent / "outside").write_bytes((folder / DATA).read_bytes())
    sealed(folder, change(json.loads((folder / "manifest.json").read_text())))
    assert_skipped(store, folder, named, caplog)


@pytest.mark.parametrize("text", [DEEP, f'{{"tensors": {DEEP}}}', '{"step": 1e999999', "\ufeff{}", "9" * 5000, "{}"])
def test_text_that_is_no_manifest_is_damaged(
    two: tuple[CheckpointStore, Path], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    store, folder = two
    (folder / "manifest.json").write_text(text)
    assert_skipped(store, folder, "manifest.json ", caplog)


def link_to_a_copy(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    os.truncate(path, 2**40)  # takes no room


@pytest.mark.parametrize(
    ("name", "make", "named"),
    [
        ("manifest.json", pipe, "manifest.json is not a file"),
        ("manifest.json", device, "manifest.json is not a file"),
        ("manifest.json", huge, "manifest.json has 1099511627776 bytes, and at most"),
        (DATA, link_to_a_copy, f"{DATA} is a link"),
        (DATA, pipe, f"{DATA} is not a file"),
        ("state.data-00001-of-00002", os.mkfifo, "'state.data-00001-of-00002' is not in the manifest"),
    ],
)
def test_links_pipes_and_devices_are_not_opened(
    two: tuple[CheckpointStore, Path],
    caplog: pytest.LogCaptureFixture,
    name: str,
    make: Callable[[Path], None],
    named: str,
) -> None:
    store, folder = two
    make(folder / name)
    assert_skipped(store, folder, named, caplog)


def test_a_newer_version_may_record_more_in_the_same_format(two: tuple[CheckpointStore, Path]) -> None:
    store, folder = two
    whole = json.loads((folder / "manifest.json").read_text())
    sealed(folder, {**whole, "run": None, "host": {"name": "one"}})
    assert store.latest() == 2
    assert_same_bits(store.read(2), state_of(2, 2))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint, for many manifests."""
    return Path(CheckpointStore(str(tmp_path_factory.mktemp("kept") / "checkpoints")).save(1, state_of(1, 2)))


@settings(max_examples=300)
@given(data=st.data())
def test_whatever_stands_in_a_manifest_ends_in_words(kept: Path, data: st.DataObject) -> None:
    """Any value in the place of any other, at any depth: the checkpoint is whole, or a message says what it is."""
    found = kept.with_name("manifest.found")
    if not found.exists():
        shutil.copy(kept / "manifest.json", found)
    whole = json.loads(found.read_text())
    place: Any = whole
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[data.draw(st.just(key) | st.text())] = data.draw(JSON)
    sealed(kept, whole)
    store = CheckpointStore(str(kept.parent), keep_every_hours=1.0, run={"seed": 1})
    is_whole = find_damage(kept) is None
    assert store.steps() == [1] or not is_whole
    for use in (store.read, lambda step: store.check_compatible(step, {"step": ((), "int64")})):
        with contextlib.suppress(CheckpointReadError, UsageError):
            use(1)


@pytest.mark.parametrize("text", ["[]", "3", '{"step": 1e400, "metric": "m", "value": 1}', DEEP, '{"step": []}'])
def test_a_record_of_the_best_that_is_none_is_no_best(directory: Path, text: str) -> None:
    store = CheckpointStore(str(directory))
    store.save(1, state_of(1, 2))
    (directory / "best.json").write_text(text)
    assert store.best() is None


@pytest.mark.parametrize("text", ["3", "[3]", '[{"left_out": [1]}]', '[{"left_out": [1e400, 2]}]', DEEP, "[{}]"])
def test_a_record_of_rewinds_that_is_none_is_damaged(directory: Path, text: str) -> None:
    directory.mkdir()
    (directory / "rewinds.json").write_text(text)
    with pytest.raises(CheckpointReadError, match=r"rewinds\.json is damaged"):
        CheckpointStore(str(directory)).rewinds()


CLAIMS = """
import resource, sys
from launcher.checkpoints import CheckpointReadError, CheckpointStore
import tensorflow  # takes address space of its own
resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30,) * 2)
try:
    CheckpointStore(sys.argv[1]).read(1)
except CheckpointReadError as error:
    print(error)
"""


def test_no_memory_is_taken_for_a_tensor_that_is_not_there(
    directory: Path, tmp_path: Path, run_launcher: Callable[..., Any]
) -> None:
    folder = Path(CheckpointStore(str(directory)).save(1, state_of(1, 2)))
    whole = json.loads((folder / "manifest.json").read_text())
    sealed(folder, tensor({"shape": [2**40], "dtype": "int64"})(whole))
    (tmp_path / "claims.py").write_text(CLAIMS)
    ended = run_launcher(str(directory), module="claims")
    assert "step has the shape (), its manifest says (1099511627776,)" in ended.stdout
