"""Recipes as users mistype them: one message each, naming the place and the right name, before anything is called."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gin
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import config
from launcher.errors import PeerError, UsageError

if TYPE_CHECKING:
    from decimal import Decimal

# What a recipe can bind here; the names are nobody else's, for gin's registry is one for the process.


class Descent:
    def __init__(self, rate):
        self.rate = rate


class Pictures:
    def __init__(self, shape):
        self.shape = shape


@gin.configurable
def slow_descent(*, rate: float | Callable[[int], float] = 0.1, decay: float = 0.0) -> Descent:
    return Descent(rate)


@gin.configurable
def fast_descent(*, rate: float = 0.1, beta: float = 0.9) -> Descent:
    return Descent(rate)


@gin.configurable
def warm_schedule(*, peak: float = 1.0) -> Callable[[int], float]:
    return lambda step: peak * step


@gin.configurable
def pictures(*, shape: tuple[int, int, int] = (8, 8, 1), names: Sequence[str] = ()) -> Pictures:
    return Pictures(shape)


@gin.configurable
def anything(*, value=None, later: Decimal | None = None, **options):
    return value


@gin.configurable(denylist=["hidden"])
def job(
    *,
    optimizer: Callable[[], Descent] = gin.REQUIRED,
    data: Pictures = gin.REQUIRED,
    steps: int = gin.REQUIRED,
    rate: float = 1.0,
    flag: bool = False,
    wire: Literal["auto", "float16"] = "auto",
    limit: float | None = None,
    note: str = None,  # noqa: RUF013
    sizes: tuple[int, ...] | None = None,
    hidden: int = 0,
) -> dict[str, Any]:
    return {"optimizer": optimizer(), "data": data, "steps": steps, "rate": rate, "sizes": sizes, "wire": wire}


BASE = """\
# A base that works.
job.optimizer = @slow_descent
job.data = @pictures()
job.steps = 10
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return name


def refusal(text="", *params, base=BASE):
    """The message that a recipe with this text and these --gin_param is refused with."""
    write("recipe.gin", base + textwrap.dedent(text))
    with pytest.raises(UsageError) as caught:
        config.load(["recipe.gin"], params)
    message = str(caught.value)
    assert "Traceback" not in message
    assert "In call to configurable" not in message
    return message


def loaded(text="", *params, base=BASE):
    write("recipe.gin", base + textwrap.dedent(text))
    return config.load(["recipe.gin"], params)


# ------------------------------------------------------------------------------------------------------------ finding


def test_files_come_from_the_working_directory_before_the_installed_recipes():
    installed = config.search_path()[1]
    assert Path(config.find_file("resnet_cpu.gin")) == Path(installed, "resnet_cpu.gin")
    write("resnet_cpu.gin", "")
    assert config.find_file("resnet_cpu.gin") == "resnet_cpu.gin"


def test_an_unknown_file_names_the_nearest_and_the_search_path(folder):
    write("my_recipe.gin", "")
    with pytest.raises(UsageError, match=r"did you mean 'resnet_cpu.gin'") as caught:
        config.load(["resnet_cpu"])
    for place in config.search_path():
        assert place in str(caught.value)
    with pytest.raises(UsageError, match=r"did you mean 'my_recipe.gin'"):
        config.find_file("my_recipes.gin")


def test_explicit_folders_replace_the_search_path(folder):
    write("elsewhere/a.gin", "")
    assert config.find_file("a.gin", ["elsewhere"]) == "elsewhere/a.gin"
    with pytest.raises(UsageError):
        config.find_file("resnet_cpu.gin", ["elsewhere"])


def test_includes_resolve_along_the_search_path_and_every_file_is_reported(folder):
    write("base/mine.gin", BASE)
    write("recipe.gin", "include 'base/mine.gin'\njob.steps = 3\n")
    assert config.load(["recipe.gin"]).files == ("recipe.gin", "base/mine.gin")
    assert job()["steps"] == 3


def test_an_unknown_include_names_the_line_that_asks_for_it():
    assert "recipe.gin line 6: include: gin file 'base/imagess.gin' not found" in refusal(
        "\ninclude 'base/imagess.gin'\n"
    )


def test_a_file_that_includes_itself_is_refused():
    write("b.gin", "include 'a.gin'\n")
    write("a.gin", "include 'b.gin'\n")
    with pytest.raises(UsageError, match=r"a.gin -> b.gin -> a.gin"):
        config.load(["a.gin"])


def test_every_recipe_says_its_purpose():
    found = dict(config.recipes())
    assert "resnet_cpu.gin" in found
    assert all(purpose and not purpose.startswith("#") for purpose in found.values())
    assert all("/" not in name for name in found)


# ------------------------------------------------------------------------------------------------------------- values


