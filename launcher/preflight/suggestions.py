"""Changes of the command that make a step fit, found by compiling: what a recipe leaves to 'auto', and suggestions."""

import dataclasses
from collections.abc import Iterable, Iterator

from launcher.errors import UsageError
from launcher.machine.strategy import recommended_policy
from launcher.preflight.compiled.hbm import HbmUse
from launcher.preflight.slice_finding import Case, Examiner, SliceFinding
from launcher.run import memory_trial
from launcher.run.memory_trial import Setting
from launcher.step_program.lowering import for_replicas


def examine_auto(examiner: Examiner, case: Case) -> SliceFinding:
    """Compiles a case with what training would try for `train.microbatches` and `train.rematerialize`, in that order.

    What cannot fit, by what was compiled before, is left out. The case of the finding has the values bound.

    Returns:
      Of the first step that fits, of the last that was compiled where none does, or of one that does not compile.
    """
    settings, found = memory_trial.settings(examiner.resolve(case)), None
    refused: dict[Setting, HbmUse] = {}
    for place, setting in enumerate(settings):
        if any(_is_too_much(setting, one, used) for one, used in refused.items()):
            continue
        if found is not None and not in_groups(found, found.plan.per_replica_batch_size // (setting.microbatches or 1)):
            continue
        found = examiner.examine(case.changed(*setting.bindings))
        plan = memory_trial.settled(found.plan, setting, settings[:place], "did not fit")
        found = dataclasses.replace(found, plan=plan)
        if found.hbm is None or found.fits:
            return found
        refused[setting] = found.hbm
    assert found is not None  # the first is never left out
    return found


def _is_too_much(setting: Setting, refused: Setting, used: HbmUse) -> bool:
    """Whether more microbatches than those that were refused are still too few."""
    if setting.rematerialize != refused.rematerialize:
        return used.least_parts == float("inf")
    return (setting.microbatches or 1) < (refused.microbatches or 1) * used.least_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One change of the command, and what came of it."""

    case: Case  # the command with it
    flag: str  # what to add to the command, or to replace in it
    why: str  # what it does and costs
    finding: SliceFinding | None = None  # as long as it has not been compiled, or when it could not be
    refused: str | None = None  # why it could not be

    @property
    def fits(self) -> bool:
        return self.finding is not None and self.finding.fits


def knobs(finding: SliceFinding) -> Iterator[Iterable[Suggestion]]:
    """What can be turned to make a step fit, the one to try first in front.

    Yields:
      For each knob its settings, from the least change on; each next one at least doubles the change.
    """
    hbm, model, replicas = finding.hbm, finding.model, finding.plan.strategy.num_replicas
    if hbm is None:
        return
    if finding.plan.policy == "float32":
        half, _ = recommended_policy(finding.plan.strategy)
        why = "activations of half the size, products at the full speed of the matrix units"
        yield [_binding(finding, f"train.precision = {half!r}", why)]
    yield _shards(finding, hbm, replicas)
    yield _microbatches(finding, hbm)
    if model.keeps_activations:
        why = "activations inside each block are computed again in the backward pass: about a third more arithmetic"
        yield [_binding(finding, "train.rematerialize = True", why)]
    # The factor by which replicas must at least multiply: no part shrinks more than in proportion.
    least = 1.0 if hbm.fits else hbm.needed / hbm.available
    yield _more_devices(finding, least)
    yield _smaller_batch(finding, least)


def _shards(finding: SliceFinding, hbm: HbmUse, replicas: int) -> Iterator[Suggestion]:
    """The optimizer's state shared out, or weights and gradients as well, where the step could fit by what leaves."""
    shareable, shard = finding.model.shareable_bytes, finding.plan.recipe.shard
    leaves = 1 - 1 / replicas
    if shareable and leaves and shareable * leaves >= hbm.excess:
        why = "each replica keeps the optimizer's state of its part of the weights alone; one more collective"
        yield _binding(finding, "train.shard = 'optimizer'", why)
    of_weights = 2 * 4 * finding.model.trained_parameters  # float32, and their gradients
    if (shareable or shard == "optimizer") and leaves and (shareable + of_weights) * leaves >= hbm.excess:
        why = "each replica keeps its part of the weights alone, too; every weight is gathered twice a step"
        yield _binding(finding, "train.shard = 'all'", why)


def _microbatches(finding: SliceFinding, hbm: HbmUse) -> Iterator[Suggestion]:
    now, per_replica = finding.plan.microbatches, finding.plan.per_replica_batch_size
    last = now
    for count in range(now + 1, per_replica + 1):
        size, rest = divmod(per_replica, count)
        if count < max(2 * last, now * hbm.least_parts) or rest or not in_groups(finding, size):
            continue
        last = count
        yield _binding(
            finding,
            f"train.microbatches = {count}",
            f"{per_replica} examples in {count} parts; slower where these no longer fill the matrix units",
        )


def _more_devices(finding: SliceFinding, least: float) -> Iterator[Suggestion]:
    """More of the same devices, the global batch as it is."""
    where = finding.case.where
    last = where.num_replicas
    for larger in where.larger():
        replicas = larger.num_replicas
        if replicas >= max(2 * last, where.num_replicas * least) and _divides(finding, replicas):
            last = replicas
            yield Suggestion(
                case=dataclasses.replace(finding.case, where=larger),
                flag=larger.flag,
                why=f"the same global batch on {replicas} replicas instead of {where.num_replicas}",
            )


def _divides(finding: SliceFinding, num_replicas: int) -> bool:
    try:
        plan = for_replicas(finding.plan, num_replicas)
    except UsageError:
        return False
    return in_groups(finding, plan.microbatch_size)


def in_groups(finding: SliceFinding, microbatch_size: int) -> bool:
    """Whether a microbatch of so many examples is whole groups of those that normalisation layers take together."""
    return not any(microbatch_size % group for group in finding.model.group_sizes)


def _smaller_batch(finding: SliceFinding, least: float) -> Iterator[Suggestion]:
    """Global batches that halve the recipe's."""
    recipe = finding.plan.recipe
    parts = finding.plan.strategy.num_replicas * finding.plan.microbatches
    batch = recipe.global_batch_size
    while batch % 2 == 0 and batch // 2 >= parts:
        batch //= 2
        if batch % parts or not in_groups(finding, batch // parts):
            return
        if batch * least <= recipe.global_batch_size:
            yield _binding(
                finding,
                f"train.global_batch_size = {batch}",
                "another training: the learning rate and the steps that go with the batch are yours to change",
            )


def _binding(finding: SliceFinding, binding: str, why: str) -> Suggestion:
    return Suggestion(case=finding.case.changed(binding), flag=f'--gin_param="{binding}"', why=why)
