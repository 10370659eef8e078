"""Errors in code of notebooks' cells, which Python knows by the names of files that do not exist."""

import pytest

from launcher.errors import UsageError, notebook, user_code

NAMES = {"<ipython-input-3-0a1b2c>": "In[3]", "/tmp/ipykernel_12/345.py": "/tmp/ipykernel_12/345.py"}


@pytest.mark.parametrize("file", NAMES)
def test_a_mistake_in_a_cell_is_the_users_and_names_the_cell(file):
    cell = {}
    exec(compile("def build():\n    return undefined", file, "exec"), cell)
    with pytest.raises(NameError) as raised:
        cell["build"]()
    told = user_code.mistake(raised.value)
    assert isinstance(told, UsageError) and str(told).startswith(f"{NAMES[file]} line 2, in build(): NameError")
    assert notebook.with_cells(f"see {file}:2") == f"see {NAMES[file]}:2"  # outside of a kernel nobody knows the second


@pytest.mark.parametrize("file", ["<string>", "<frozen runpy>", "/home/me/mine.py", "ipykernel_launcher.py"])
def test_what_is_no_cell_is_not_taken_for_one(file):
    assert not notebook.is_cell(file) and notebook.with_cells(file) == file


def test_ipython_shows_the_message_alone_and_the_traceback_where_it_is_asked_for(monkeypatch):
    error = UsageError("say what to do")
    assert "".join(error._render_traceback_()).endswith("UsageError\x1b[0m: say what to do")
    monkeypatch.setenv("LAUNCHER_TRACEBACK", "1")
    try:
        raise error
    except UsageError:
        assert error._render_traceback_()[0] == "Traceback (most recent call last):"
