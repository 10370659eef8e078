"""Names of operations, as a report shows them."""

from __future__ import annotations

import pytest

from launcher.step_program.op_source import short_name


@pytest.mark.parametrize(
    ("op_name", "shown"),
    [
        ("resnet50/stem_conv/convolution", "resnet50/stem_conv/convolution"),
        ("gradient_tape/resnet50_1/stem_1/convolution_12", "resnet50/stem/convolution (backward)"),
        ("while/StatefulPartitionedCall/resnet50_1/stem_1/convolution_12", "resnet50/stem/convolution"),
        ("while/StatefulPartitionedCall/gradient_tape/resnet50_1/stem_1/mul", "resnet50/stem/mul (backward)"),
        ("while/add_188", "add"),
    ],
)
def test_a_name_tells_the_layer_and_the_operation_and_not_what_is_around_them(op_name, shown):
    assert short_name(op_name) == shown
