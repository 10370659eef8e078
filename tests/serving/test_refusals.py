"""What predict and export refuse, in one message, before anything is made."""

from __future__ import annotations

import json

import pytest
import text_run

from launcher import main as entry


@pytest.fixture
def flags(tmp_path, monkeypatch):
    text_run.write_pairs(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    bindings = [f"--gin_param={binding}" for binding in text_run.pair_bindings(tmp_path)]
    return ["launcher", "--gin_file=transformer_cpu.gin", f"--model_dir={tmp_path}/run", *bindings]


def refused(capsys, *flags):
    assert entry.main(list(flags)) == 64
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and not out, err
    return err


@pytest.mark.parametrize("mode", ["predict", "export"])
def test_without_a_checkpoint(mode, flags, capsys, tmp_path):
    (tmp_path / "lines").write_text("abc\n")
    more = [f"--input={tmp_path}/lines"] if mode == "predict" else []
    assert "no checkpoint in" in refused(capsys, *flags, f"--mode={mode}", *more)
    assert not (tmp_path / "run").exists()


def test_an_input_that_is_not_there(flags, capsys, tmp_path):
    assert "--input=nowhere cannot be read" in refused(capsys, *flags, "--mode=predict", "--input=nowhere")


def test_an_output_in_no_folder(flags, capsys, tmp_path):
    said = refused(capsys, *flags, "--mode=predict", f"--output={tmp_path}/no/answers")
    assert "its folder does not exist" in said


def test_flags_of_another_mode(flags, capsys):
    assert "--input is for --mode=predict" in refused(capsys, *flags, "--input=lines")
    assert "--export_dir is for --mode=export" in refused(capsys, *flags, "--mode=predict", "--export_dir=here")


def test_an_export_into_a_folder_that_is_full(flags, capsys, tmp_path):
    said = refused(capsys, *flags, "--mode=export", f"--export_dir={tmp_path}")
    assert "is not an empty folder" in said


def test_an_export_from_several_replicas(flags, capsys):
    said = refused(capsys, *flags, "--mode=export", "--strategy=mirrored", "--replicas=2")
    assert "in one process on one device" in said


def test_a_prediction_among_several_workers(flags, capsys, tmp_path, monkeypatch):
    (tmp_path / "lines").write_text("abc\n")
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    said = refused(capsys, *flags, "--mode=predict", f"--input={tmp_path}/lines", "--strategy=multi_worker")
    assert "in one process, and here are 2" in said


def test_a_task_that_reads_no_lines(capsys, tmp_path):
    flags = ("launcher", "--gin_file=resnet_cpu.gin", f"--model_dir={tmp_path}/run", "--mode=predict")
    assert "ImageClassification takes no lines" in refused(capsys, *flags)
