"""Recipes as users mistype them: one message each, naming the place and the right name, before anything is called."""

from __future__ import annotations

import sys
from pathlib import Path

import gin
import pytest
from gin_objects import BASE, job, loaded, refusal, write
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import gin_bindings, gin_files
from launcher.errors import UsageError

# ------------------------------------------------------------------------------------------------------------ finding


def test_files_come_from_the_working_directory_before_the_installed_recipes():
    installed = gin_files.search_path()[1]
    assert Path(gin_files.find_file("resnet_cpu.gin")) == Path(installed, "resnet_cpu.gin")
    write("resnet_cpu.gin", "")
    assert gin_files.find_file("resnet_cpu.gin") == "resnet_cpu.gin"


def test_an_unknown_file_names_the_nearest_and_the_search_path(folder):
    write("my_recipe.gin", "")
    with pytest.raises(UsageError, match=r"did you mean 'resnet_cpu.gin'") as caught:
        gin_bindings.load(["resnet_cpu"])
    for place in gin_files.search_path():
        assert place in str(caught.value)
    with pytest.raises(UsageError, match=r"did you mean 'my_recipe.gin'"):
        gin_files.find_file("my_recipes.gin")


def test_includes_resolve_along_the_search_path_and_every_file_is_reported(folder):
    write("base/mine.gin", BASE)
    write("recipe.gin", "include 'base/mine.gin'\njob.steps = 3\n")
    gin_bindings.load(["recipe.gin"])
    assert gin_bindings.loaded.files == ["recipe.gin", "base/mine.gin"]
    assert job()["steps"] == 3


def test_an_include_is_found_beside_the_file_that_asks_for_it():
    write("deep/er/mine.gin", BASE)
    write("deep/er/recipe.gin", "include 'mine.gin'\njob.steps = 3\n")
    loaded("include 'deep/er/recipe.gin'")
    assert job()["steps"] == 3


def test_an_unknown_include_names_the_line_that_asks_for_it():
    assert "recipe.gin line 6: include: gin file 'base/imagess.gin' not found" in refusal(
        "\ninclude 'base/imagess.gin'\n"
    )


def test_a_file_that_includes_itself_is_refused():
    write("b.gin", "include 'a.gin'\n")
    write("a.gin", "include 'b.gin'\n")
    with pytest.raises(UsageError, match=r"a.gin -> b.gin -> a.gin"):
        gin_bindings.load(["a.gin"])


def test_every_recipe_says_its_purpose():
    found = dict(gin_files.recipes())
    assert "resnet_cpu.gin" in found
    assert all(purpose and not purpose.startswith("#") for purpose in found.values())
    assert all("/" not in name for name in found)


# ------------------------------------------------------------------------------------------------------------- values


def test_later_files_and_then_params_override(folder):
    write("second.gin", "job.steps = 20\njob.rate = 2\n")
    write("recipe.gin", BASE)
    gin_bindings.load(["recipe.gin", "second.gin"], ["job.rate=3.5"])
    assert (job()["steps"], job()["rate"]) == (20, 3.5)


def test_what_params_changed_is_told_beside_what_the_files_say():
    loaded("job.steps = 20\n", "job.steps = 30", "job.rate = 2.0", "job.steps = 40")
    assert gin_bindings.changed() == [("job.steps", "20", "40"), ("job.rate", None, "2.0")]
    loaded()
    assert gin_bindings.changed() == []


def test_a_load_starts_from_nothing():
    loaded("job.rate = 2.0\n")
    job()
    loaded()
    assert job()["rate"] == 1.0


def test_macros_scopes_and_references_mean_what_they_mean_in_gin():
    loaded("rate = 0.5\nslow_descent.rate = %rate\nother/pictures.shape = (1, 2, 3)\njob.data = @other/pictures()\n")
    result = job()
    assert result["optimizer"].rate == 0.5
    assert result["data"].shape == (1, 2, 3)


def test_macros_may_be_overridden_by_a_param_and_defined_after_their_use():
    loaded("slow_descent.rate = %rate\nrate = 0.5\n", "rate = 0.25")
    assert job()["optimizer"].rate == 0.25