def test_later_files_and_then_params_override(folder):
    write("second.gin", "job.steps = 20\njob.rate = 2\n")
    write("recipe.gin", BASE)
    config.load(["recipe.gin", "second.gin"], ["job.rate=3.5"])
    assert (job()["steps"], job()["rate"]) == (20, 3.5)


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
        config.load([], params)
        assert job()["steps"] == value
    else:
        with pytest.raises(UsageError, match="expected int"):
            config.load([], params)


# ------------------------------------------------------------------------------------------------------ unknown names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slow_decent.rate = 1.0", "nothing is named 'slow_decent'; did you mean 'slow_descent'?"),
        ("job.optimizer = @fast_decent", "nothing is named 'fast_decent'; did you mean 'fast_descent'?"),
        ("job.stepz = 3", "job has no parameter 'stepz' to bind; did you mean 'steps'?"),
        ("job.hidden = 3", "job has no parameter 'hidden' to bind"),
        ("job:\n  stepz = 3", "job has no parameter 'stepz' to bind; did you mean 'steps'?"),
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
        config.load(["binary.gin"])


# ------------------------------------------------------------------------------------------------------------- imports


@pytest.fixture
def module(folder, monkeypatch):
    """Makes modules of a user's importable for one test."""
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield lambda name, text: write(f"{name}.py", text)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_an_import_registers_what_the_file_binds(module):
    module("users_task", "import gin\n@gin.configurable\ndef users_thing(*, size: int = 1):\n    return size\n")
    loaded("anything.value = @users_thing()\nusers_thing.size = 7\nimport users_task\n")
    assert anything() == 7


def test_an_import_of_nothing_says_where_it_was_looked_for(folder):
    message = refusal("import no_such_module.at_all\n")
    assert message.startswith("recipe.gin line 5: no module named 'no_such_module.at_all'")
    assert str(folder) in message
    assert "PYTHONPATH" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import no_such_dependency\n", "No module named 'no_such_dependency'"),
        ("x = 1\ny = undefined_name\n", "NameError: name 'undefined_name' is not defined"),
        ("def f(:\n", "SyntaxError"),
    ],
)
def test_a_module_that_fails_says_how(module, text, expected):
    module("users_broken", text)
    message = refusal("import users_broken\n")
    assert "recipe.gin line 5: import users_broken failed: " in message
    assert expected in message


def test_dynamic_registration_is_refused():
    assert "decorate with @gin.configurable" in refusal("from __gin__ import dynamic_registration\n")


# ------------------------------------------------------------------------------------------------------------ required


def test_what_is_required_and_not_bound_is_named_before_anything_runs():
    message = refusal(base="job.steps = 3\n")
    assert "required and not bound: job.optimizer, job.data" in message
    assert "--gin_param 'job.optimizer = ...'" in message


def test_a_required_macro_must_be_given():
    recipe = "job.steps = %length\nlength = %gin.REQUIRED\n"
    assert "length = %gin.REQUIRED: must be given: --gin_param 'length = ...'" in refusal(recipe)
    loaded(recipe, "length = 4")
    assert job()["steps"] == 4


def test_what_an_empty_recipe_lacks_is_named_when_it_is_called():
    config.load([])
    with (
        pytest.raises(UsageError, match=r"required and not bound: job.optimizer, job.data, job.steps"),
        config.usage_errors(),
    ):
        job()


# ---------------------------------------------------------------------------------------------------------------- used


def unused(text="", *params):
    loaded(text, *params)
    job()
    return config.unused_bindings()


def test_nothing_is_unused_when_everything_was_read():
    assert unused("rate = 0.5\nslow_descent.rate = %rate\npictures.shape = (1, 2, 3)\n") == []
    config.check_all_used()


def test_a_binding_of_what_is_never_called_says_what_is_called_instead():
    (found,) = unused("fast_descent.beta = 0.8\n")
    assert found == (
        "fast_descent.beta = 0.8 (recipe.gin line 5): fast_descent is never called; job.optimizer is @slow_descent"
    )
    with pytest.raises(UsageError, match=r"bound but never used: fast_descent\.beta"):
        config.check_all_used()


def test_a_macro_that_only_unused_bindings_mention_is_unused_too():
    found = unused("beta = 0.8\nfast_descent.beta = %beta\n")
    assert len(found) == 2
    assert "only fast_descent.beta mentions it" in found[0]
    with pytest.raises(UsageError, match=r"never used: \n  beta = .*\n  fast_descent.beta = "):
        config.check_all_used()


def test_a_binding_in_a_scope_nobody_enters_is_unused():
    (found,) = unused("eval/pictures.shape = (1, 2, 3)\n")
    assert "pictures is called, but not in scope 'eval'" in found


