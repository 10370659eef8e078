from __future__ import annotations

import gzip
import http.server
import threading
from concurrent.futures import ThreadPoolExecutor

import name_server
import numpy as np
import pytest
from assembled import global_batches
from places import ROOT
from sources import made

from launcher.data import prepare as prepare_module
from launcher.data.images.image_data import image_data
from launcher.data.prepare import prepare
from launcher.errors import LauncherError, PeerError, UsageError

pytestmark = pytest.mark.slow

FASHION_FILES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


@pytest.fixture
def icons(tmp_path):
    """A folder with the file that launcher_test_icons is made from."""
    folder = tmp_path / "by_hand"
    folder.mkdir()
    np.save(folder / "icons.npy", np.random.default_rng(0).integers(0, 256, (20, 6, 6, 1), dtype=np.uint8))
    return folder


def test_files_of_the_users_own_become_a_set_to_train_on(empty_data_dir, icons):
    said: list[str] = []
    prepare("launcher_test_icons", archives=icons, say=said.append)
    assert said[-1].startswith("done") and "20 train examples" in said[-1]
    data = made(image_data, name="tfds:launcher_test_icons", train_split="train[:15]", eval_split="train[15:]")
    data.check()
    (batch,) = global_batches(data.eval_batches, hosts=1, replicas=1, batch=5, steps=1)
    originals = {icon.tobytes() for icon in np.load(icons / "icons.npy")}
    stored = np.rint((batch["image"] * 0.25 + 0.5) * 255).astype(np.uint8)
    assert {icon.tobytes() for icon in stored} <= originals
    assert (icons / "icons.npy").exists()  # the user's file


def test_what_is_prepared_is_left_alone(photos, photos_dir):
    before = {path: path.stat().st_mtime_ns for path in photos_dir.rglob("*")}
    said: list[str] = []
    prepare(photos, say=said.append)
    assert said == [
        f"launcher_test_photos is prepared already: 37 test, 203 train examples in "
        f"{photos_dir}/launcher_test_photos/1.0.0"
    ]
    assert {path: path.stat().st_mtime_ns for path in photos_dir.rglob("*")} == before


def test_files_needed_by_hand_are_asked_for_before_anything_is_written(empty_data_dir):
    words = r"by hand\. manual_dir should contain icons.npy, drawn by yourself\..*--archives=FOLDER"
    with pytest.raises(UsageError, match=words):
        prepare("launcher_test_icons")
    assert not empty_data_dir.exists()


def test_a_configuration_with_files_of_the_users_is_refused_before_others_are_downloaded(empty_data_dir, monkeypatch):
    monkeypatch.setattr(prepare_module, "_probe", lambda url: pytest.fail(f"asked for {url}"))
    with pytest.raises(UsageError, match=r"cs-en has to be downloaded by hand.*--archives=FOLDER"):
        prepare("wmt14_translate/cs-en")
    assert not empty_data_dir.exists()


def test_a_configuration_without_such_files_is_downloaded(empty_data_dir, monkeypatch):
    monkeypatch.setattr(prepare_module, "_probe", lambda url: "no network")
    with pytest.raises(PeerError, match=r"wmt14_translate/de-en cannot be downloaded.*no network"):
        prepare("wmt14_translate/de-en")


def test_files_still_missing_in_the_users_folder_are_named(empty_data_dir, tmp_path):
    with pytest.raises(UsageError, match=r"(?s)by hand.*icons\.npy"):
        prepare("launcher_test_icons", archives=tmp_path)


@pytest.mark.parametrize("exists", [False, True])
def test_archives_without_the_files_are_refused(empty_data_dir, tmp_path, exists):
    folder = tmp_path if exists else tmp_path / "nowhere"
    with pytest.raises(UsageError, match=f"--archives={folder} must be a folder with .*{FASHION_FILES[0]}"):
        prepare("fashion_mnist", archives=folder)
    assert not empty_data_dir.exists()


def test_archives_that_are_not_the_published_files_are_refused(empty_data_dir, tmp_path):
    for name in FASHION_FILES:
        (tmp_path / name).write_bytes(gzip.compress(b"something else"))
    with pytest.raises(LauncherError, match="wrong checksum") as caught:
        prepare("fashion_mnist", archives=tmp_path)
    assert caught.value.exit_code == 70
    assert not list(empty_data_dir.glob("fashion_mnist/*/dataset_info.json"))


def test_a_folder_that_cannot_be_written_is_named(icons, tfds_builders, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "file" / "data"))
    with pytest.raises(UsageError, match=f"--data_dir={tmp_path}/file/data cannot be written"):
        prepare("launcher_test_icons", archives=icons)


def test_without_network_and_package_the_files_are_named(empty_data_dir, monkeypatch):
    monkeypatch.setattr(prepare_module, "_probe", lambda url: "no route to host")
    with pytest.raises(PeerError, match=r"cifar10 cannot be downloaded.*no route.*cifar-10-binary\.tar\.gz") as caught:
        prepare("cifar10")
    assert caught.value.exit_code == 75
    assert not empty_data_dir.exists()


def test_a_server_is_asked_before_tfds_tries_for_minutes():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response({"/there": 200, "/only-get": 405}.get(self.path, 404))
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert prepare_module._probe(f"{url}/there") is None
            assert prepare_module._probe(f"{url}/only-get") is None
            assert "404" in prepare_module._probe(f"{url}/gone")
        finally:
            server.shutdown()
            thread.join()
    assert "refused" in prepare_module._probe(f"{url}/there")


def test_a_name_server_that_never_answers_holds_nobody(monkeypatch):
    monkeypatch.setattr(prepare_module, "_PROBE_SECONDS", 0.1)
    with ThreadPoolExecutor(1) as pool, name_server.silent("elsewhere") as asked:
        assert pool.submit(prepare_module._probe, "http://elsewhere/there").result(60) == "no name server answers"
        assert asked.is_set()


# ------------------------------------------------------------------------------------------------- the command itself


def _run(run_launcher, *args, **options):
    return run_launcher(*args, module="launcher.data.prepare", **options)


def test_the_command_explains_itself_without_tensorflow(run_launcher, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "tensorflow.py").write_text("raise AssertionError('imported')")
    help_text = _run(run_launcher, "--help", env={"PYTHONPATH": f"{tmp_path / 'first'}:{ROOT}"})
    assert help_text.returncode == 0
    for words in ("fashion_mnist", "--data_dir DIR", "--archives DIR", "Exit codes"):
        assert words in help_text.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["fashion_mist"], "did you mean 'fashion_mnist'"),
        (["qwertyuiop"], "Known here: cifar10, cifar100, digits, fashion_mnist, help_en_de, "),
        ([], "arguments are required: NAME"),
        (["a", "b"], "unrecognized arguments: b"),
        (["fashion_mnist", "--data_dri=x"], "data_dri"),
    ],
)
def test_bad_input_ends_with_64_and_a_message(run_launcher, tmp_path, args, words):
    outcome = _run(run_launcher, *args, env={"TFDS_DATA_DIR": str(tmp_path / "data")})
    assert outcome.returncode == 64
    assert outcome.stderr.startswith("error: ") and words in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not (tmp_path / "data").exists()


def test_digits_need_no_preparation(run_launcher):
    outcome = _run(run_launcher, "digits")
    assert outcome.returncode == 0
    assert "nothing to prepare" in outcome.stdout