@pytest.mark.parametrize(
    ("binding", "expected"),
    [
        ("job.steps = 'ten'", "job.steps = 'ten': expected int, got str"),
        ("job.steps = 1e3", "job.steps = 1000.0: expected int, got float; write 1000"),
        ("job.steps = True", "job.steps = True: expected int, got bool"),
        ("job.steps = None", "job.steps = None: expected int, got NoneType"),
        ("job.rate = '0.1'", "job.rate = '0.1': expected float, got str"),
        ("job.flag = 1", "job.flag = 1: expected bool, got int"),
        ("job.wire = 'float61'", "job.wire = 'float61': expected Literal['auto', 'float16'], got str"),
        ("job.limit = 'none'", "job.limit = 'none': expected float | None, got str"),
        ("pictures.shape = (8, 8)", "pictures.shape = (8, 8): expected tuple[int, int, int], got tuple"),
        ("pictures.shape = [8, 8, 'x']", "pictures.shape = [8, 8, 'x']: expected tuple[int, int, int], got list"),
        ("pictures.names = ['a', 1]", "item 1 of list is not an instance of str"),
        ("job.data = 'digits'", "job.data = 'digits': expected Pictures, got str"),
        ("job.optimizer = 0.1", "job.optimizer = 0.1: expected Callable[[], Descent], got float"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(binding, expected):
    assert refusal(f"{binding}\n").startswith("recipe.gin line 5: ")
    assert expected in refusal(f"{binding}\n")
    assert refusal("", binding).startswith("--gin_param: ")


@pytest.mark.parametrize(
    "binding",
    [
        "job.rate = 1",
        "job.limit = None",
        "job.limit = 3",
        "job.note = None",
        "job.wire = 'float16'",
        "pictures.names = ['a', 'b']",
        "pictures.names = ('a', 'b')",
        "anything.value = 'no annotation'",
        "anything.later = 'its type is known to type checkers only'",
        "anything.unheard_of = {'key': [1, (2, 3)]}",
        "slow_descent.rate = @warm_schedule()",
        "anything.value = [@pictures(), 1]",
    ],
)
def test_a_value_that_fits_is_bound(binding):
    loaded(f"{binding}\n")


def test_a_list_where_only_a_tuple_will_do_arrives_as_a_tuple():
    loaded("pictures.shape = [4, 4, 3]\njob.sizes = [1, 2]\n")
    result = job()
    assert result["data"].shape == (4, 4, 3)
    assert result["sizes"] == (1, 2)


def test_a_macro_is_checked_at_the_parameter_that_uses_it():
    message = refusal("job.steps = %length\nlength = 'long'\n")
    assert message.startswith("recipe.gin line 5: job.steps = %length: expected int, got str")
    assert "recipe.gin line 6: length = 'long'" in message
    assert "expected tuple[int, int, int]" in refusal("pictures.shape = (8, %width, 1)\nwidth = 'wide'\n")


def test_a_builder_in_the_place_of_its_product_is_refused_and_the_other_way_round():
    assert "job.data = @pictures: expected Pictures; write @pictures() for what" in refusal("job.data = @pictures\n")
    message = refusal("job.optimizer = @slow_descent()\n")
    assert "something to call; write @slow_descent without parentheses" in message


@given(value=st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text("ab'")))
def test_an_int_parameter_takes_ints_alone(value):
    params = ["job.optimizer = @slow_descent", "job.data = @pictures()", f"job.steps = {value!r}"]
    if type(value) is int:
        gin_bindings.load([], params)
        assert job()["steps"] == value
    else:
        with pytest.raises(UsageError, match="expected int"):
            gin_bindings.load([], params)


# ------------------------------------------------------------------------------------------------------ unknown names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slow_decent.rate = 1.0", "nothing is named 'slow_decent'; did you mean 'slow_descent'?"),
        ("job.optimizer = @fast_decent", "nothing is named 'fast_decent'; did you mean 'fast_descent'?"),
        ("job.stepz = 3", "no parameter 'stepz' to bind; did you mean 'steps'?"),
        ("job.hidden = 3", "no parameter 'hidden' to bind"),
        ("job:\n  stepz = 3", "no parameter 'stepz' to bind; did you mean 'steps'?"),
        ("learning = 1.0\njob.rate = %lerning", "macro %lerning is not defined; did you mean 'learning'?"),
        ("job.rate = %zzz", "macro %zzz is not defined"),
        ("job.rate = %first\nfirst = %second\nsecond = %first", "in a circle: first -> second -> first"),
    ],
)
def test_an_unknown_name_offers_the_nearest(text, expected):
    message = refusal(f"{text}\n")
    assert expected in message
    assert message.startswith("recipe.gin line ")


def test_an_ambiguous_name_lists_what_it_may_mean():
    for module in ("here", "there"):
        gin.external_configurable(dict, name="twofold", module=f"test_config.{module}")
    assert "'twofold' is ambiguous; write one of here.twofold, there.twofold" in refusal("twofold.a = 1\n")


def test_a_mistyped_macro_in_a_param_is_refused_although_it_binds_something():
    message = refusal("rate = 0.1\njob.rate = %rate\n", "raet = 0.2")
    assert message == "--gin_param: raet = 0.2: no binding mentions %raet; did you mean 'rate'?"


# -------------------------------------------------------------------------------------------------------------- syntax


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("job.steps =\n", 5),
        ("job.rate = 1.0\njob.steps = ten\n", 6),
        ("job.steps 3\n", 5),
        ("job.steps = 3 4\n", 5),
        ("job.sizes = (1, 2\n", None),
        ("job.note = 'open\n", 5),
        ("include base.gin\n", 5),
    ],
)
def test_a_syntax_error_names_file_and_line(text, line):
    message = refusal(text)
    assert message.startswith(f"recipe.gin line {line}: " if line else "recipe.gin line ")


