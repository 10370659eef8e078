"""report.html is one self-contained page that says what the files say."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from launcher.reporting.metrics_file import MetricsFile
from launcher.reporting.report import write_report

SUMMARY: dict[str, Any] = {
    "status": "failed",
    "exit_code": 70,
    "error": "loss <nan> & gone",
    "metrics": {"train": {"loss": float("nan")}, "eval": {"accuracy": 0.96875}},
    "step": 30,
    "seconds": {"train": 12.34, "total": 20.0},
    "versions": {"tensorflow": "2.21.0"},
}


class Page(HTMLParser):
    """Collects the text, the images and whatever would be fetched from elsewhere; fails on tags that do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.words = ""
        self.images: list[str] = []
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("src", "href"):
                (self.images if (value or "").startswith("data:") else self.links).append(value or "")
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + "\n"


def log(folder: Path) -> None:
    metrics = MetricsFile(str(folder))
    for step in (10, 20, 30):
        loss = float("nan") if step == 30 else 1 / step
        metrics.train({"step": step, "loss": loss, "accuracy": 0.5, "loss_scale": 2.0**15 / step, "skipped_steps": 2})
        metrics.evaluation({"step": step, "loss": 1 / step, "accuracy": 0.25})


def written(folder: Path) -> Page:
    write_report(str(folder), plan={"model": "<resnet>"}, summary=SUMMARY)
    return Page((folder / "report.html").read_text())


@pytest.mark.usefixtures("matplotlib")
def test_the_page_holds_everything_itself(tmp_path: Path) -> None:
    log(tmp_path)
    page = written(tmp_path)
    assert page.links == []
    (image,) = page.images
    content = base64.b64decode(image.removeprefix("data:image/png;base64,"))
    assert content.startswith(b"\x89PNG\r\n")


def test_the_page_says_how_it_ended_and_with_what(tmp_path: Path) -> None:
    log(tmp_path)
    words = re.sub(r"\s+", " ", written(tmp_path).words)
    assert "failed at step 30" in words
    assert "loss <nan> & gone" in words
    assert "train loss nan eval accuracy 0.96875" in words
    assert "model <resnet>" in words
    assert "train 12.3 total 20.0" in words
    assert "tensorflow 2.21.0" in words
    assert "Steps skipped because gradients were not finite: 2." in words


def test_without_matplotlib_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    log(tmp_path)
    page = written(tmp_path)
    assert page.images == []
    assert "matplotlib, which is not installed" in page.words
    assert "accuracy" in page.words


def test_a_run_that_failed_before_its_first_event_has_a_page(tmp_path: Path) -> None:
    page = written(tmp_path / "run")
    assert "Nothing was measured." in page.words
