"""What the README shows works as it stands there, and what the documentation names exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from places import PYTHONPATH, ROOT

from launcher.main import main, parse

OWN_TASK = (ROOT / "docs/own_task.md").read_text()
DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
OWN = {"PYTHONPATH": PYTHONPATH}
FLAGS_OF_OTHER_PROGRAMS = {"filter", "internal-ips"}


def code_block(containing: str) -> str:
    blocks = re.findall(r"```\w*\n(.*?)```", OWN_TASK, re.DOTALL)
    return next(block for block in blocks if containing in block)


def test_bring_your_own_task_trains_on_two_replicas_as_shown(run_launcher, tmp_path):
    module, recipe = code_block("class Wine"), code_block("train.task = @Wine()")
    assert len(module.splitlines()) + len(recipe.splitlines()) < 50
    assert len(module.splitlines()) < 40
    (tmp_path / "wine.py").write_text(module)
    (tmp_path / "wine.gin").write_text(recipe)
    assert "python -m launcher.main --gin_file=wine.gin --replicas=2" in OWN_TASK
    finished = run_launcher("--gin_file=wine.gin", "--replicas=2")
    assert finished.returncode == 0, finished.stderr
    summary = json.loads((tmp_path / "runs/wine/summary.json").read_text())
    assert summary["num_replicas"] == 2
    assert summary["metrics"]["eval"]["accuracy"] > 0.9


def test_every_recipe_is_named():
    text = "".join((ROOT / document).read_text() for document in DOCUMENTS)
    recipes = {path.name for path in (ROOT / "gin_configs").glob("*.gin")}
    assert recipes <= set(re.findall(r"\w+\.gin", text))


def sources(*folders: str) -> str:
    return "\n".join(
        path.read_text()
        for one in folders
        for path in (ROOT / one).rglob("*.*")
        if path.suffix in (".py", ".sh", ".sbatch")
    )


def unknown_part(dotted: str) -> str:
    """What of a dotted name is neither a package nor a module, nor a name in the module before it."""
    place, parts = ROOT, dotted.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    module = place / f"{parts[0]}.py" if parts else place / "__init__.py"
    names = parts[1:]
    if not module.is_file():  # perhaps a name of the package itself, such as launcher.load
        module, names = place / "__init__.py", parts
    return ".".join(name for name in names if not re.search(rf"\b{name}\b", module.read_text()))


def commands(text: str) -> list[list[str]]:
    """The launcher's commands in a page, taken apart as a shell does; of a recipe that a run needs."""
    lines = re.findall(r"^    (python -m launcher\.(?:main|launch) .*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line, comments=True)[2:] for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_programs_and_commands_can_be_read(document):
    text = (ROOT / document).read_text()
    for program in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        compile(program, document, "exec")
    for module, *flags in commands(text):
        if module == "launcher.main":
            parse([module, *flags])


REFUSED = re.findall(r"^\| `['\"](.*)['\"]` \| `(.*)` \|$", (ROOT / "docs/gin.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("binding", "message"), REFUSED)
def test_gin_is_refused_as_the_page_says(binding, message, tmp_path, monkeypatch, capsys):
    (recipe,) = re.findall(r"^```\n(.*?)^```", (ROOT / "docs/gin.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "first.gin").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    assert main(["launcher", "--gin_file=first.gin", f"--gin_param={binding}", "--dry_run"]) == 64
    assert message.replace("\\|", "|") in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.heavy
def test_the_programs_of_the_pages_run_as_shown(run_launcher, tmp_path):
    of_keras, of_model = ((ROOT / f"docs/{page}.md").read_text() for page in ("keras", "model_out"))
    names = {"digits.py": of_keras, "mine.py": of_keras, "mine.gin": of_keras, "use.py": of_model, "serve.py": of_model}
    for name, text in names.items():
        (block,) = re.findall(rf"`{name}`[^\n]*:\n\n```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        (tmp_path / name).write_text(block)
    for line in re.findall(r"^    python ((?:-m launcher\.main )?\S.*)$", of_model, re.MULTILINE):
        if not (tmp_path / "runs/digits/model.keras").exists():
            subprocess.run([sys.executable, "digits.py"], cwd=tmp_path, check=True, env=os.environ | OWN)
        subprocess.run([sys.executable, *shlex.split(line)], cwd=tmp_path, check=True, env=os.environ | OWN)
    finished = run_launcher("--gin_file=mine.gin", "--gin_param=build.units = 32")
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_module_test_flag_and_binding_named_exists(document):
    text = (ROOT / document).read_text()
    for table in re.findall(r"^\| there \| here \|\n(?:\|.*\n)+", text, re.MULTILINE):
        ours = re.sub(r"^\|.*? \| ", "| ", table, flags=re.MULTILINE)  # the other column names what is not ours
        text = text.replace(table, ours)
    folders = "launcher|tests|scripts|models|benchmarks|docs|gin_configs"
    paths = set(re.findall(rf"(?<![\w/])(?:{folders})/[\w./-]*\.(?:py|sh|md|gin|yaml|sbatch)\b", text))
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    modules = set(re.findall(r"(?<![\w/])launcher(?:\.\w+)+", text))
    assert [name for name in modules if unknown_part(name)] == []
    tests = set(re.findall(r"\btest_\w+\b(?!\.)", text))
    assert [name for name in tests if f"def {name}(" not in sources("tests")] == []
    flags = (
        set(re.findall(r"(?<![\w-])--([a-z]\w+(?:-\w+)*)", text)) - FLAGS_OF_OTHER_PROGRAMS - set(parse(["launcher"]))
    )
    defined, programs = sources("launcher"), sources("scripts", "benchmarks")
    assert [name for name in flags if f'"{name}"' not in defined and f"--{name}" not in programs] == []
    recipe = (ROOT / "launcher/run/recipe.py").read_text()
    bindings = set(re.findall(r"\btrain\.(?!py\b)(\w+)\b", text))
    assert [name for name in bindings if not re.search(rf"^    {name}: ", recipe, re.MULTILINE)] == []
