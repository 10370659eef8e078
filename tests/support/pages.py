"""Pages of the documentation, taken apart: the files they show, the commands they give, their links and headings.

What a page shows is told by its form alone:

- An indented block, or one fenced as `sh`, is commands, a line each; `\\` continues a line.
- A fenced block is a file where the sentence before it names one first and ends in a colon: "`wine.gin`, beside it:".
- Anything else, such as what a command prints, is fenced as `text`, or as the language it is in.
- `<!-- test: exit 64 -->` above a block says how its last command ends, `<!-- test: not run: WHY -->` that no test can
  run it.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

from places import ROOT

_FENCE = re.compile(r"(`{3,})(\w*)")
_NAMED = re.compile(r"`([\w./-]+\.(?:py|gin|sh|txt|tsv|csv|jsonl|yaml|sbatch|hosts))`")
_NOTE = re.compile(r"<!-- test: (.*) -->")
_SHELL = ("sh", "bash", "shell", "console")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code.

    Attributes:
      line: of the page, where it begins.
      language: of its fence; "" without one, "sh" where it is indented.
      text: what is in it.
      name: of the file that it shows, or "".
      note: what the page tells the tests of it, or "".
    """

    line: int
    language: str
    text: str
    name: str = ""
    note: str = ""

    @property
    def is_commands(self) -> bool:
        return self.language in _SHELL

    @property
    def exit_code(self) -> int:
        """Of its last command."""
        found = re.fullmatch(r"exit (\d+)", self.note)
        return int(found[1]) if found else 0

    @property
    def commands(self) -> list[str]:
        """Its commands without comments; a loop is one command."""
        if not self.is_commands:
            return []
        text = re.sub(r"(^|\s)#\s.*$", "", self.text, flags=re.MULTILINE)
        if re.search(r"^(while|for|if|until) ", text, re.MULTILINE):
            return [text.strip()]
        lines = text.replace("\\\n", " ").splitlines()
        return [re.sub(r"  +", " ", line.strip()) for line in lines if line.strip()]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in its order."""
    found: list[Block] = []
    lines = page.read_text("utf-8").splitlines()
    before = note = ""  # the paragraph above, and what the page tells of the block that follows
    number = 0
    while number < len(lines):
        line, start = lines[number], number
        fence = _FENCE.match(line)
        if fence:
            number += 1
            while not lines[number].startswith(fence[1]):
                number += 1
            text, language = "\n".join(lines[start + 1 : number]), fence[2]
        elif line.startswith("    ") and not (number and lines[number - 1].strip()):
            while number + 1 < len(lines) and (not lines[number + 1].strip() or lines[number + 1].startswith("    ")):
                number += 1
            text, language = "\n".join(one[4:] for one in lines[start : number + 1]).rstrip(), "sh"
        else:
            told = _NOTE.fullmatch(line)
            if told:
                note = told[1]
            elif line.strip():
                follows = number and lines[number - 1].strip() and not lines[number - 1].startswith("```")
                before, note = f"{before} {line}" if follows else line, ""
            number += 1
            continue
        sentence = re.split(r"(?<=[.:]) ", before)[-1]
        named = _NAMED.search(sentence) if sentence.rstrip().endswith(":") and language != "text" else None
        found.append(
            Block(line=start + 1, language=language, text=f"{text}\n", name=named[1] if named else "", note=note)
        )
        before = note = ""
        number += 1
    return found


def write_files(page: Path, folder: Path) -> list[str]:
    """Writes the files that a page shows; their names."""
    shown = [
        block for block in blocks(page) if block.name and not block.is_commands and not (ROOT / block.name).exists()
    ]
    for block in shown:
        path = folder / block.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, "utf-8")
    return [block.name for block in shown]


def words(command: str) -> list[str]:
    """The words of a command as a shell parts them."""
    return shlex.split(command, comments=True)


def prose(page: Path) -> str:
    """The page without its blocks and without what stands in backquotes."""
    text = page.read_text("utf-8")
    text = re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(`+)[^`].*?\1", "", text)


def spans(page: Path) -> list[str]:
    """What stands in backquotes within sentences and tables."""
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [one.replace("\\|", "|") for one in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)]


def links(page: Path) -> list[str]:
    """Targets of the links and pictures of a page, in Markdown and in HTML."""
    text = prose(page)
    return re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", text) + re.findall(
        r"(?:href|src|srcset)=\"([^\"]+)\"", text
    )


def anchors(page: Path) -> set[str]:
    """What links to the headings of a page end in, as GitHub makes it: a repeated one is numbered."""
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        said = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        plain = re.sub(r"[^\w\- ]", "", said.strip().lower()).replace(" ", "-")
        name, count = plain, 0
        while name in found:
            count += 1
            name = f"{plain}-{count}"
        found.add(name)
    return found
