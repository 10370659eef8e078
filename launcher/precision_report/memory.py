"""Memory of a training step under each policy, from the tensors of a model that is there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from launcher.step.precision import POLICIES
from launcher.watch.gradient_taps import Output

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one replica in one microbatch.

    An estimate: every leaf layer's output is taken to be kept until its backward pass. Tensors between layers (the
    products of an attention, casts) come on top; what the compiler fuses or computes again comes off.

    Attributes:
      policy: dtype policy.
      activations: outputs of the leaf layers.
      weights: in float32, and their casts for the step in 16 bits.
      gradients: in float32, and as they are sent.
      slots: of the optimizer, and averages of the weights.
      largest_batch: examples that fit in what float32 takes for the present batch; None where the outputs do not grow
        with the batch.
    """

    policy: str
    activations: int
    weights: int
    gradients: int
    slots: int
    largest_batch: int | None = None

    @property
    def total(self) -> int:
        return self.activations + self.weights + self.gradients + self.slots


def estimate(
    *,
    wide: Mapping[str, Sequence[Output]],
    narrow: Mapping[str, Sequence[Output]],
    weight_sizes: Sequence[tuple[int, bool]],
    frozen_bytes: int,
    slot_bytes: int,
    examples: int,
) -> list[Memory]:
    """Estimates every policy, float32 first.

    Args:
      wide: outputs of each leaf layer in float32.
      narrow: the same under a 16-bit policy.
      weight_sizes: of each trained variable, its elements and whether its layer computes in 16 bits.
      frozen_bytes: of variables that are not trained.
      slot_bytes: of the optimizer's variables and of averages of weights.
      examples: of one microbatch of one replica, which the outputs are of.
    """
    sizes = [size for size, _ in weight_sizes]
    found: list[Memory] = []
    for policy in POLICIES:
        is_wide = policy == "float32"
        activations = activation_bytes(wide if is_wide else narrow)
        casts = 0 if is_wide else sum(2 * size for size, cast in weight_sizes if cast)
        # float16 also travels; bfloat16 gradients travel as float32 unless bound otherwise.
        sent = 2 * sum(sizes) if policy == "mixed_float16" else 0
        one = Memory(
            policy=policy,
            activations=activations,
            weights=4 * sum(sizes) + frozen_bytes + casts,
            gradients=4 * sum(sizes) + sent,
            slots=slot_bytes,
        )
        limit = found[0].total if found else one.total
        left, each = limit - (one.total - activations), activations / examples
        found.append(dataclasses.replace(one, largest_batch=math.floor(left / each) if each else None))
    return found


def activation_bytes(outputs: Mapping[str, Sequence[Output]]) -> int:
    """Bytes of all outputs; those whose shape is not known count nothing."""
    return sum(_bytes(one) for calls in outputs.values() for one in calls)


def _bytes(output: Output) -> int:
    if any(size is None for size in output.shape):
        return 0
    return math.prod(size or 0 for size in output.shape) * _BYTES[output.dtype]


def variable_bytes(shapes: Iterable[tuple[Sequence[int], str]]) -> int:
    """Bytes of variables, from shapes and dtypes."""
    sizes = {"int64": 8, "uint64": 8, "int32": 4, "uint32": 4, "bool": 1, **_BYTES}
    return sum(math.prod(shape) * sizes.get(dtype, 4) for shape, dtype in shapes)
