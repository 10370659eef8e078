"""What the README and the pages of the documentation show works as it stands there, and what they name exists."""

from __future__ import annotations

import json
import re
import urllib.parse

import pages
import pytest
from places import ROOT

from launcher.main import main, parse

OWN_TASK = (ROOT / "docs/own_task.md").read_text()
DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
NOTES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks/notes").glob("*.md"))
OTHER_PROGRAMS = "kubectl|docker|gcloud|squeue|salloc"
FLAGS_OF_OTHER_PROGRAMS = {
    "account",
    "bind-to",
    "container-image",
    "container-mounts",
    "filter",
    "internal-ips",
    "logdir",
    "partition",
}


def code_block(containing: str) -> str:
    blocks = re.findall(r"```\w*\n(.*?)```", OWN_TASK, re.DOTALL)
    return next(block for block in blocks if containing in block)


@pytest.mark.nightly  # test_user_mistakes.py trains it too
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
    contents = json.loads((ROOT / "launcher/model_dir/contents.json").read_text())
    described = {name.split("/")[0] for name in contents}
    assert {path.name for path in (tmp_path / "runs/wine").iterdir()} <= described, (
        "see launcher/model_dir/contents.json"
    )


def test_every_recipe_is_named():
    text = "".join((ROOT / document).read_text() for document in DOCUMENTS)
    recipes = {path.name for path in (ROOT / "gin_configs").glob("*.gin")}
    assert recipes <= set(re.findall(r"\w+\.gin", text))


@pytest.mark.parametrize("document", DOCUMENTS + NOTES)
def test_every_row_stands_in_its_table(document):
    """As Markdown has it: a second line of dashes, as many columns in each row, nothing between two rows."""
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        first, *rows = table.splitlines()
        assert rows and re.fullmatch(r"[|: -]+", rows[0]), first
        columns = first.count("|")
        assert [row for row in rows if row.replace(r"\|", "").count("|") != columns] == []


@pytest.mark.parametrize("document", DOCUMENTS + NOTES)
def test_every_link_leads_somewhere(document):
    """Files and headings of this checkout; of other sites, only whether the address can be one."""
    page = ROOT / document
    wrong = []
    for target in pages.links(page):
        parts = urllib.parse.urlsplit(target)
        if parts.scheme or parts.netloc:
            if parts.scheme not in ("https", "http") or "." not in parts.netloc:
                wrong.append(target)
            continue
        to = (page.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else page
        leads = to.is_relative_to(ROOT) and to.exists()
        if not leads or (parts.fragment and (to.suffix != ".md" or parts.fragment not in pages.anchors(to))):
            wrong.append(target)
    assert wrong == []


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


REFUSED = re.findall(r"^\| `['\"](.*)['\"]` \| `(.*)` \|$", (ROOT / "docs/gin.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("binding", "message"), REFUSED)
def test_gin_is_refused_as_the_page_says(binding, message, tmp_path, monkeypatch, capsys):
    (recipe,) = re.findall(r"^```\n(.*?)^```", (ROOT / "docs/gin.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "first.gin").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    assert main(["launcher", "--gin_file=first.gin", f"--gin_param={binding}", "--dry_run"]) == 64
    assert message.replace("\\|", "|") in capsys.readouterr().err


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_module_test_flag_and_binding_named_exists(document):
    text = (ROOT / document).read_text()
    for table in re.findall(r"^\| there \| here \|\n(?:\|.*\n)+", text, re.MULTILINE):
        ours = re.sub(r"^\|.*? \| ", "| ", table, flags=re.MULTILINE)  # the other column names what is not ours
        text = text.replace(table, ours)
    for other in re.findall(rf"^ +(?:{OTHER_PROGRAMS}) (?:.*\\\n)*.*$", text, re.MULTILINE):
        text = text.replace(other, "")
    folders = "launcher|tests|scripts|models|benchmarks|docs|gin_configs"
    paths = set(re.findall(rf"(?<![\w/])(?:{folders})/[\w./-]*\.(?:py|sh|md|gin|yaml|sbatch)\b", text))
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    groups = {"launcher.backends", "launcher.engines", "launcher.sinks"}  # of entry points
    modules = set(re.findall(r"(?<![\w/])launcher(?:\.\w+)+", text)) - groups
    assert [name for name in modules if unknown_part(name)] == []
    tests = set(re.findall(r"\btest_\w+\b(?!\.)", text))
    assert [name for name in tests if f"def {name}(" not in sources("tests")] == []
    flags = (
        set(re.findall(r"(?<![\w-])--([a-z]\w+(?:-\w+)*)", text)) - FLAGS_OF_OTHER_PROGRAMS - set(parse(["launcher"]))
    )
    defined, programs = sources("launcher"), sources("scripts", "benchmarks")
    ours = [name for name in flags if f"--{name}" not in programs]
    assert [name for name in ours if not re.search(rf'"(--)?{name}"|^    {name}: .*= flag\(', defined, re.M)] == []
    recipe = (ROOT / "launcher/run/recipe.py").read_text()
    bindings = set(re.findall(r"\btrain\.(?!py\b)(\w+)\b", text))
    assert [name for name in bindings if not re.search(rf"^    {name}: ", recipe, re.MULTILINE)] == []


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    listed = set(re.findall(r"\((\w+\.md)", index))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} == listed


@pytest.mark.parametrize("document", DOCUMENTS)
def test_page_describes_what_is_and_not_how_it_came_about(document):
    """A table that is older than the code, or what was tried, belongs to benchmarks/notes."""
    stale = r"\b(older than the command|now says|it now|was tried|were tried|no longer)\b"
    found = re.search(stale, pages.prose(ROOT / document))
    assert found is None or document in ("README.md", "docs/reference_bindings.md", "docs/install.md"), found
