"""The site of mkdocs.yml, made of the pages as they lie in the checkout: README.md is its first page.

Each page keeps its place, so that its links need no change, and brings along the files that it links to. docs/README.md
says which pages there are: each of its headings is a group, with its links in their order.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
INDEX = "docs/README.md"
# Beside those of the index: what they link to, for contributors.
MORE = ("CHANGELOG.md", "SECURITY.md")
NOTES = "benchmarks/notes"


def on_config(config: Any) -> Any:
    """The navigation, from the index."""
    sections = re.split(r"^## ", (ROOT / INDEX).read_text("utf-8"), flags=re.MULTILINE)[1:]
    groups: list[Any] = [{"Launcher": ["README.md", INDEX]}]
    for section in sections:
        pages = [page for page in linked(section, INDEX) if page.endswith(".md") and not page.startswith(NOTES)]
        groups.append({section.partition("\n")[0]: list(dict.fromkeys(pages))})
    groups[-1][next(iter(groups[-1]))] += [*MORE, {"Laboratory notes": _notes()}]
    config.nav = groups
    return config


def on_files(files: Files, config: Any) -> Files:
    """Pages and what they link to, in the place of what lies in docs_dir; of the theme's files all."""
    names = {"README.md", INDEX, *MORE, *_notes(), *linked((ROOT / INDEX).read_text("utf-8"), INDEX)}
    for page in [name for name in names if name.endswith(".md")]:
        names |= {one for one in linked((ROOT / page).read_text("utf-8"), page) if not one.endswith(".md")}
    kept = [file for file in files if file.abs_src_path is None or not _in(file.abs_src_path, ROOT / "docs")]
    made = [File.generated(config, name, abs_src_path=str(ROOT / name)) for name in sorted(names)]
    return Files([*kept, *made])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Notes and the reference are found after what explains; and the text as Python-Markdown takes it."""
    if page.file.src_uri == "CHANGELOG.md":
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith(("benchmarks/", "docs/reference_", "docs/architecture", "CONTRIBUTING")):
        page.meta["search"] = {"boost": 0.3}
    return indented(re.sub(r"(?<!`)<!-- ((result|table|Written).*?)?-->(?!`)", "", markdown))


def indented(text: str) -> str:
    """What belongs to an item of a list, indented by four, as Python-Markdown wants it; CommonMark goes by the mark."""
    lines, more, fence, loose = [""], "", False, False
    for line in text.splitlines():
        fence ^= line.startswith("```")
        mark = re.match(r"(?:-|\d+\.) +", line)
        if mark and not fence:
            more = " " * (4 - len(mark[0]))
            if loose and lines[-1]:  # or it goes on with the last paragraph or block of the item above
                lines.append("")
            loose = False
        elif line and not line.startswith(" "):
            more, loose = "", False
        elif not line and more:
            loose = True
        lines.append(f"{more}{line}" if line.startswith("  ") else line)
    return "\n".join(lines)


def linked(text: str, page: str) -> list[str]:
    """Files of the checkout that a page links to or shows, in its order."""
    text = re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    found = []
    for target in re.findall(r"\]\(([^)\s#]+)", re.sub(r"(`+)[^`].*?\1", "", text)):
        name = os.path.normpath(os.path.join(os.path.dirname(page), target))
        if "://" not in target and (ROOT / name).is_file():
            found.append(name)
    return found


def _notes() -> list[str]:
    """README first."""
    names = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / NOTES).glob("*.md"))
    return sorted(names, key=lambda name: not name.endswith("README.md"))


def _in(path: str, folder: Path) -> bool:
    return Path(path).is_relative_to(folder)
