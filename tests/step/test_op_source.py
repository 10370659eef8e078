"""Names of operations, as a report shows them."""

from __future__ import annotations

import pytest
import tensorflow as tf
import zoo
from zoo_kinds import in_image

from launcher.errors import UsageError
from launcher.step.op_source import short_name


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


def test_an_operation_that_tensorflow_has_no_gradient_of_is_refused_with_its_layer_and_line():
    kind = in_image(lambda x: tf.image.resize(x, (4, 4), method="area"))
    with pytest.raises(
        UsageError, match=r"no gradient of ResizeArea \(layer 'does' of type Does; \S+test_op_source\.py:\d+"
    ):
        zoo.trained(kind)