def test_a_binding_that_an_inner_scope_shadows_is_unused():
    (found,) = unused(
        "pictures.shape = (1, 1, 1)\neval/pictures.shape = (1, 2, 3)\njob.data = @eval/pictures()\n",
    )
    assert found.startswith("pictures.shape = (1, 1, 1)")
    assert "inner scope" in found


def test_a_binding_that_the_caller_sets_itself_is_unused():
    loaded("job.rate = 2.0\n")
    job(rate=3.0)
    (found,) = config.unused_bindings()
    assert "whoever calls job sets rate itself" in found


def test_an_outer_scope_serves_the_scopes_within():
    assert unused("a/pictures.shape = (1, 2, 3)\njob.data = @a/b/pictures()\n") == []


def test_choosing_another_optimizer_by_param_forgives_the_recipe_its_bindings_of_the_first():
    recipe = "slow_descent.rate = @warm_schedule()\nwarm_schedule.peak = %peak\npeak = 2.0\n"
    assert unused(recipe, "job.optimizer = @fast_descent") == []
    assert len(unused(recipe, "job.optimizer = @fast_descent", "slow_descent.decay = 0.1")) == 1
    assert len(unused("fast_descent.beta = 0.8\n", "job.steps = 3")) == 1


# ----------------------------------------------------------------------------------------------------- operative config


def test_the_operative_config_loads_again_and_gives_the_same(module, folder):
    module("users_shapes", "import gin\n@gin.configurable\ndef users_size(*, size: int = 1):\n    return size\n")
    long_name = "a quoted 'name' that is much too long for one line, " * 4
    recipe = f"""\
    import users_shapes
    rate = 0.25
    slow_descent.rate = %rate
    eval/pictures.shape = [4, 4, 3]
    eval/pictures.names = ["{long_name}", 'b']
    job.data = @eval/pictures()
    job.note = "{long_name}"
    job.limit = -1e-5
    anything.value = [@users_size(), {{'key': (%rate, None, True)}}]
    users_size.size = 7
    """
    loaded(recipe)
    first = [job(), anything()]
    config.save_operative("config.gin")
    text = config.operative_config()
    for name in ("import users_shapes", "rate = 0.25", "slow_descent.decay = 0.0", "job.wire = 'auto'"):
        assert name in text

    config.load(["config.gin"])
    second = [job(), anything()]
    assert config.unused_bindings() == []
    assert config.operative_config() == text
    assert first[0].pop("optimizer").rate == second[0].pop("optimizer").rate == 0.25
    assert first[0].pop("data").shape == second[0].pop("data").shape == (4, 4, 3)
    assert first == second == [first[0], [7, {"key": (0.25, None, True)}]]


def test_a_failing_write_leaves_the_old_file_and_nothing_else(folder, monkeypatch):
    loaded()
    job()
    write("run/config.gin", "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        config.save_operative("run/config.gin")
    assert os.listdir("run") == ["config.gin"]
    assert Path("run/config.gin").read_text() == "old"


# ------------------------------------------------------------------------------------------------------------- errors


@gin.configurable
def failing(*, error=None):
    raise error


@gin.configurable
def outer(*, inner=None):
    return inner()


def test_a_user_error_inside_configurables_keeps_its_type_and_message():
    cause = ValueError("the cause")
    problem = PeerError("a peer went away")
    problem.__cause__ = cause
    gin.bind_parameter("outer.inner", lambda: failing(error=problem))
    with pytest.raises(PeerError, match="In call to configurable") as wrapped:
        outer()
    assert config.clean_message(wrapped.value) == "a peer went away"
    assert wrapped.value.exit_code == 75
    with pytest.raises(PeerError) as caught, config.usage_errors():
        outer()
    assert caught.value is problem
    assert caught.value.__cause__ is cause


def test_an_error_of_ours_passes_unchanged():
    with pytest.raises(KeyError) as caught, config.usage_errors():
        failing(error=KeyError("ours"))
    assert "In call to configurable" in str(caught.value)
    with pytest.raises(TypeError), config.usage_errors():
        failing(error=TypeError("raised inside, no matter of bindings"))


def test_arguments_that_do_not_fit_a_configurable_are_the_users_mistake():
    with pytest.raises(UsageError, match="unexpected keyword argument 'num_classes'"), config.usage_errors():
        warm_schedule(num_classes=3)


def test_the_message_of_an_error_without_gin_is_its_own():
    assert config.clean_message(UsageError("plain")) == "plain"


def test_a_gin_without_the_private_parts_is_named(monkeypatch):
    from launcher import gin_private

    monkeypatch.delattr(gin.config, "_OPERATIVE_CONFIG")
    with pytest.raises(UsageError, match=r"gin-config==0\.5\.0"):
        gin_private.Gin()


def test_config_imports_no_tensorflow():
    program = "import sys, launcher.config; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    root = Path(config.__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
