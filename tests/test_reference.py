"""Generated pages and quoted figures are what scripts/reference.py makes of the code as it is."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys

import pytest
from absl import flags
from places import ROOT

from launcher import modes


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(ROOT / "scripts"))  # where it finds the module beside it
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "scripts"))


@pytest.mark.parametrize(
    "page", ["docs/reference.md", "docs/reference_flags.md", "docs/reference_bindings.md", "docs/recipes.md"]
)
def test_page_is_current(program, page):
    assert (ROOT / page).read_text() == program.PAGES[page](), f"{page}: run python scripts/reference.py"


def test_figures_of_pages_are_those_of_the_benchmarks(program):
    stale = [
        path.name for path in program.quotes.QUOTING if program.quotes.quoted(path.read_text()) != path.read_text()
    ]
    assert stale == [], "run python scripts/reference.py"


def test_quoted_figure_is_written_between_its_marks(program):
    key = "starts/runs/0/job/launcher/training again/seconds/median"
    page = f"it took <!-- result: {key} .1f -->9 hours<!-- --> s"
    assert program.quotes.quoted(page) == f"it took <!-- result: {key} .1f -->3.4<!-- --> s"
    with pytest.raises(program.quotes.Malformed, match="has no 'nothing' there"):
        program.quotes.quoted("<!-- result: starts/nothing .1f --><!-- -->")


def test_quoted_table_is_that_of_its_heading_without_its_links(program):
    mark = "<!-- table: benchmarks/notes/embeddings.md#large-tables 1 -->"
    page = program.quotes.quoted(f"{mark}\nold\n<!-- -->\nafter\n")
    assert page.startswith(f"{mark}\n\n| | rows | Keras `fit` |") and page.endswith("|\n\n<!-- -->\nafter\n")
    with pytest.raises(program.quotes.Malformed, match="has no table 9 under #large-tables"):
        program.quotes.quoted(mark.replace(" 1 ", " 9 ") + "<!-- -->")


def test_every_test_of_an_assumption_exists(program):
    found = list(program.quotes.found_assumptions())
    assert found
    assert [test for one in found for test in one.tests if not (ROOT / test).is_file()] == []


def test_assumption_is_read_over_several_lines_and_must_name_a_test(program):
    source = "# Leans on gin: an order. Noticed by\n# tests/a.py. Then: sort\n# it.\nx = 1\n"
    assert list(program.quotes._comments(source)) == ["gin: an order. Noticed by tests/a.py. Then: sort it."]
    with pytest.raises(program.quotes.Malformed, match=r"expected 'Leans on WHOM"):
        program.quotes.assumption("a.py", "gin: an order that nobody tests")


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
        program.flag_list(values, ["silent"])


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
    page = (ROOT / "docs/reference_flags.md").read_text()
    for mode in modes.MODES.values():
        section = page.split(f"### --mode={mode.name}\n")[1].split("\n### ")[0]
        if same := re.search(r"Its flags are those of `--mode=(\w+)`", section):
            assert mode.own_flags == modes.MODES[same[1]].own_flags
            continue
        assert [name for name in mode.own_flags if f"`--{name}" not in section] == []
