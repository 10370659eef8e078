"""Names that TensorFlow gives operations, as people should read them."""

from __future__ import annotations

import re

# Around what stands in the loop over microbatches.
_AROUND = re.compile(r"^(?:while(?:/body)?(?:/_\d+)?/|(?:Stateful)?PartitionedCall(?:_\d+)?/)+")
_GRADIENT = ("gradient_tape/", "gradients/")
# A layer that is called again gets its name with a number; the step calls each for the second time.
_CALLED_AGAIN = re.compile(r"_1(?=/)")
_COUNTER = re.compile(r"_\d+$")


def short_name(op_name: str) -> str:
    """The layer's path without the counters of calls, "(backward)" behind what only the backward pass computes.

    "gradient_tape/resnet50_1/stem_1/convolution_12" gives "resnet50/stem/convolution (backward)".
    """
    path, _, _ = op_name.partition(" at ")
    path = _AROUND.sub("", path)
    backward = any(part in path for part in _GRADIENT)
    for part in _GRADIENT:
        path = path.replace(part, "")
    path = _COUNTER.sub("", _CALLED_AGAIN.sub("", path))
    return f"{path} (backward)" if backward and path else path