def test_a_bare_word_is_explained():
    assert "cannot read the value digits: a string needs quotes" in refusal("job.note = digits\n")
    assert "cannot read the value digits: a string needs quotes" in refusal("", "job.note=digits")


@pytest.mark.parametrize("param", ["job.steps", "", "=3", "include 'base.gin'", "import os", "a = 1\nb = 2", "a: 3"])
def test_a_param_that_is_no_binding_shows_the_form(param):
    message = refusal("", param)
    assert message.startswith(f"--gin_param {param!r}")
    assert "expected NAME.PARAMETER=VALUE" in message


def test_a_file_that_is_not_text_is_refused(folder):
    Path("binary.gin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"binary.gin cannot be read"):
        gin_bindings.load(["binary.gin"])


MODULE = """\
import gin

from launcher.config import gin_bindings

SEEN = gin_bindings.bound("job.steps", None)


@gin.configurable
def {name}(*, far: int = 1):
    return far
"""


def test_bindings_that_need_no_import_are_in_effect_before_the_first(module):
    name, seen = "a_module_of_ones_own", []
    module(name, MODULE.format(name=name))

    def before_imports():
        assert name not in sys.modules
        seen.append(
            (
                gin_bindings.bound("job.steps", None),
                gin_bindings.bound("job.rate", 5.0),
                gin_bindings.bound(f"{name}.far", None),
            )
        )

    text = f"{BASE}import {name}\n{name}.far = 2\nSTEPS = 20\njob.steps = %STEPS\njob.rate = @{name}()\n"
    write("recipe.gin", text)
    gin_bindings.load(["recipe.gin"], before_imports=before_imports)
    assert seen == [(20, 5.0, None)]
    assert sys.modules[name].SEEN is None
    assert job()["rate"] == 2


def test_what_is_wrong_without_an_import_is_refused_before_the_first(module):
    module("another_module_of_ones_own", MODULE.format(name="another_module_of_ones_own"))
    write("recipe.gin", f"{BASE}import another_module_of_ones_own\njob.stepz = 3\n")

    def before_imports():
        pytest.fail("called")

    with pytest.raises(UsageError, match="stepz"):
        gin_bindings.load(["recipe.gin"], before_imports=before_imports)
    write("recipe.gin", BASE)
    gin_bindings.load(["recipe.gin"], before_imports=before_imports)


EVIL = "import pathlib; pathlib.Path('ran').touch()"


@pytest.mark.parametrize(
    ("statement", "module"),
    [
        ("import evil", "evil.py"),
        ("import evil", "evil/__init__.py"),
        ("from evil.deep import mine", "evil/deep/mine.py"),
        ("import runs.foreign.evil", "evil.py"),
        ("from runs.foreign import evil", "__init__.py"),
        ("import foreign.evil", "evil.py"),
        ("include 'runs/foreign/more.gin'", "evil.py"),
    ],
)
@pytest.mark.parametrize("within", [".", "runs/foreign"])
def test_of_a_foreign_folder_no_module_is_run_by_whatever_path_it_is_found(
    folder, monkeypatch, statement, module, within
):
    write(
        "runs/foreign/config.gin",
        statement.replace("runs", str(folder / "runs")) if "include" in statement else statement,
    )
    write("runs/foreign/more.gin", "import evil")
    write(f"runs/foreign/{module}", EVIL)
    monkeypatch.chdir(within)
    monkeypatch.setattr(sys, "path", ["", str(folder), str(folder / "runs"), *sys.path])
    before = set(sys.modules)
    try:
        with pytest.raises(UsageError, match=r"runs/foreign.*; trust=True would run it"):
            gin_bindings.load([str(folder / "runs/foreign/config.gin")], foreign=str(folder / "runs/foreign"))
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert not list(folder.rglob("ran"))


def test_a_foreign_gin_file_may_import_what_is_on_the_users_own_path(folder, module):
    module("mine", "import gin\n@gin.configurable\ndef labour(*, rate=1.0):\n    return rate")
    write("runs/foreign/config.gin", "import mine\nimport os.path\nlabour.rate = 2.0")
    gin_bindings.load(["runs/foreign/config.gin"], foreign="runs/foreign")
    assert str(folder / "runs/foreign") not in sys.path
    with pytest.raises(UsageError, match="no module named 'gone'"):
        write("runs/foreign/config.gin", "import gone")
        gin_bindings.load(["runs/foreign/config.gin"], foreign="runs/foreign")


@pytest.mark.parametrize(
    "text",
    [
        "from __gin__ import dynamic_registration\nimport os\ntrain.task = @os.system('touch ran')",
        "import os\ntrain.task = @os.system()",
        "train.task = @subprocess.run()",
        "train.task = __import__('os').system('touch ran')",
        f"x = {'(' * 5000}1{')' * 5000}",
        f"x = {'[' * 90}1{']' * 90}",
    ],
)
def test_gin_runs_nothing_that_nobody_registered(folder, text):
    write("recipe.gin", text)
    with pytest.raises(UsageError):
        gin_bindings.load(["recipe.gin"])
    assert not list(folder.rglob("ran"))
