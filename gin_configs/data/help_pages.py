"""LibreOffice's help pages in two languages: `help_en_de`, `help_en_fr` and `help_en_es`.

    import launcher.gin_configs.data.help_pages
    text_pairs.source = @HelpPages()
    HelpPages.name = 'help_en_de'

A paragraph of the help has the same id in every language, so (file, id) aligns translations exactly. Files are held out
whole; what they share with training files, word for word on either side, is taken out of the held-out pairs.

    python -m launcher.gin_configs.data help_en_de
    python -m launcher.gin_configs.data help_en_de --archives=/usr/share/libreoffice/help

The second reads an installed offline help, on any system: the folder that holds en-US and de.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gin

from launcher.data import tfds
from launcher.data.text import storage
from launcher.errors import MissingInputError, PeerError, UsageError
from launcher.gin_configs.data import debian
from launcher.gin_configs.data.help_html import paragraphs

# Language to its folder in the help.
_ENGLISH = "en-US"
_LANGUAGES = {"help_en_de": "de", "help_en_fr": "fr", "help_en_es": "es"}
NAMES = tuple(_LANGUAGES)

_VERSION = "1.0.0"  # of what is stored
_INSTALLED = Path("usr/share/libreoffice/help")

# One file in so many is held out.
_SHARE = 16

_PAIRS, _FACTS = "pairs.jsonl", "facts.json"

Pair = tuple[str, str]


@gin.configurable
class HelpPages:
    """The prepared pairs; see `launcher.data.text.source.Source`.

    Args:
      name: one of `NAMES`.
    """

    def __init__(self, name: str):
        self.name = name

    def check(self) -> None:
        """Raises UsageError, with the command to run, unless the pairs are prepared."""
        if not prepared_folder(self.name).is_dir():
            raise MissingInputError(
                f"data set {self.name!r} is not prepared: no data in {prepared_folder(self.name)}. "
                f"Run: python -m launcher.gin_configs.data {self.name} --data_dir={tfds.data_dir()}"
            )

    def digest(self) -> str:
        self.check()
        return json.loads((prepared_folder(self.name) / _FACTS).read_text())["digest"]

    def train(self) -> Iterator[Pair]:
        return ((source, target) for part, _, source, target in self._stored() if part == "train")

    def held_out(self) -> Iterator[Pair]:
        return ((source, target) for part, _, source, target in self._stored() if part == "held_out")

    def files(self, part: str) -> set[str]:
        """The help files that the pairs of "train" or "held_out" are from."""
        return {file for each, file, _, _ in self._stored() if each == part}

    def _stored(self) -> Iterator[tuple[str, str, str, str]]:
        self.check()
        with (prepared_folder(self.name) / _PAIRS).open(encoding="utf-8") as lines:
            for line in lines:
                part, file, source, target = json.loads(line)
                yield part, file, source, target


def prepared_folder(name: str) -> Path:
    """Where `prepare` puts the pairs."""
    return Path(tfds.data_dir()) / name / _VERSION


def is_held_out(file: str) -> bool:
    """Whether a help file, such as "swriter/01/04020000.html", is evaluated on."""
    return hashlib.sha256(file.encode()).digest()[0] % _SHARE == 0


def prepare(name: str, *, archives: Path | None, say: Callable[[str], None]) -> None:
    """Aligns the help pages of a Debian system's packages, or those in `archives`.

    Raises:
      UsageError: `archives` does not hold the pages, or the data directory cannot be written.
      PeerError: the packages cannot be had.
    """
    target = prepared_folder(name)
    if target.is_dir():
        say(f"{name} is prepared already: {_summary(target)}")
        return
    language = _LANGUAGES[name]
    if archives is not None:
        for folder in (_ENGLISH, language):
            if not (archives / folder / "text").is_dir():
                raise UsageError(
                    f"--archives={archives} must be the folder of LibreOffice's offline help, with {_ENGLISH}/text and "
                    f"{language}/text"
                )
    with storage.place_for(target) as partial:
        partial.mkdir()
        if archives is not None:
            english, other, origin = archives / _ENGLISH, archives / language, {"folder": str(archives)}
        else:
            english, other, origin = _fetch(name, language, say)
        say("aligning paragraphs")
        rows, counts = _rows(english / "text", other / "text")
        if not rows:
            raise UsageError(f"{english} and {other} have no paragraph in common: are these pages of one version?")
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        facts = {**counts, "origin": origin, "digest": storage.digest(content)}
        (partial / _PAIRS).write_text(content, encoding="utf-8")
        (partial / _FACTS).write_text(json.dumps(facts, indent=1))
        os.rename(partial, target)
    shutil.rmtree(_work(name), ignore_errors=True)
    say(f"done: {_summary(target)}")


def _summary(folder: Path) -> str:
    facts = json.loads((folder / _FACTS).read_text())
    return f"{facts['train']:,} training, {facts['held_out']:,} held-out pairs in {folder}"


def _work(name: str) -> Path:
    return Path(tfds.data_dir()) / "downloads" / f"{name}.partial"


def _fetch(name: str, language: str, say: Callable[[str], None]) -> tuple[Path, Path, dict[str, str]]:
    """The folders of both languages, and the SHA-256 of each package they are from."""
    if not debian.available():
        raise PeerError(
            f"{name} comes from Debian packages, and this system has no apt-get. Install LibreOffice with its offline "
            f"help in English and {language}, and run again with --archives=FOLDER, the folder with {_ENGLISH} and "
            f"{language}"
        )
    folders, origin = [], {}
    for code in (_ENGLISH, language):
        package = f"libreoffice-help-{code.lower()}"
        work = _work(name) / package
        work.mkdir(parents=True, exist_ok=True)
        archive, root = debian.unpack(package, work, say=say)
        origin[archive.name] = hashlib.sha256(archive.read_bytes()).hexdigest()
        folders.append(root / _INSTALLED / code)
    return folders[0], folders[1], origin


def _rows(english: Path, other: Path) -> tuple[list[tuple[str, str, str, str]], dict[str, Any]]:
    """(part, file, source, target) of every pair, no pair twice, and how many there are of what."""
    aligned: dict[Pair, str] = {}
    for path in sorted(english.rglob("*.html")):
        file = path.relative_to(english).as_posix()
        counterpart = other / file
        if counterpart.is_file():
            for pair in align(path.read_text(encoding="utf-8"), counterpart.read_text(encoding="utf-8")):
                # A page embeds others: a pair that a training file has is no test.
                if pair not in aligned or is_held_out(aligned[pair]):
                    aligned[pair] = file
    train = {pair: file for pair, file in aligned.items() if not is_held_out(file)}
    sources, targets = ({_folded(pair[side]) for pair in train} for side in (0, 1))
    held_out = {
        pair: file
        for pair, file in aligned.items()
        if pair not in train and _folded(pair[0]) not in sources and _folded(pair[1]) not in targets
    }
    counts = {"aligned": len(aligned), "train": len(train), "held_out": len(held_out)}
    parts = (("train", train), ("held_out", held_out))
    return [(part, file, *pair) for part, pairs in parts for pair, file in pairs.items()], counts


def align(english: str, other: str) -> Iterator[Pair]:
    """The translated paragraphs of a page, from its HTML in both languages.

    Left out are paragraphs that say the same in both, as they are not translated, and those without a letter. Ids that
    a page has more than once count only where both languages have them as often.
    """
    sides = [list(paragraphs(page)) for page in (english, other)]
    counts = [Counter(name for name, _ in side) for side in sides]
    numbered = []
    for side in sides:
        seen: Counter[str] = Counter()
        texts = {}
        for name, text in side:
            texts[name, seen[name]] = text
            seen[name] += 1
        numbered.append(texts)
    for (name, number), source in numbered[0].items():
        target = numbered[1].get((name, number))
        if not source or not target or counts[0][name] != counts[1][name]:
            continue
        if _folded(source) != _folded(target) and all(any(map(str.isalpha, text)) for text in (source, target)):
            yield source, target


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
