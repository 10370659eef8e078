"""What is counted in the compiler's optimised programs, against counts made by hand and XLA's own."""

from __future__ import annotations

import itertools

import hlo_text
import pytest
from cases import repeated_but
from hypothesis import given
from hypothesis import strategies as st
from toy_step import convolution_step, dense_step, looped_product, part_of_a_sum, stored_states

from launcher.preflight import advice, roofline, slices
from launcher.preflight.compiled import costs, hbm, hlo
from launcher.preflight.compiled.costs import valid_positions

pytestmark = pytest.mark.slow


@given(
    size=st.integers(1, 9),
    kernel=st.integers(1, 5),
    output=st.integers(1, 9),
    stride=st.integers(1, 3),
    low=st.integers(-2, 4),
    base_dilation=st.integers(1, 3),
    window_dilation=st.integers(1, 3),
)
def test_valid_positions_are_those_where_a_kernel_meets_an_input(**axis):
    expected = 0
    for out, place in itertools.product(range(axis["output"]), range(axis["kernel"])):
        at = out * axis["stride"] + place * axis["window_dilation"] - axis["low"]
        expected += at % axis["base_dilation"] == 0 and 0 <= at // axis["base_dilation"] < axis["size"]
    assert valid_positions(**axis) == expected


def test_a_dense_step_costs_what_its_formulas_say(compiled):
    batch, features, units, replicas = 512, 2048, 512, 4
    text = dense_step(replicas, batch=batch, features=features, units=units)
    found = compiled(text, "v5litepod-4")
    counted = costs.count(hlo.parse(found.hlo))
    assert counted.flops == 2 * (2 * batch * features * units)  # the product, and the gradient of its weights
    (reduction,) = counted.collectives
    assert (reduction.kind, reduction.times, reduction.dtypes) == ("all-reduce", 1, ("f32",))
    assert reduction.bytes == 4 * features * units
    # Elementwise work is all that XLA's own count has beyond.
    assert counted.flops <= found.cost["flops"] <= 1.02 * counted.flops
    # At the least, the batch is read, and the weights are read and written.
    assert counted.hbm_bytes >= 2 * batch * features + 2 * 4 * features * units
    assert not counted.host_transfers
    assert not counted.dynamic
    assert sum(one.cycles or 0 for one in counted.operations) > 0


def test_a_sum_of_which_each_replica_keeps_a_part_is_one_reduce_scatter(compiled):
    counted = costs.count(hlo.parse(compiled(part_of_a_sum(4, rows=1024, columns=512), "v5litepod-4").hlo))
    (reduction,) = counted.collectives
    assert (reduction.kind, reduction.times, reduction.bytes) == ("reduce-scatter", 1, 4 * 1024 * 512)
    assert not counted.unestimated


CONVOLUTIONS = [(3, 1, 32), (3, 2, 16), (7, 2, 3), (1, 1, 64)]


