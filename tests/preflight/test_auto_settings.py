"""What a recipe leaves to 'auto' in preflight: what is compiled, in which order, and what is told of it."""

from __future__ import annotations

import dataclasses

import pods
import pytest

from launcher.config import gin_bindings
from launcher.preflight import searches, slices
from launcher.preflight.compiled import Compilation
from launcher.preflight.compiled.hbm import HbmUse
from launcher.preflight.slice_finding import Case, ModelFacts, SliceFinding

GIB = 2**30
COMPILED = Compilation(error=None, memory={}, cost={}, hlo="", seconds=1, cached=False)
CASE = Case(where=slices.find("v5litepod-1"))
MICROBATCHES, REMATERIALIZE = "train.microbatches = 'auto'", "train.rematerialize = 'auto'"


class Compiled:
    """An examiner of 16 examples on a device of 16 GiB, by variables and temporaries of so many."""

    def __init__(self, bindings, variables, kept, computed_again, groups=()):
        self._bindings, self._variables, self._temporaries = bindings, variables, (kept, computed_again)
        self._groups = groups
        self.changes = []

    def resolve(self, case):
        plan = pods.plan_of("lm_cpu.gin", ["train.global_batch_size = 16", *self._bindings, *case.changes])
        gin_bindings.reset()
        return plan

    def examine(self, case):
        self.changes.append(case.changes)
        plan = self.resolve(case)
        temporaries = self._temporaries[bool(plan.rematerialize)] * GIB // plan.microbatches
        needed = self._variables * GIB + temporaries
        used = HbmUse(
            available=16 * GIB, needed=needed, arguments=self._variables * GIB, outputs=0, temporaries=temporaries,
            code=0, fits=needed <= 16 * GIB, buffers=(),
        )  # fmt: skip
        facts = ModelFacts(
            parameters=1, trained_parameters=1, group_sizes=self._groups, keeps_activations=not plan.rematerialize,
            tokens_per_example=None, notes=(),
        )  # fmt: skip
        return SliceFinding(
            case=case, plan=plan, model=facts, compilation=COMPILED, refusal=None,
            hbm=used, costs=None, roofline=None, advice=(),
        )  # fmt: skip


def changes(rematerialize=None, microbatches=None):
    named = {"rematerialize": rematerialize, "microbatches": microbatches}
    return tuple(f"train.{name} = {value}" for name, value in named.items() if value is not None)


@pytest.mark.parametrize(
    ("bindings", "sizes", "compiled"),
    [
        ([], (8, 16, 4), [()]),
        ([REMATERIALIZE], (8, 4, 4), [changes(False)]),
        ([REMATERIALIZE], (8, 16, 4), [changes(False), changes(True)]),
        # 60 GiB of temporaries where 8 have room: in 4 parts they cannot fit, whatever the compiler does.
        ([MICROBATCHES], (8, 60, 4), [changes(None, 1), changes(None, 8)]),
        ([REMATERIALIZE, MICROBATCHES], (8, 60, 4), [changes(False, 1), changes(False, 8)]),
        ([REMATERIALIZE, MICROBATCHES], (8, 200, 20), [changes(False, 1), changes(True, 1), changes(True, 4)]),
        # Variables alone are too much.
        ([REMATERIALIZE, MICROBATCHES], (17, 4, 4), [changes(False, 1)]),
    ],
)
def test_what_cannot_fit_is_not_compiled(bindings, sizes, compiled):
    examiner = Compiled(bindings, *sizes)
    found = searches.examine_auto(examiner, CASE)
    assert examiner.changes == compiled
    assert found.case.changes == compiled[-1]
    assert found.fits == (sizes[0] < 16 and bool(bindings))


def test_microbatches_are_whole_groups_of_a_normalisation_layer():
    examiner = Compiled([MICROBATCHES], 8, 60, 4, groups=(4,))
    assert not searches.examine_auto(examiner, CASE).fits
    assert examiner.changes == [changes(None, 1)], "of 8 microbatches, each would be half a group"


def test_the_report_says_what_was_chosen_and_why():
    plan = searches.examine_auto(Compiled([REMATERIALIZE, MICROBATCHES], 8, 200, 20), CASE).plan
    assert plan.describe()["rematerialisation"] == "on (auto: without it, all numbers of microbatches did not fit)"
    assert plan.describe()["batch"].endswith("(auto: 1, 2 did not fit)")


def test_the_largest_batch_is_that_of_one_microbatch_computed_again():
    settled = searches.settled_case(Compiled([REMATERIALIZE, MICROBATCHES], 8, 60, 4), CASE)
    assert settled.changes == changes(True, 1)
    assert searches.settled_case(Compiled([], 8, 60, 4), CASE) == CASE


@pytest.mark.parametrize("keeps", [True, False])
def test_computing_activations_again_is_suggested_where_layers_keep_them(keeps):
    found = Compiled([], 8, 60, 4).examine(CASE)
    found = dataclasses.replace(found, model=dataclasses.replace(found.model, keeps_activations=keeps))
    flags = [suggestion.flag for knob in searches.knobs(found) for suggestion in knob]
    assert ('--gin_param="train.rematerialize = True"' in flags) == keeps
    assert '--gin_param="train.microbatches = 8"' in flags
    assert '--gin_param="train.microbatches = 4"' not in flags, "60 GiB in four parts are more than the 8 that are left"
