"""docs/reference.md and docs/recipes.md are what scripts/reference.py makes of the code as it is."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
from absl import flags
from places import ROOT

from launcher import modes


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["docs/reference.md", "docs/recipes.md"])
def test_page_is_current(program, page):
    assert (ROOT / page).read_text() == program.PAGES[page](), f"{page}: run python scripts/reference.py"


def test_argument_that_is_not_described_is_refused(program):
    @dataclasses.dataclass
    class Settings:
        """Settings of a thing.

        Attributes:
          told: what it is.
        """

        told: int = 1
        untold: int = 2

    with pytest.raises(program.Undescribed, match=r"Settings: its docstring does not describe untold"):
        list(program.configurable("Settings", Settings))


def test_flag_without_help_is_refused(program):
    values = flags.FlagValues()
    flags.DEFINE_string("silent", None, " ", flag_values=values)
    with pytest.raises(program.Undescribed, match="--silent has no help"):
        program.flag_table(values, ["silent"])


def test_description_of_an_argument_may_take_several_lines_and_be_for_several(program):
    def made(first: int, second: int, third: int):
        """Makes it.

        More about it:

            made(1)

        Args:
            first, second: both
                of them.
            third: what comes: last.

        Returns:
            fourth: nothing.
        """

    assert program.documented(made) == (
        "Makes it.\n\nMore about it:\n\n```text\nmade(1)\n```",
        {"first": "Both of them.", "second": "Both of them.", "third": "What comes: last."},
    )


def test_every_mode_has_its_flags_in_the_reference():
    page = (ROOT / "docs/reference.md").read_text()
    for mode in modes.MODES.values():
        section = page.split(f"### --mode={mode.name}\n")[1].split("\n### ")[0]
        assert [name for name in mode.own_flags if f"`--{name}" not in section] == []
