"""`--profile_steps`: a trace in the form that TensorBoard's profiler reads."""

from __future__ import annotations

import pytest
from places import SMALL_DIGITS

from launcher import main as entry

FLAGS = ("launcher", f"--gin_file={SMALL_DIGITS}", "--gin_param=train.steps = 12", "--mode=train")


def test_the_trace_of_some_steps_is_where_tensorboard_looks_for_it(tmp_path, capsys):
    assert entry.main([*FLAGS, f"--model_dir={tmp_path}", "--profile_steps=5:8"]) == 0
    assert "a trace of steps 5 to 8 is in " in capsys.readouterr().out
    (trace,) = (tmp_path / "tensorboard/plugins/profile").glob("*/*.xplane.pb")
    xplane = pytest.importorskip("tensorflow.tsl.profiler.protobuf.xplane_pb2")
    planes = xplane.XSpace.FromString(trace.read_bytes()).planes
    names = [plane.event_metadata[event.metadata_id].name for plane in planes for line in plane.lines
             for event in line.events]  # fmt: skip
    assert any("MatMul" in name for name in names)


@pytest.mark.parametrize("steps", ["8:5", "ten", "1:3", "5:20"])
def test_steps_that_cannot_be_traced_are_refused_before_anything_is_written(steps, tmp_path, capsys):
    said = "give the first and the last step, such as --profile_steps=10:20, from 2 on"
    assert entry.main([*FLAGS, f"--model_dir={tmp_path}/run", f"--profile_steps={steps}"]) == 64
    assert f"error: --profile_steps={steps}: " in (err := capsys.readouterr().err) and said in err
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_modes_that_do_not_train_refuse_the_flag(capsys):
    assert entry.main(["launcher", f"--gin_file={SMALL_DIGITS}", "--mode=eval", "--profile_steps=2:3"]) == 64
    assert "--profile_steps is for --mode=train and train_and_eval, and the mode is eval" in capsys.readouterr().err
