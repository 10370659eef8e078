"""The largest global batch whose step fits, found by compiling: `--largest_batch`."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from launcher.errors import UsageError
from launcher.preflight.slice_finding import Case, Examiner, SliceFinding
from launcher.run import memory_trial

# A dozen is usual. More than these need a memory that does not go up with the batch.
_MOST_TRIES = 24
# Near the limit a compiler computes again what does not fit, so that memory hardly goes up there and lines mislead.
_TRIES_BY_LINES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """What was found.

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


def settled(examiner: Examiner, case: Case) -> Case:
    """The case with rematerialisation, where that is open, and one microbatch: with more, batches have no bound."""
    plan = examiner.resolve(case)
    setting = next(one for one in memory_trial.settings(plan) if one.rematerialize is not False)
    return case.changed(*setting.bindings)


def find(examiner: Examiner, case: Case, *, on_try: Callable[[SliceFinding], None]) -> LargestBatch:
    """Compiles one batch size after another, and calls `on_try` with each finding.

    Raises:
      UsageError: the recipe is wrong, or the step does not compile for another reason than its need of memory.
    """
    case = settled(examiner, case)
    first = examiner.examine(case)
    recipe = first.plan.recipe
    unit = first.plan.strategy.num_replicas * first.plan.microbatches * math.lcm(1, *first.model.group_sizes)
    tried: dict[int, SliceFinding] = {}

    def keep(finding: SliceFinding) -> None:
        if finding.hbm is None:
            raise UsageError(f"on {finding.case.name}, {finding.refusal}")
        tried[batch_size(finding) // unit] = finding
        on_try(finding)

    if recipe.global_batch_size % unit == 0:
        keep(first)
    while len(tried) < _MOST_TRIES:
        size = next_size(
            {size: one.hbm.needed / one.hbm.available for size, one in tried.items() if one.hbm},
            {size for size, one in tried.items() if one.fits},
            start=max(1, recipe.global_batch_size // unit),
        )
        if size is None:
            break
        keep(examiner.examine(case.changed(f"train.global_batch_size = {size * unit}")))
    fits = max((size for size, one in tried.items() if one.fits), default=0)
    above = [size for size, one in tried.items() if not one.fits and size > fits]
    return LargestBatch(
        fits=tried.get(fits), refused=tried[min(above)] if above else None, unit=unit, tried=tuple(tried.values())
    )


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
