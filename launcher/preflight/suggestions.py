"""Suggestions: changes of the command that could make a step fit, each to be compiled before it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from launcher.errors import UsageError
from launcher.machine.strategy import recommended_policy
from launcher.preflight.slice_finding import Case, SliceFinding
from launcher.run.plan import check_batches
from launcher.step_program.lowering import for_replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One change of the command.

    Attributes:
      case: the command with it.
      flag: what to add to the command, or to replace in it.
      why: what it does and costs.
    """

    case: Case
    flag: str
    why: str


def knobs(finding: SliceFinding) -> Iterator[Iterator[Suggestion]]:
    """What can be turned to make a step fit, the one to try first in front.

    Args:
      finding: of a step that does not fit, or that does and whose knobs are to be measured.

    Returns:
      For each knob its settings, from the least change on; each next one at least doubles the change.
    """
    if finding.hbm is not None:
        yield _precision(finding)
        yield _shared_state(finding)
        yield _microbatches(finding)
        yield _rematerialization(finding)
        yield _more_devices(finding)
        yield _smaller_batch(finding)


def _least(finding: SliceFinding) -> float:
    """The factor by which replicas must at least multiply: no part shrinks more than in proportion."""
    assert finding.hbm is not None
    return 1.0 if finding.fits else finding.hbm.needed / finding.hbm.available


def _precision(finding: SliceFinding) -> Iterator[Suggestion]:
    if finding.plan.policy == "float32":
        half, _ = recommended_policy(finding.plan.strategy)
        yield _binding(
            finding,
            f"train.precision = {half!r}",
            "activations of half the size, products at the full speed of the matrix units",
        )


def _shared_state(finding: SliceFinding) -> Iterator[Suggestion]:
    """The optimizer's state shared out, where so much of it leaves each device that the step could fit."""
    assert finding.hbm is not None
    shared, replicas = finding.model.shareable_bytes, finding.plan.strategy.num_replicas
    if replicas > 1 and shared and shared * (1 - 1 / replicas) >= finding.hbm.excess:
        yield _binding(
            finding,
            "train.shard_optimizer = True",
            "each replica keeps the optimizer's state of its part of the weights alone; the same training, with one "
            "more collective",
        )


def _microbatches(finding: SliceFinding) -> Iterator[Suggestion]:
    assert finding.hbm is not None
    now, per_replica = finding.plan.microbatches, finding.plan.per_replica_batch_size
    last = now
    for count in range(now + 1, per_replica + 1):
        size, rest = divmod(per_replica, count)
        if count < max(2 * last, now * finding.hbm.least_parts) or rest or not in_groups(finding, size):
            continue
        last = count
        yield _binding(
            finding,
            f"train.microbatches = {count}",
            f"each replica takes its {per_replica} examples in {count} parts and adds up their gradients; the same "
            "training, slower where parts no longer fill the matrix units",
        )


def _rematerialization(finding: SliceFinding) -> Iterator[Suggestion]:
    if finding.model.keeps_activations:
        yield _binding(
            finding,
            "train.rematerialize = True",
            "activations inside each block are computed again in the backward pass instead of kept, about a third more "
            "arithmetic",
        )


def _more_devices(finding: SliceFinding) -> Iterator[Suggestion]:
    """More of the same devices, the global batch as it is."""
    where = finding.case.where
    last = where.num_replicas
    for larger in where.larger():
        replicas = larger.num_replicas
        if replicas < max(2 * last, where.num_replicas * _least(finding)):
            continue
        if not _divides(finding, replicas):
            continue
        last = replicas
        yield Suggestion(
            case=Case(where=larger, changes=finding.case.changes),
            flag=larger.flag,
            why=f"the same global batch on {replicas} replicas instead of {where.num_replicas}",
        )


def _divides(finding: SliceFinding, num_replicas: int) -> bool:
    try:
        plan = for_replicas(finding.plan, num_replicas)
        check_batches(plan)
    except UsageError:
        return False
    return in_groups(finding, plan.microbatch_size)


def in_groups(finding: SliceFinding, microbatch_size: int) -> bool:
    """Whether a microbatch of so many examples is whole groups of those that normalisation layers take together."""
    return not any(microbatch_size % group for group in finding.model.group_sizes)


def _smaller_batch(finding: SliceFinding) -> Iterator[Suggestion]:
    """Global batches that halve the recipe's."""
    recipe = finding.plan.recipe
    parts = finding.plan.strategy.num_replicas * finding.plan.microbatches
    batch = recipe.global_batch_size
    while batch % 2 == 0 and batch // 2 >= parts:
        batch //= 2
        if batch % parts or not in_groups(finding, batch // parts):
            return
        if batch * _least(finding) <= recipe.global_batch_size:
            yield _binding(
                finding,
                f"train.global_batch_size = {batch}",
                "another training: the learning rate and the steps that go with the batch are yours to change",
            )


def _binding(finding: SliceFinding, binding: str, why: str) -> Suggestion:
    return Suggestion(
        case=Case(where=finding.case.where, changes=(*finding.case.changes, binding)),
        flag=f'--gin_param="{binding}"',
        why=why,
    )
