"""What a recipe leaves to 'auto' until it is known what fits, found by compiling."""

from __future__ import annotations

import dataclasses

from launcher.preflight.hbm import HbmUse
from launcher.preflight.slice_finding import Case, Examiner, SliceFinding
from launcher.preflight.suggestions import in_groups
from launcher.run import memory_trial
from launcher.run.memory_trial import Setting


def examine(examiner: Examiner, case: Case) -> SliceFinding:
    """Compiles a case with what training would try, in the same order, until a step fits.

    What cannot fit, by what was compiled before, is left out. The case of the finding has the values bound.

    Args:
      examiner: of the recipe.
      case: whose recipe may leave `train.microbatches` and `train.rematerialize` open.

    Returns:
      Of the first step that fits, of the last that was compiled where none does, or of one that does not compile.

    Raises:
      UsageError: as in `Examiner.examine`.
    """
    settings, found = memory_trial.settings(examiner.resolve(case)), None
    refused: dict[Setting, HbmUse] = {}
    for place, setting in enumerate(settings):
        if any(_is_too_much(setting, one, used) for one, used in refused.items()):
            continue
        if found is not None and not in_groups(found, found.plan.per_replica_batch_size // (setting.microbatches or 1)):
            continue
        found = examiner.examine(dataclasses.replace(case, changes=(*case.changes, *setting.bindings)))
        plan = memory_trial.settled(found.plan, setting, settings[:place], "did not fit")
        found = dataclasses.replace(found, plan=plan)
        if found.hbm is None or found.fits:
            return found
        refused[setting] = found.hbm
    assert found is not None  # the first is never left out
    return found


def for_largest_batch(examiner: Examiner, case: Case) -> Case:
    """The case with rematerialisation, where that is open, and one microbatch: with more, batches have no bound."""
    plan = examiner.resolve(case)
    setting = next(one for one in memory_trial.settings(plan) if one.rematerialize is not False)
    return dataclasses.replace(case, changes=(*case.changes, *setting.bindings))


def _is_too_much(setting: Setting, refused: Setting, used: HbmUse) -> bool:
    """Whether more microbatches than those that were refused are still too few."""
    if setting.rematerialize != refused.rematerialize:
        return used.least_parts == float("inf")
    return (setting.microbatches or 1) < (refused.microbatches or 1) * used.least_parts
