"""What a compiled step needs is held against what a device offers before it is run."""

from __future__ import annotations

import types

import pytest

from launcher.errors import UsageError
from launcher.run import memory_trial
from launcher.step_program import device_memory
from launcher.step_program.lowering import Argument

ROW, STATE = 400, 1000  # bytes of an example of the batch, and of the weights


def judge(rows, microbatches, temporary_of_row, offered, replicas=1):
    """Of a step that keeps so many bytes for each row of a microbatch."""
    program = types.SimpleNamespace(
        arguments=[
            Argument(name="image", shape=(rows, 100), dtype="float32", kind="batch"),
            Argument(name="weight", shape=(250,), dtype="float32", kind="variable"),
        ],
        num_replicas=replicas,
    )
    statistics = types.SimpleNamespace(
        argument_size_in_bytes=rows * ROW + STATE,
        output_size_in_bytes=STATE + 8,
        alias_size_in_bytes=STATE,
        temp_size_in_bytes=rows // microbatches * temporary_of_row,
    )
    device_memory.check(program, microbatches, offered, statistics)


def test_what_fits_is_run_and_so_is_what_cannot_be_judged():
    judge(64, 1, 10_000, 64 * (ROW + 10_000) + STATE + 8)
    judge(64, 1, 10_000, 0)
    device_memory.check(None, 1, 1, None)


def test_what_does_not_fit_is_refused_with_both_figures_and_settings_that_fit():
    offered = 200_000
    with pytest.raises(UsageError, match=r"needs 651 KiB .* JAX has 195 KiB") as refused:
        judge(64, 1, 10_000, offered)
    assert "train.microbatches = 4 or train.global_batch_size = 19 may fit" in str(refused.value)
    assert memory_trial._OUT_OF_MEMORY.search(str(refused.value)), "a trial of 'auto' goes on to the next setting"
    judge(64, 4, 10_000, offered)
    judge(19, 1, 10_000, offered)
    with pytest.raises(UsageError, match=r"train.global_batch_size = 4 may fit"):  # of two replicas
        judge(64, 1, 10_000, 25_000, replicas=2)


def test_of_a_state_that_is_too_large_alone_sharing_it_out_is_offered():
    with pytest.raises(UsageError, match=r"train.shard divides the state"):
        judge(1, 1, 10, 900)
