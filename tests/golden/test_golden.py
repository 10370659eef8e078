"""What recipes bind, what they lose in their first steps and what users may bind is what the text files here say.

A difference is no mistake by itself: CONTRIBUTING.md says when `python tests/golden/write.py` is the answer.
"""

from __future__ import annotations

import difflib

import numpy as np
import pytest
import write
from cases import repeated_but

pytestmark = pytest.mark.slow

# Other vector units, and libraries that use them, round otherwise; in twenty steps that grows to about 1e-5.
TOLERANCE = 1e-4


def assert_current(name, text, advice):
    path = write.HERE / name
    kept = path.read_text("utf-8") if path.exists() else ""
    changes = list(difflib.unified_diff(kept.splitlines(), text.splitlines(), lineterm="", n=0))[2:]
    assert not changes, "\n".join([f"tests/golden/{name} says otherwise: {advice}", *changes])


@pytest.mark.parametrize("recipe", write.recipes())
def test_a_recipe_resolves_to_the_bindings_of_its_file(recipe):
    assert_current(
        f"recipes/{recipe}.txt", write.resolved(recipe), "if it is meant, python tests/golden/write.py recipes"
    )


# Of networks for text, test_transformer.py, test_language_model.py and test_lstm.py have oracles.
@pytest.mark.parametrize("recipe", repeated_but(["experiment_underflow", "mlp_fashion", "resnet_cpu"], write.LOSSES))
def test_a_recipe_loses_in_its_first_steps_what_its_file_says(recipe, tmp_path):
    expected = np.loadtxt(write.HERE / "losses" / f"{recipe}.txt")
    assert expected[-1] != expected[0]
    advice = "training changed; if it is meant, python tests/golden/write.py losses"
    np.testing.assert_allclose(write.losses(recipe, tmp_path), expected, rtol=TOLERANCE, err_msg=advice)


def test_flags_and_bindings_of_a_run_are_frozen():
    advice = "give the reason of each new one in CHANGELOG.md, then python tests/golden/write.py surface"
    assert_current("surface.txt", write.surface(), advice)


@pytest.mark.parametrize(("folder", "names"), [("recipes", write.recipes()), ("losses", write.LOSSES)])
def test_there_is_no_file_of_a_recipe_that_is_gone(folder, names):
    assert {path.stem for path in (write.HERE / folder).iterdir()} == set(names)
