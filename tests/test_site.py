"""The pages as a site: built strictly, found by its search, and read as Markdown has them elsewhere."""

from __future__ import annotations

import html.parser
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from places import ROOT

pytest.importorskip("material")
markdown_it = pytest.importorskip("markdown_it")

pytestmark = pytest.mark.slow

PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]
# What a user might type, and the page that answers.
QUESTIONS = {
    "out of memory": "docs/memory/",
    "nan loss": "docs/recovery/",
    "killed checkpoint": "docs/recovery/",
    "two gpus": "docs/choose_a_strategy/",
    "export predict": "docs/model_out/",
    "callbacks EarlyStopping": "docs/keras_callbacks/",
    "class_weight": "docs/keras_arguments/",
    "train_step GAN": "docs/keras_train_step/",
    "exit 75": "docs/reference/",
    "sbatch": "docs/slurm/",
    "torch.compile": "docs/how_fast/",
    "checkpoint_every": "docs/reference_bindings/",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as CI does."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder, "--config-file", "mkdocs.yml"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    return folder


def made(page: str, site):
    name = re.sub(r"(^|/)README$", r"\1", page.removesuffix(".md"))
    return site / name / "index.html"


class Seen(html.parser.HTMLParser):
    """Counts of elements in the article of a page, and what the page fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.fetched: list[str] = []
        self.inside = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.inside += tag == "article"
        if self.inside and tag in ("h1", "h2", "h3", "h4", "li", "tr", "pre", "img"):
            self.counts[tag] += 1
        if tag in ("script", "img") or (tag == "link" and given.get("rel") in ("stylesheet", "preconnect")):
            self.fetched.append(given.get("src") or given.get("href") or "")

    def handle_endtag(self, tag):
        self.inside -= tag == "article"


def test_every_page_is_in_the_site_as_markdown_has_it_and_fetches_nothing_from_elsewhere(site):
    """Python-Markdown takes some lists and blocks for prose where CommonMark, as GitHub, does not."""
    commonmark = markdown_it.MarkdownIt("commonmark").enable("table")
    for page in PAGES:
        shown = Seen(made(page, site).read_text("utf-8"))
        expected = Seen(f"<article>{commonmark.render((ROOT / page).read_text('utf-8'))}</article>")
        assert shown.counts == expected.counts, page
        assert [one for one in shown.fetched if "//" in one] == []


def test_search_finds_the_page_that_answers(site):
    sections = json.loads((site / "search/search_index.json").read_text("utf-8"))["docs"]
    for question, page in QUESTIONS.items():
        words = question.lower().split()
        found = {
            one["location"].split("#")[0]
            for one in sections
            if all(word in f"{one['title']} {one['text']}".lower() for word in words)
        }
        assert page in found, f"{question}: only in {sorted(found)}"
