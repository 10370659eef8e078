"""Loaded recipes in use: imports, what is required and what is read, the operative config, errors on the way."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import gin
import pytest
from gin_objects import anything, job, loaded, refusal, warm_schedule, write

from launcher.config import gin_bindings, gin_used
from launcher.errors import PeerError, UsageError, nearest
from launcher.run.actions.base import SaveConfig

# ------------------------------------------------------------------------------------------------------------- imports


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
    gin_bindings.load([])
    with (
        pytest.raises(UsageError, match=r"required and not bound: job.optimizer, job.data, job.steps"),
        gin_bindings.usage_errors(),
    ):
        job()


# ---------------------------------------------------------------------------------------------------------------- used


def unused(text="", *params):
    loaded(text, *params)
    job()
    return gin_used.unused_bindings()


def test_nothing_is_unused_when_everything_was_read():
    assert unused("rate = 0.5\nslow_descent.rate = %rate\npictures.shape = (1, 2, 3)\n") == []
    gin_used.check_all_used()


def test_a_binding_of_what_is_never_called_says_what_is_called_instead():
    (found,) = unused("fast_descent.beta = 0.8\n")
    assert found == (
        "fast_descent.beta = 0.8 (recipe.gin line 5): fast_descent is never called; job.optimizer is @slow_descent"
    )
    with pytest.raises(UsageError, match=r"bound but never used: fast_descent\.beta"):
        gin_used.check_all_used()


def test_a_macro_that_only_unused_bindings_mention_is_unused_too():
    found = unused("beta = 0.8\nfast_descent.beta = %beta\n")
    assert len(found) == 2
    assert "only fast_descent.beta mentions it" in found[0]
    with pytest.raises(UsageError, match=r"never used: \n  beta = .*\n  fast_descent.beta = "):
        gin_used.check_all_used()


def test_a_binding_in_a_scope_nobody_enters_is_unused():
    (found,) = unused("eval/pictures.shape = (1, 2, 3)\n")
    assert "no call of pictures in scope 'eval' takes shape from it" in found


def test_a_binding_that_an_inner_scope_shadows_is_unused():
    (found,) = unused(
        "pictures.shape = (1, 1, 1)\neval/pictures.shape = (1, 2, 3)\njob.data = @eval/pictures()\n",
    )
    assert found.startswith("pictures.shape = (1, 1, 1)")
    assert "no call of pictures takes shape from it: " in found and "an inner scope does" in found


def test_a_binding_that_the_caller_sets_itself_is_unused():
    loaded("job.rate = 2.0\n")
    job(rate=3.0)
    (found,) = gin_used.unused_bindings()
    assert "no call of job takes rate from it: whoever calls it sets rate itself" in found


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
    anything.value = [@users_size(), {{'key': (%rate, None, True)}}, (-1e999, 2)]
    users_size.size = 7
    """
    loaded(recipe)
    first, notes = [job(), anything()], []
    SaveConfig(".", notes.append).after_first_step()
    text = gin_used.operative_config()
    assert notes == []
    for name in ("import users_shapes", "rate = 0.25", "slow_descent.decay = 0.0", "job.wire = 'auto'"):
        assert name in text

    gin_bindings.load(["config.gin"])
    second = [job(), anything()]
    assert gin_used.unused_bindings() == []
    assert gin_used.operative_config() == text
    assert first[0].pop("optimizer").rate == second[0].pop("optimizer").rate == 0.25
    assert first[0].pop("data").shape == second[0].pop("data").shape == (4, 4, 3)
    assert first == second == [first[0], [7, {"key": (0.25, None, True)}, (-math.inf, 2)]]


def test_a_failing_write_leaves_the_old_file_and_nothing_else(folder, monkeypatch):
    loaded()
    job()
    write("run/config.gin", "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    notes = []
    SaveConfig("run", notes.append).after_first_step()
    assert "disk full" in notes[0]
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
    assert wrapped.value.exit_code == 75
    with pytest.raises(PeerError) as caught, gin_bindings.usage_errors():
        outer()
    assert caught.value is problem
    assert str(problem) == "a peer went away"
    assert caught.value.__cause__ is cause


def test_an_error_of_ours_passes_unchanged():
    gin.bind_parameter("outer.inner", lambda: nearest(3, {"a name"}))
    with pytest.raises(AttributeError) as caught, gin_bindings.usage_errors():
        outer()
    assert "In call to configurable" in str(caught.value)


@pytest.mark.parametrize("kind", [KeyError, TypeError, FileNotFoundError])
def test_an_error_in_a_users_python_is_told_with_its_place(kind):
    said = r"test_config_use.py line \d+, in failing\(\): \w+Error: .?theirs"
    with pytest.raises(UsageError, match=said) as caught, gin_bindings.usage_errors():
        failing(error=kind("theirs"))
    assert isinstance(caught.value.__cause__, kind)


def test_an_error_of_the_machines_in_a_users_python_stays_worth_a_retry():
    with pytest.raises(ConnectionError), gin_bindings.usage_errors():
        failing(error=ConnectionError("no route to the data"))


def test_arguments_that_do_not_fit_a_configurable_are_the_users_mistake():
    with pytest.raises(UsageError, match="unexpected keyword argument 'num_classes'"), gin_bindings.usage_errors():
        warm_schedule(num_classes=3)


def test_a_gin_without_the_private_parts_is_named(monkeypatch):
    from launcher.config import gin_private

    monkeypatch.delattr(gin.config, "_OPERATIVE_CONFIG")
    with pytest.raises(UsageError, match=r"gin-config==0\.5\.0"):
        gin_private.Gin()


def test_config_imports_no_tensorflow():
    program = (
        "import sys, launcher.config.gin_bindings; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    root = Path(gin_bindings.__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
