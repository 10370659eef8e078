"""A trace of JAX's, as a GPU gives it: which kernels took most, for the report."""

from __future__ import annotations

import gzip
import json

import pytest

from launcher.reporting import run_folder, sections
from launcher.run.actions import profile


def test_the_kernels_of_the_streams_are_counted_once_and_ranked(tmp_path):
    def name(tid, thread):
        return {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": thread}}

    def took(tid, kernel, microseconds):
        return {"ph": "X", "pid": 1, "tid": tid, "ts": 0, "dur": microseconds, "name": kernel}

    small = [took(2, f"small_{number}", 10) for number in range(12)]
    events = [name(2, "Stream #13(Compute,MemcpyD2D)"), name(3, "Stream #14(MemcpyH2D)"), name(4, "XLA Ops")]
    events += [took(2, "gemm", 3000), took(2, "gemm", 1000), took(3, "MemcpyH2D", 500), took(4, "gemm", 4000), *small]
    for when, found in (("2026_01_01", []), ("2026_01_02", events)):
        folder = tmp_path / "plugins" / "profile" / when
        folder.mkdir(parents=True)
        (folder / "vm.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": found}).encode()))
    ranked = profile.kernels(tmp_path, 2)
    assert ranked[:2] == [("gemm", 2, 2.0), ("MemcpyH2D", 1, 0.25)] and len(ranked) == 10
    assert profile.kernels(tmp_path / "absent", 2) == []
    (tmp_path / "summary.json").write_text(json.dumps({"kernels": ranked}))
    assert "2.000" in sections.kernels(run_folder.read(tmp_path)).body


@pytest.mark.parametrize("event", [{"ph": "X", "name": "gemm"}, {"name": "thread_name", "pid": 1, "tid": 2}])
def test_a_trace_of_another_form_is_named_and_ends_no_run(event, tmp_path):
    folder, notes = tmp_path / "plugins/profile/now", []
    folder.mkdir(parents=True)
    (folder / "vm.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": [event]}).encode()))
    action = profile.ProfileSteps(profile.ProfiledSteps(2, 3), str(tmp_path), notes.append, by_jax=True)
    action._start = action._stop = lambda *_: None  # a trace of this process is of a CPU, and whole
    action.steps_until_due(1)
    action.before_steps()
    action.after_steps(3, None)
    assert action.summary() == {} and "see TensorBoard" in notes[0] and "are not read: KeyError" in notes[1]