@pytest.mark.parametrize(("kernel", "stride", "channels"), repeated_but([(3, 2, 16)], CONVOLUTIONS))
def test_a_convolution_is_counted_without_the_padding_of_its_image(compiled, kernel, stride, channels):
    image, filters, batch = 28, 48, 4
    text = convolution_step(image=image, channels=channels, filters=filters, kernel=kernel, stride=stride, batch=batch)
    found = compiled(text, "v5litepod-1")
    out = -(-image // stride)
    low = max((out - 1) * stride + kernel - image, 0) // 2
    hits = sum(0 <= o * stride + k - low < image for o in range(out) for k in range(kernel))  # along one axis
    useful = 2 * batch * channels * filters * hits**2
    counted = costs.count(hlo.parse(found.hlo)).flops
    # The compiler rounds a size of 28 up to 32 where it likes that better; XLA counts what it then does as we do.
    assert useful <= counted <= useful * (32 / 28) ** 2 * 1.05
    assert counted <= found.cost["flops"] <= 1.1 * counted  # elementwise work is all that XLA's count has beyond


def test_a_loop_counts_as_often_as_it_turns(compiled):
    once = 2 * 512**3
    found = compiled(looped_product(7), "v5litepod-1")
    counted = costs.count(hlo.parse(found.hlo))
    assert counted.flops == 7 * once
    assert counted.unknown_loops == 0


@pytest.mark.parametrize("where", ["v5litepod-1", "h100:1"])
def test_a_loop_that_stores_writes_in_a_turn_the_parts_of_the_turn_alone(compiled, where):
    turns, rows, columns = 32, 1024, 1024
    one = 4 * rows * columns
    counted = costs.count(hlo.parse(compiled(stored_states(turns, rows=rows, columns=columns), where).hlo))
    least = turns * (1 + 2) * one  # in every turn an input is read, and two results are written
    # Zeros stand there before; a GPU makes each result in a kernel of its own, which all read input and state.
    assert least <= counted.hbm_bytes <= 4 * least


def test_a_product_of_odd_sizes_fills_only_a_part_of_the_matrix_unit():
    one = costs.MatrixOp(
        source=hlo.OpSource(), flops=1000.0, contracted=64, columns=192, rows=4, dtypes=("bf16", "bf16")
    )
    assert one.padded_flops(128) == 1000.0 * (128 / 64) * (256 / 192) * (8 / 4)
    exact = costs.MatrixOp(
        source=hlo.OpSource(), flops=1000.0, contracted=256, columns=128, rows=8, dtypes=("bf16", "bf16")
    )
    assert exact.padded_flops(128) == 1000.0


@pytest.mark.parametrize(
    ("text", "logical", "padded"),
    [
        ("bf16[64,56,56,64]{0,3,2,1:T(8,128)(2,1)}", 2 * 64**2 * 56**2, 2 * 128 * 64 * 56**2),
        ("f32[1000,512]{1,0:T(8,128)}", 4 * 1000 * 512, 4 * 1000 * 512),
        ("f32[1001,500]{1,0:T(8,128)S(1)}", 4 * 1001 * 500, 4 * 1008 * 512),
        ("f32[]{:T(128)}", 4, 4),
        ("f32[10]{0:T(128)}", 40, 512),
        ("pred[5,3]{1,0}", 15, 15),
    ],
)
def test_padding_follows_from_the_layout(text, logical, padded):
    array = hlo_text.array(text)
    assert (array.bytes, array.padded_bytes) == (logical, padded)


def test_every_byte_of_hbm_is_accounted_for(compiled):
    found = compiled(dense_step(4, batch=2**18, features=1024), "v5litepod-4")
    module = hlo.parse(found.hlo)
    counted = hbm.account(
        found, module, argument_names=["batch/x", "model/w"], result_names=["loss", "model/w"], available=15.75 * 2**30
    )
    assert counted.fits
    assert counted.needed == counted.arguments + counted.outputs + counted.temporaries + counted.code
    buffers = {buffer.name: buffer for buffer in counted.buffers}
    assert buffers["batch/x"].bytes == 2 * 2**18 * 1024
    assert buffers["model/w"].bytes == 4 * 1024 * 512
    # What the forward product leaves for the backward one is live at the peak and is named after its operation.
    assert any(one.kind == "temporary" and "dense/MatMul" in one.where for one in counted.buffers)


def test_a_refused_program_names_its_biggest_buffers(compiled):
    found = compiled(dense_step(4, batch=2**19, features=120_000), "v5litepod-4")
    counted = hbm.account(
        found, None, argument_names=["batch/x", "model/w"], result_names=["loss", "model/w"], available=0
    )
    assert not counted.fits
    assert counted.excess == counted.needed - counted.available > 0
    assert counted.buffers[0].name == "batch/x"
    assert counted.buffers[0].bytes == 2 * 2**19 * 120_000


def test_the_roofline_is_the_longest_of_three_quotients():
    where = slices.find("v5litepod-256")  # 197 TFLOP/s, 819 GB/s, four links of 50 GB/s
    found = costs.Costs(
        flops=1.97e12, hbm_bytes=int(8.19e9), matrix_ops=(), host_transfers=(), dynamic=(), unknown_loops=0,
        collectives=(
            costs.Collective(kind="all-reduce", bytes=10**9, times=2, dtypes=("f32",), source=hlo.OpSource()),
        ),
    )  # fmt: skip
    bounds = roofline.estimate(found, where, global_batch_size=512, tokens_per_example=100.0, steps=3600)
    ici = 2 * 2 * 1e9 * 255 / 256 / 200e9
    assert bounds.compute_seconds == pytest.approx(0.01)
    assert bounds.hbm_seconds == pytest.approx(0.01)
    assert bounds.wire_seconds == pytest.approx(ici)
    assert (bounds.bound_by, bounds.step_seconds) == ("ICI", pytest.approx(ici))
    assert bounds.mfu == bounds.hfu == pytest.approx(0.01 / ici)
    assert bounds.examples_per_second == pytest.approx(512 / ici)
    assert bounds.tokens_per_second == pytest.approx(51200 / ici)
    assert bounds.hours == pytest.approx(ici)


def test_the_compilers_estimate_is_the_step_and_names_what_fills_neither_memory_nor_matrix_unit():
    where = slices.find("v5litepod-256")
    second = where.clock

    def operation(**given):
        return costs.Operation(**{"source": hlo.OpSource(), "opcode": "fusion", "flops": 0, "hbm_bytes": 0, **given})

    reduction = costs.Collective(
        kind="all-reduce", bytes=16, times=1, dtypes=("f32",), source=hlo.OpSource("norm/Mean")
    )
    found = costs.Costs(
        flops=1.97e12, hbm_bytes=int(8.19e9), matrix_ops=(), host_transfers=(), dynamic=(), unknown_loops=0,
        operations=(
            operation(cycles=round(0.015 * second), flops=1.97e12),
            operation(cycles=round(0.04 * second), hbm_bytes=int(8.19e8), source=hlo.OpSource("layer/Tanh")),
            operation(cycles=None, hbm_bytes=int(7.371e9)),
        ),
        collectives=(reduction,) * 104,
    )  # fmt: skip
    given = {"global_batch_size": 512, "tokens_per_example": None, "steps": 3600}
    bounds = roofline.estimate(found, where, **given, model_flops=1.5e12)
    # Both axes of 16 chips are rings: eight hops along each, there and back.
    latency = 104 * 2 * (8 + 8) * 1e-6
    parts = {"compute": 0.015, "vector unit": 0.04, "HBM": 0.009, "ICI": latency}
    assert bounds.estimated == pytest.approx(parts, rel=1e-3)
    assert (bounds.bound_by, bounds.most_for, bounds.step_seconds) == ("compute", "vector unit", pytest.approx(0.01))
    total = sum(parts.values())
    assert bounds.estimated_seconds == pytest.approx(total, rel=1e-3)
    assert bounds.examples_per_second == pytest.approx(512 / total, rel=1e-3)
    # What is computed again is no part of MFU.
    assert bounds.mfu == pytest.approx(1.5e12 / 197e12 / total, rel=1e-3)
    assert bounds.hfu == pytest.approx(1.97e12 / 197e12 / total, rel=1e-3)
    held = hbm.HbmUse(available=1, needed=0, arguments=0, outputs=0, temporaries=0, code=0, fits=True, buffers=())
    said = advice.advise(found, held, where, policy="mixed_bfloat16", bounds=bounds)
    assert any("104 small collectives" in line and "norm/Mean" in line and "3.33 ms a step" in line for line in said)


def test_one_chip_has_nobody_to_exchange_with_and_cores_of_a_chip_share_its_peaks():
    reduction = costs.Collective(kind="all-reduce", bytes=10**9, times=1, dtypes=("f32",), source=hlo.OpSource())
    assert slices.find("v5litepod-1").link_seconds(reduction) == 0
    chip = slices.find("v3-8").chip
    assert chip.device_peak_flops == pytest.approx(123e12 / 2)
    assert chip.device_hbm_bandwidth == pytest.approx(900e9 / 2)


def test_hbm_traffic_leaves_out_what_stays_on_the_chip_and_what_a_slice_does_not_take():
    text = """HloModule m

%taking (t: f32[1024,128], i: s32[]) -> f32[8,128] {
  %t = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %row = f32[8,128]{1,0:T(8,128)} dynamic-slice(%t, %i, %zero), dynamic_slice_sizes={8,128}
}

%taking_inside (t: f32[1024,128], i: s32[]) -> f32[8,128] {
  %t = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %row = f32[8,128]{1,0:T(8,128)} fusion(%t, %i), kind=kLoop, calls=%taking
  ROOT %twice = f32[8,128]{1,0:T(8,128)} add(%row, %row)
}

ENTRY %main (table: f32[1024,128], i: s32[]) -> (f32[8,128], f32[8,128]) {
  %table = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %start = ((f32[1024,128]{1,0:T(8,128)}), f32[16,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%table), \
slice={[0:16], [0:128]}
  %done = f32[16,128]{1,0:T(8,128)S(1)} slice-done(%start)
  %onchip = f32[16,128]{1,0:T(8,128)S(1)} add(%done, %done)
  %back = (f32[16,128]{1,0:T(8,128)}, f32[16,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%onchip)
  %kept = f32[16,128]{1,0:T(8,128)} copy-done(%back)
  %rows = f32[8,128]{1,0:T(8,128)} fusion(%table, %i), kind=kLoop, calls=%taking
  %twice = f32[8,128]{1,0:T(8,128)} fusion(%table, %i), kind=kOutput, calls=%taking_inside
  ROOT %both = (f32[8,128], f32[8,128]) tuple(%rows, %twice)
}
"""
    row = 4 * 128
    read = 16 * row + 2 * 8 * row  # the slice, and the rows that the fusions take of the table
    written = 16 * row + 2 * 8 * row  # the copy back, and the fusions' results
    assert costs.count(hlo_text.parse(text)).hbm_bytes == read + written


def test_hbm_traffic_of_updates_in_place_is_the_parts_alone_and_of_a_copy_into_a_new_array_all_of_it():
    text = """HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %c = f32[]{:T(128)} add(%a, %b)
}

%in_place (t: f32[1024,128], rows: f32[8,128], i: s32[]) -> f32[1024,128] {
  %t = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %rows = f32[8,128]{1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %updated = f32[1024,128]{1,0:T(8,128)} dynamic-update-slice(%t, %rows, %i, %zero)
}

%added_in_place (t: f32[1024,128], rows: f32[8,128], i: s32[]) -> f32[1024,128] {
  %t = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %rows = f32[8,128]{1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %there = f32[8,128]{1,0:T(8,128)} dynamic-slice(%t, %i, %zero), dynamic_slice_sizes={8,128}
  %sum = f32[8,128]{1,0:T(8,128)} add(%there, %rows)
  ROOT %updated = f32[1024,128]{1,0:T(8,128)} dynamic-update-slice(%t, %sum, %i, %zero)
}

%several_in_place (t: f32[1024,128], u: f32[1,1024,128], rows: f32[8,128], i: s32[]) -> (f32[1024,128], f32[8,128], \
f32[1024,128]) {
  %t = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %u = f32[1,1024,128]{2,1,0:T(8,128)} parameter(1)
  %rows = f32[8,128]{1,0:T(8,128)} parameter(2)
  %i = s32[]{:T(128)} parameter(3)
  %zero = s32[]{:T(128)} constant(0)
  %u_2 = f32[1024,128]{1,0:T(8,128)} bitcast(%u)
  %first = f32[1024,128]{1,0:T(8,128)} dynamic-update-slice(%t, %rows, %i, %zero)
  %second = f32[1024,128]{1,0:T(8,128)} dynamic-update-slice(%u_2, %rows, %zero, %zero)
  %third = f32[1024,128]{1,0:T(8,128)} dynamic-update-slice(%second, %rows, %i, %zero)
  %twice = f32[8,128]{1,0:T(8,128)} add(%rows, %rows)
  ROOT %all = (f32[1024,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}, f32[1024,128]{1,0:T(8,128)}) \
tuple(%first, %twice, %third)
}

%scattered (t: f32[1024,128], i: s32[8,1], rows: f32[8,128]) -> f32[1024,128] {
  %t = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %i = s32[8,1]{1,0:T(8,128)S(1)} parameter(1)
  %rows = f32[8,128]{1,0:T(8,128)} parameter(2)
  ROOT %added = f32[1024,128]{1,0:T(8,128)} scatter(%t, %i, %rows), update_window_dims={1}, inserted_window_dims={0}, \
scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%sum
}

%into_a_new_one (rows: f32[8,128], i: s32[]) -> f32[16,128] {
  %rows = f32[8,128]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %nothing = f32[]{:T(128)} constant(0)
  %empty = f32[16,128]{1,0:T(8,128)} broadcast(%nothing), dimensions={}
  %zero = s32[]{:T(128)} constant(0)
  ROOT %filled = f32[16,128]{1,0:T(8,128)} dynamic-update-slice(%empty, %rows, %i, %zero)
}

ENTRY %main (table: f32[1024,128], other: f32[1,1024,128], rows: f32[8,128], i: s32[]) -> (f32[1024,128], f32[16,128]) {
  %table = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %other = f32[1,1024,128]{2,1,0:T(8,128)} parameter(1)
  %rows = f32[8,128]{1,0:T(8,128)} parameter(2)
  %i = s32[]{:T(128)S(6)} parameter(3)
  %updated = f32[1024,128]{1,0:T(8,128)} fusion(%table, %rows, %i), kind=kLoop, calls=%in_place
  %filled = f32[16,128]{1,0:T(8,128)} fusion(%rows, %i), kind=kLoop, calls=%into_a_new_one
  %added = f32[1024,128]{1,0:T(8,128)} fusion(%updated, %rows, %i), kind=kLoop, calls=%added_in_place
  %several = (f32[1024,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}, f32[1024,128]{1,0:T(8,128)}) \
fusion(%added, %other, %rows, %i), kind=kLoop, calls=%several_in_place
  %first = f32[1024,128]{1,0:T(8,128)} get-tuple-element(%several), index=0
  %places = s32[8,1]{1,0:T(8,128)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %memory = f32[1024,128]{1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %scattered = f32[1024,128]{1,0:T(8,128)} fusion(%first, %places, %rows), kind=kCustom, calls=%scattered
  ROOT %out = (f32[1024,128], f32[16,128]) tuple(%scattered, %filled)
}
"""
    row = 4 * 128
    in_place = 8 * row + 8 * row  # reads the rows and writes them
    into_a_new_one = 8 * row + 16 * row
    added_in_place = in_place + 8 * row  # what is there is read as well
    several = 8 * row + 3 * 8 * row  # one of its results stays on the chip
    scattered = added_in_place
    expected = in_place + into_a_new_one + added_in_place + several + scattered
    assert costs.count(hlo_text.parse(text)).hbm_bytes == expected


CHAIN = """
HloModule chain, is_scheduled=true

%first (part: bf16[2,8]) -> bf16[16,8] {
  %part = bf16[2,8]{1,0} parameter(0)
  ROOT %gather.1 = bf16[16,8]{1,0} all-gather(%part), dimensions={0}, frontend_attributes={chain_id="3"}
}

%next (held: bf16[2,8]) -> bf16[16,8] {
  %held = bf16[2,8]{1,0} parameter(0)
  ROOT %gather.2 = bf16[16,8]{1,0} all-gather(%held), dimensions={0}, frontend_attributes={chain_id="3"}
}

ENTRY %main (given: bf16[2,8]) -> bf16[16,8] {
  %given = bf16[2,8]{1,0} parameter(0)
  %begun = bf16[16,8]{1,0} fusion(%given), kind=kCustom, calls=%first
  ROOT %done = bf16[16,8]{1,0} fusion(%given), kind=kCustom, calls=%next
}
"""


def test_a_custom_call_that_is_no_known_kernel_is_counted_by_what_it_writes_and_by_what_it_calls():
    text = """HloModule m

%looked_up (t: f32[1024,128], i: s32[]) -> f32[8,128] {
  %t = f32[1024,128]{1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  %zero = s32[]{:S(6)} constant(0)
  ROOT %rows = f32[8,128]{1,0} dynamic-slice(%t, %i, %zero), dynamic_slice_sizes={8,128}
}

ENTRY %main (table: f32[1024,128], i: s32[]) -> (f32[8,128], f32[8,128]) {
  %table = f32[1024,128]{1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  %rows = f32[8,128]{1,0} custom-call(%table, %i), custom_call_target="elsewhere", called_computations={%looked_up}
  %own = f32[8,128]{1,0} custom-call(%table, %i), custom_call_target="unknown"
  ROOT %both = (f32[8,128]{1,0}, f32[8,128]{1,0}) tuple(%rows, %own)
}
"""
    rows = 4 * 8 * 128
    assert costs.count(hlo_text.parse(text)).hbm_bytes == 2 * rows + rows


def test_a_collective_that_moves_on_in_several_fusions_counts_once():
    (gather,) = costs.count(hlo_text.parse(CHAIN)).collectives
    assert (gather.kind, gather.times, gather.bytes, gather.results) == ("all-gather", 1, 256, 256)
