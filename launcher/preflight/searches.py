"""Searches by compiling: for what a recipe leaves to 'auto', what makes a step fit, and the largest batch that does."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from launcher.errors import UsageError
from launcher.machine.strategy import recommended_policy
from launcher.preflight.compiled.hbm import HbmUse
from launcher.preflight.slice_finding import Case, Examiner, SliceFinding
from launcher.run import memory_trial
from launcher.run.memory_trial import Setting
from launcher.step_program.lowering import for_replicas

# A dozen is usual. More than these need a memory that does not go up with the batch.
_MOST_TRIES = 24
# Near the limit a compiler computes again what does not fit, so that memory hardly goes up there and lines mislead.
_TRIES_BY_LINES = 8


# ------------------------------------------------------------------------------------------ what a recipe leaves open


def examine_auto(examiner: Examiner, case: Case) -> SliceFinding:
    """Compiles a case with what training would try for `train.microbatches` and `train.rematerialize`, in that order.

    What cannot fit, by what was compiled before, is left out. The case of the finding has the values bound.

    Returns:
      Of the first step that fits, of the last that was compiled where none does, or of one that does not compile.
    """
    settings, finding = memory_trial.settings(examiner.resolve(case)), None
    refused: dict[Setting, HbmUse] = {}
    for place, setting in enumerate(settings):
        if any(_is_too_much(setting, other, used) for other, used in refused.items()):
            continue
        if finding and not in_groups(finding, finding.plan.per_replica_batch_size // (setting.microbatches or 1)):
            continue
        finding = examiner.examine(case.changed(*setting.bindings))
        plan = memory_trial.settled(finding.plan, setting, settings[:place])
        finding = dataclasses.replace(finding, plan=plan)
        if finding.hbm is None or finding.fits:
            return finding
        refused[setting] = finding.hbm
    assert finding is not None  # the first is never left out
    return finding


def _is_too_much(setting: Setting, refused: Setting, used: HbmUse) -> bool:
    """Whether more microbatches than those that were refused are still too few."""
    if setting.rematerialize != refused.rematerialize:
        return used.least_parts == math.inf
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
    """Knobs that can be turned to make a step fit, the one to try first in front.

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


# ------------------------------------------------------------------------------------------------ the largest batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """Result of the search for the largest batch.

    Attributes:
      fits: of the largest batch that fits; None when the smallest does not.
      refused: of the smallest larger batch that was compiled and does not fit; None when the search ended before one
        did not.
      unit: examples by which batches go up: one for each replica and microbatch, or a group of those that a
        normalisation layer takes together.
      tried: all findings, in the order of compiling.
    """

    fits: SliceFinding | None
    refused: SliceFinding | None
    unit: int
    tried: tuple[SliceFinding, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the next batch was refused."""
        fits = batch_size(self.fits) if self.fits else 0
        return self.refused is not None and batch_size(self.refused) == fits + self.unit


def batch_size(finding: SliceFinding) -> int:
    """Its global batch size."""
    return finding.plan.recipe.global_batch_size


def settled_case(examiner: Examiner, case: Case) -> Case:
    """The case with rematerialisation, where that is open, and one microbatch: with more, batches have no bound."""
    plan = examiner.resolve(case)
    setting = next(one for one in memory_trial.settings(plan) if one.rematerialize is not False)
    return case.changed(*setting.bindings)


def largest_batch(examiner: Examiner, case: Case, *, on_try: Callable[[SliceFinding], None]) -> LargestBatch:
    """Compiles one batch size after another, and calls `on_try` with each finding.

    Raises:
      UsageError: the recipe is wrong, or the step does not compile for another reason than its need of memory.
    """
    case = settled_case(examiner, case)
    first = examiner.examine(case)
    recipe = first.plan.recipe
    unit = first.plan.strategy.num_replicas * first.plan.microbatches * math.lcm(1, *first.model.group_sizes)
    tried: dict[int, SliceFinding] = {}
    needed: dict[int, float] = {}

    def keep(finding: SliceFinding) -> None:
        if finding.hbm is None:
            raise UsageError(f"on {finding.case.name}, {finding.refusal}")
        size = batch_size(finding) // unit
        tried[size], needed[size] = finding, finding.hbm.needed / finding.hbm.available
        on_try(finding)

    if recipe.global_batch_size % unit == 0:
        keep(first)
    start = max(1, recipe.global_batch_size // unit)
    while len(tried) < _MOST_TRIES:
        size = next_size(needed, {size for size, finding in tried.items() if finding.fits}, start=start)
        if size is None:
            break
        keep(examiner.examine(case.changed(f"train.global_batch_size = {size * unit}")))
    fits = max((size for size, finding in tried.items() if finding.fits), default=0)
    above = min((size for size, finding in tried.items() if not finding.fits and size > fits), default=0)
    return LargestBatch(fits=tried.get(fits), refused=tried.get(above), unit=unit, tried=tuple(tried.values()))


def next_size(needed: Mapping[int, float], fitting: set[int], *, start: int) -> int | None:
    """The size to try next; None when one fits and the next does not, or not even 1 does.

    Memory is taken to go up in a straight line; where that is wrong twice on the same side, the rest is halved, and so
    it is after some tries.

    Args:
      needed: share of the memory there is, by size, in the order of trying.
      fitting: sizes that fit.
    """
    if not needed:
        return start
    low = max(fitting, default=0)
    high = min((size for size in needed if size not in fitting and size > low), default=None)
    if high is None:
        below = max((size for size in needed if size < low), default=low)
        guess = _where_full(needed, below, low) if needed[low] > needed[below] else 2 * low
        return max(low + 1, min(16 * low, guess))
    if high == low + 1:
        return None
    last = list(needed)[-2:]
    stuck = len(last) == 2 and len({size in fitting for size in last}) == 1
    shares = {0: 0.0, **needed}
    if stuck or len(needed) > _TRIES_BY_LINES or not shares[low] <= 1 < shares[high]:
        guess = (low + high) // 2
    else:
        guess = _where_full(shares, low, high)
    return min(max(guess, low + 1), high - 1)


def _where_full(needed: Mapping[int, float], size: int, larger: int) -> int:
    """The size at which the line through two others reaches 1."""
    return size + math.floor((larger - size) * (1 - needed[size]) / (needed[larger] - needed[size]))
