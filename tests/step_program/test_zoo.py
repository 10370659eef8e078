"""Keras's layers, losses, optimizers and operations train by both engines to equal losses, or are refused by name."""

from __future__ import annotations

import json
import re

import pods
import pytest
import zoo
from places import PYTHONPATH

pytestmark = pytest.mark.slow


def tried(run_launcher, names, places):
    env = {"PYTHONPATH": PYTHONPATH, "XLA_FLAGS": pods.FAST_COMPILE}
    done = run_launcher(f"--places={places}", *names, module="zoo", env=env, timeout=1500)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def wrong(found):
    """What is neither equal nor refused by the name of a part of the model; nor refused by Keras where it is made."""
    for one in found:
        if "Could not automatically infer" in one.get("reference", ""):
            continue
        for place in (zoo.PLACES.keys() | {"reference"}) & one.keys():
            if not re.match("=$|refused: ", one[place]):
                yield one["model"], place, one[place]


# A weight by itself alone, or in a loop, and a picture that is turned in front of the first weight. Weights that are
# used more than once: tests/run/test_engine_choice.py.
SAMPLE = ("ops.weight clipped", "ops.weight in a loop", "RandomRotation")


def test_a_sample_of_models_trains_in_parts_as_by_tensorflow(run_launcher):
    found = tried(run_launcher, SAMPLE, "pjrt 4 all")
    assert [(one["model"], one["pjrt 4 all"]) for one in found] == [(name, "=") for name in SAMPLE]


@pytest.mark.nightly
@pytest.mark.heavy
@pytest.mark.parametrize("part", range(8))
def test_every_model_trains_to_the_same_losses_or_is_refused_by_name(run_launcher, part):
    names = list(zoo.kinds())[part::8]
    # All of them where the most is rewritten; each other place has a share of them.
    others = [place for place in zoo.PLACES if place != "pjrt 4 all"]
    found = tried(run_launcher, names, f"pjrt 4 all,{others[part % len(others)]}")
    assert len(found) == len(names)
    assert not list(wrong(found))
