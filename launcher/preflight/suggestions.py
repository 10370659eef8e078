"""What can be turned when a step does not fit, and what turning it is expected to do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import tensorflow as tf

from launcher.errors import UsageError
from launcher.preflight.examine import Case, Finding
from launcher.preflight.slices import SLICES
from launcher.reporting.units import bytes_text
from launcher.run.plan import check_batches
from launcher.step_program.lowering import Argument, for_replicas

# An estimate must leave room: the compiler packs buffers as it can, and keeps some for itself.
_ROOM = 0.9
# Before it gives up, the compiler computes activations again rather than keep them; a step that fits keeps them all.
# ResNet-50 on a v3-8 was given up at 16.7 GiB for 1024 images a replica, and took 9.9 GiB for a quarter of them.
_SQUEEZED = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One change of the command.

    Attributes:
      case: the command with it.
      flag: what to add to the command, or to replace in it.
      why: what it does and costs.
      needed: expected bytes of HBM; None where only the compiler can tell.
    """

    case: Case
    flag: str
    why: str
    needed: float | None

    @property
    def text(self) -> str:
        """For people."""
        expected = f"; about {bytes_text(self.needed)} of HBM expected" if self.needed is not None else ""
        return f"{self.flag}: {self.why}{expected}"


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Bytes of a step by what they grow with."""

    variables: float
    batch: float
    gradients: float
    activations: float

    def with_microbatches(self, factor: float) -> float:
        # Sums of gradients beside the gradients of one microbatch, and the batch cut into parts.
        return self.variables + 2 * self.batch + 2 * self.gradients + self.activations / factor

    def with_batch(self, factor: float) -> float:
        return self.variables + self.gradients + (self.batch + self.activations) * factor


def suggest(finding: Finding) -> list[Suggestion]:
    """Changes that could make a step fit, the one to try first in front.

    Args:
      finding: of a step that does not fit, or that does and whose knobs are to be measured.
    """
    if finding.memory is None:
        return []
    parts = _parts(finding)
    found = [
        *_precision(finding, parts),
        *_microbatches(finding, parts),
        *_rematerialization(finding),
        *_bigger_slice(finding, parts),
        *_smaller_batch(finding, parts),
    ]
    limit = _ROOM * finding.memory.available
    return sorted(found, key=lambda one: one.needed is not None and one.needed > limit)


def _parts(finding: Finding) -> _Parts:
    memory = finding.memory
    assert memory is not None
    variables = sum(_logical_bytes(one) for one in finding.program.arguments if one.kind != "batch")
    batch = max(memory.arguments - variables, sum(_logical_bytes(one) for one in finding.program.arguments) - variables)
    gradients = finding.model.gradient_bytes
    activations = max(0.0, memory.needed - variables - batch - gradients)
    if not memory.fits:
        activations *= _SQUEEZED
    return _Parts(variables, batch, gradients, activations)


def _logical_bytes(argument: Argument) -> int:
    return math.prod(argument.shape) * int(tf.dtypes.as_dtype(argument.dtype).size)


def _precision(finding: Finding, parts: _Parts) -> Iterator[Suggestion]:
    if finding.plan.policy == "float32":
        yield _binding(
            finding,
            "train.precision = 'mixed_bfloat16'",
            "activations of half the size, products at the full speed of the matrix units",
            parts.with_batch(0.5) + parts.batch / 2,
        )


def _microbatches(finding: Finding, parts: _Parts) -> Iterator[Suggestion]:
    """The fewest that are expected to fit."""
    assert finding.memory is not None
    recipe = finding.plan.recipe
    now, per_replica = recipe.microbatches, finding.plan.per_replica_batch_size
    last = None
    for count in range(now + 1, per_replica + 1):
        size, rest = divmod(per_replica, count)
        if rest or any(size % group for group in finding.model.group_sizes):
            continue
        last = (count, parts.with_microbatches(count / now))
        if last[1] <= _ROOM * finding.memory.available:
            break
    if last is not None:
        count, needed = last
        yield _binding(
            finding,
            f"train.microbatches = {count}",
            f"each replica takes its {per_replica} examples in {count} parts and adds up their gradients; the same "
            "training, slower where parts no longer fill the matrix units",
            needed,
        )


def _rematerialization(finding: Finding) -> Iterator[Suggestion]:
    for binding in finding.model.rematerialize:
        yield _binding(
            finding,
            f"{binding} = True",
            "activations inside each block are computed again in the backward pass instead of kept, about a third more "
            "arithmetic",
            None,
        )


def _bigger_slice(finding: Finding, parts: _Parts) -> Iterator[Suggestion]:
    """The smallest slice of the family on which it is expected to fit, the global batch as it is."""
    assert finding.memory is not None
    where = finding.case.where
    for larger in SLICES.values():
        if larger.chip is not where.chip or larger.num_replicas <= where.num_replicas:
            continue
        needed = parts.with_batch(where.num_replicas / larger.num_replicas)
        if needed > _ROOM * finding.memory.available or not _divides(finding, larger.num_replicas):
            continue
        yield Suggestion(
            case=Case(where=larger, changes=finding.case.changes),
            flag=f"--tpu_type={larger.accelerator_type}",
            why=f"the same global batch on {larger.num_replicas} replicas instead of {where.num_replicas}",
            needed=needed,
        )
        return


def _divides(finding: Finding, num_replicas: int) -> bool:
    try:
        plan = for_replicas(finding.plan, num_replicas)
        check_batches(plan)
    except UsageError:
        return False
    return not any(plan.microbatch_size % group for group in finding.model.group_sizes)


def _smaller_batch(finding: Finding, parts: _Parts) -> Iterator[Suggestion]:
    """The largest global batch that is a power of two times the unit, and expected to fit."""
    assert finding.memory is not None
    recipe, replicas = finding.plan.recipe, finding.plan.strategy.num_replicas
    batch = recipe.global_batch_size
    while batch % 2 == 0 and batch // 2 >= replicas * recipe.microbatches:
        batch //= 2
        size = batch // (replicas * recipe.microbatches)
        if batch % (replicas * recipe.microbatches) or any(size % group for group in finding.model.group_sizes):
            return
        needed = parts.with_batch(batch / recipe.global_batch_size)
        if needed <= _ROOM * finding.memory.available:
            yield _binding(
                finding,
                f"train.global_batch_size = {batch}",
                "another training: the learning rate and the steps that go with the batch are yours to change",
                needed,
            )
            return


def _binding(finding: Finding, binding: str, why: str, needed: float | None) -> Suggestion:
    return Suggestion(
        case=Case(where=finding.case.where, changes=(*finding.case.changes, binding)),
        flag=f'--gin_param="{binding}"',
        why=why,
        needed=needed,
    )
