"""XLA's dumps of programs as they are read: all that is in them, or else that something was not read.

In tests/dumps are what jaxlib 0.12.0 made for four H100s of `toy_step.dense_step`, and libtpu 0.0.52 for a v6e of a
table with 100,000 rows of 512 float32, 8,192 of which are looked up and doubled. No compiler is needed to read them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launcher.preflight.compiled import Compilation, costs, gpu_program, hbm, hlo, hlo_protos

DATA = Path(__file__).parent / "dumps"
DENSE, LOOKUP = ((DATA / f"{name}.hlo.pb").read_bytes().decode("latin-1") for name in ("h100_dense", "v6e_lookup"))


def test_a_step_of_the_newest_compiler_for_gpus_is_counted_as_its_formulas_say():
    module = hlo.parse(DENSE)
    assert module.unread == ()
    counted = gpu_program.count(module, None)
    assert counted.flops == 2 * 2 * 256 * 1024 * 512
    (reduction,) = counted.collectives
    # It begins as an asynchronous call of a computation with the reduction.
    assert (reduction.kind, reduction.bytes, reduction.times, reduction.waits) == (
        "all-reduce",
        4 * 1024 * 512,
        1,
        False,
    )
    weights, batch, hidden = 1024 * 512, 256 * 1024, 256 * 512
    moved = (4 + 2) * weights  # rounded to bfloat16
    moved += 2 * batch + 2 * weights + 8 * 4 * hidden  # a product in eight parts, which are summed to two results
    moved += 8 * 4 * hidden + 4 * hidden + 4 * hidden + 2 * hidden + 4 * 256 + 4 * 256 + 4
    moved += 2 * batch + 2 * hidden + 4 * weights  # the gradient
    moved += (2 + 3) * 4 * weights  # its sum over all, and the update
    assert counted.hbm_bytes == moved


def test_memory_is_what_lives_together_at_its_peak():
    found = Compilation(error=None, memory={}, cost={}, hlo=DENSE, seconds=1, cached=False)
    used = hbm.account(found, hlo.parse(DENSE), argument_names=["x", "w"], result_names=["loss", "w"], available=1e9)
    assert (used.arguments, used.temporaries) == (4 * 1024 * 512 + 2 * 256 * 1024, 5243408)
    parts = {"gemm_fusion_dot": 8 * 4 * 256 * 512, "wrapped_convert": 2 * 1024 * 512}
    held = {one.name: one.bytes for one in used.buffers}
    assert held["w"] == 4 * 1024 * 512
    assert {name: held[name] for name in parts} == parts


def test_a_lookup_on_another_core_reads_the_rows_and_not_the_table():
    module = hlo.parse(LOOKUP)
    assert module.unread == ()
    counted = costs.count(module)
    rows, indices = 4 * 8192 * 512, 4 * 8192
    # Read and written by the lookup, and read and written again by the product; and the indices, some on the chip.
    assert 4 * rows < counted.hbm_bytes < 4 * rows + 4 * indices
    assert sum(one.cycles or 0 for one in counted.operations) > 0
    assert counted.unestimated == 1


def changed(how: str) -> str:
    proto = hlo_protos.HloProto()
    proto.ParseFromString(DENSE.encode("latin-1"))
    module = proto.hlo_module
    main = next(one for one in module.computations if one.name == "main.3")
    product = next(one for one in main.instructions if one.name == "gemm_fusion_dot")
    if how == "field":
        product.MergeFromString(b"\xba\x06\x01x")  # number 103, a string
    elif how == "field of a shape":
        product.shape.MergeFromString(b"\xba\x06\x01x")
    elif how == "dtype":
        product.shape.element_type = 999
    elif how == "operand":
        product.operand_ids[0] = 99
    elif how == "computation":
        product.called_computation_ids[0] = 99
    elif how == "result":
        main.root_id = 99
    elif how == "entry":
        module.entry_computation_name = "gone"
    return proto.SerializeToString().decode("latin-1")


CHANGED = [
    ("field", "field 103 of HloInstructionProto of gemm_fusion_dot"),
    ("field of a shape", "field 103 of ShapeProto of gemm_fusion_dot"),
    ("dtype", "the dtype 999 of gemm_fusion_dot"),
    ("operand", "the operand 99 of gemm_fusion_dot"),
    ("computation", "computation 99 of gemm_fusion_dot"),
    ("result", "all of computation main.3"),
    ("entry", "where the program begins"),
]


@pytest.mark.parametrize(("how", "what"), CHANGED)
def test_what_is_not_understood_is_told(how, what):
    assert what in hlo.parse(changed(how)).unread


@pytest.mark.parametrize("place", ["buffer_allocations", "logical_buffers", "heap_simulator_traces", "cut"])
def test_what_is_not_understood_of_memory_is_told(place):
    proto = hlo_protos.HloProto()
    proto.ParseFromString(DENSE.encode("latin-1"))
    if place != "cut":
        getattr(proto.buffer_assignment, place)[0].MergeFromString(b"\xba\x06\x01x")
    content = proto.SerializeToString()[: -1 if place == "cut" else None].decode("latin-1")
    memory = dict.fromkeys(("argument", "output", "alias", "temp", "generated_code"), 1)  # as a TPU's compiler tells
    found = Compilation(error=None, memory=memory, cost={}, hlo=DENSE, buffers=content, seconds=1, cached=False)
    names = {"argument_names": ["x", "w"], "result_names": ["loss", "w"], "available": 1e9}
    (told,) = hbm.account(found, hlo.parse(DENSE), **names).unread
    assert told.startswith("the whole of it" if place == "cut" else "field 103 of ")
    assert hbm.account(dataclasses.replace(found, buffers=""), hlo.parse(DENSE), **names).unread == ()


@pytest.mark.parametrize("cut", [0, 1, 1000, -1000])
def test_a_dump_that_is_cut_off_is_not_taken_for_a_program(cut):
    assert hlo.parse(DENSE[:cut]).unread
